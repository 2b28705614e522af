"""Test README: the output of its program, and its figures against the ledgers."""

import re
from itertools import zip_longest
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
GPU = "nvidia-h100-80gb-hbm3"
LEDGERS = {"cpu-amd-epyc": "cpu", "cpu-intel-r-xeon-r-processor": "cpu", GPU: "cuda"}  # backends


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


@pytest.mark.parametrize("page_of", ["README.md", "docs/zh/README.md"])
def test_figures_are_those_of_the_ledgers(page_of: str) -> None:
    """Each speedup in README is the mean, worst and best case of the newest ledger."""
    columns = []
    for folder, backend in LEDGERS.items():
        runs = {run.op: run for run in page.newest(page.RESULTS)[folder]}
        columns.append([runs[op].ratios[backend] for op in ("scaler", "step", "gemm")])
        if folder != GPU:
            columns[-1] += [runs["train"].ratios["cpu"], runs["train"].against_fp32("cpu")]
    text = (ROOT / page_of).read_text()
    rows = re.findall(r"\|.* AMD EPYC .*\n.*\n((?:\|.*\n)+)", text)[0].splitlines()
    for row, *cases_of in zip_longest(rows, *columns):
        for said, cases in zip(cells(row)[2:], cases_of, strict=True):
            values = cases.values() if cases else ()
            figures = [geometric_mean(values), min(values), max(values)] if cases else []
            assert re.findall(r"\d[\d.]*", said) == [*map(ratio_text, figures)], row
            assert bool(re.search("slower|更慢", said)) == any(x < 1 for x in figures[:1]), row


def test_counts_are_those_of_measuring() -> None:
    """The launches, copies and waits in README equal the counts of docs/measuring.md."""
    (counted,) = re.findall(r"\| digits \| AdamW \| yes \| (.*) \|", page.PAGE.read_text())
    theirs, ours = (cell.split(", ") for cell in counted.split(" | ")[2:])
    (rows,) = re.findall(r"\| \| launches.*\n.*\n((?:\|.*\n)+)", TEXT)
    assert [cells(row)[1:4] for row in rows.splitlines()] == [theirs, ours]


def test_readme_is_short() -> None:
    """README has at most 900 words."""
    assert len(TEXT.split()) <= 900
