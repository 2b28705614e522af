"""Test README: the output of its program, and its figures against the ledgers."""

import re
from pathlib import Path
from statistics import geometric_mean

import pytest
import torch

from harness import page
from harness.table import ratio_text

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text()
(PROGRAM,) = re.findall(r"```python\n(.*?)```\n", TEXT, re.DOTALL)
(PRINTED,) = re.findall(r"```\n\n    (loss .*)\n", TEXT)
CPU, GPU, GPU_FOLDER = "AMD EPYC", "NVIDIA H100", "nvidia-h100-80gb-hbm3"


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| ").split(" | ")]


def test_the_program_prints_what_readme_says(capsys: pytest.CaptureFixture[str]) -> None:
    """The program of README prints the line that follows it."""
    exec(PROGRAM, {})
    assert capsys.readouterr().out == PRINTED + "\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="README's scale is that of a CPU")
def test_torch_lowers_the_scale_in_the_same_program(capsys: pytest.CaptureFixture[str]) -> None:
    """The program of README ends with a lower scale under torch.amp, as described in README."""
    program = PROGRAM.replace("from amp_ext import", "from torch.amp import")
    program = program.replace("from amp_ext.optim", "from torch.optim")
    exec(re.sub(r", skipped \{.*\}", "", program), {})
    scale = re.search(r"scale falls to (\d+)", TEXT)[1]
    assert capsys.readouterr().out == f"loss 0.00, scale {scale}\n"


def test_figures_are_those_of_the_ledgers() -> None:
    """Each speedup in README is the mean, worst and best case of the newest ledger."""
    newest = page.newest(page.RESULTS)
    runs = {run.op: run for run in newest["cpu-amd-epyc"]}
    ratios = [runs[op].ratios["cpu"] for op in ("scaler", "step", "gemm", "train")]
    ratios.append(runs["train"].against_fp32("cpu"))
    on_gpu = {run.op: run.ratios["cuda"] for run in newest[GPU_FOLDER] if "cuda" in run.ratios}
    gpu_ratios = [on_gpu["scaler"], on_gpu["step"], on_gpu["gemm"], None, None]
    rows = re.findall(rf"\| CPU: {CPU}.*{GPU}.*\n.*\n((?:\|.*\n)+)", TEXT)[0].splitlines()
    for row, on_cpu, on_gpu in zip(rows, ratios, gpu_ratios, strict=True):
        *_, cpu, gpu = cells(row)
        for said, cases in ((cpu, on_cpu), (gpu, on_gpu)):
            if cases is None:
                assert said == "not yet measured", row
                continue
            worst, best = (ratio_text(end(cases.values())) for end in (min, max))
            mean = geometric_mean(cases.values())
            assert said.endswith(f"({worst}x to {best}x)"), row
            assert f"{ratio_text(mean)}x" in said, row
            assert ("slower" in said) == (mean < 1), row


def test_counts_are_those_of_measuring() -> None:
    """The launches, copies and waits in README equal the counts of docs/measuring.md."""
    (counted,) = re.findall(r"\| digits \| AdamW \| yes \| (.*) \|", page.PAGE.read_text())
    theirs, ours = (cell.split(", ") for cell in counted.split(" | ")[2:])
    (rows,) = re.findall(r"\| \| launches.*\n.*\n((?:\|.*\n)+)", TEXT)
    assert [cells(row)[1:4] for row in rows.splitlines()] == [theirs, ours]


def test_readme_is_short() -> None:
    """README has at most 900 words."""
    assert len(TEXT.split()) <= 900
