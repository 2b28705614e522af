"""Time amp_ext against torch, interleaved in one run, with a check of every result.

    python bench/run.py unscale --device cpu
    python bench/run.py scaler gemm --device cpu --quick --json results.jsonl
    python bench/run.py all --device cuda --dtype bf16
    python bench/run.py unscale grad_norm --device cpu --base main

A provider with a wrong result gets no ratio, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from harness import base, environment, ledger, table, timing
from harness.measure import measure
from harness.registry import DTYPES, OPS, Op, Setup, load

ALL = "all"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog=__doc__.partition("\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # figures know a quick run by its command
    )
    add = parser.add_argument
    add("ops", nargs="+", choices=(*OPS, ALL), metavar="OP", help=f"{', '.join(OPS)}, or {ALL}")
    add("--device", choices=("cpu", "cuda"), required=True)
    add("--dtype", choices=DTYPES, help="only this dtype; by default an op's usual ones")
    add("--quick", action="store_true", help="small inputs, few repeats: seconds")
    add("--filter", default="", metavar="TEXT", help="only cases named like this")
    add("--json", type=Path, metavar="FILE", help="append one line a measurement")
    add("--results", type=Path, metavar="DIR", help="append to DIR/<device>/<date>-<commit>.jsonl")
    add("--seconds", type=float, metavar="S", help="measure each line of a table for so long")
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="time torch.compile too, which takes its time; by default on a GPU without --quick",
    )
    add("--ours", action="store_true", help="amp_ext alone, without ratios")
    add("--base", metavar="REV", help="compare with the amp_ext of another commit")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; use --device cpu")
    if options.results and (options.json or options.base):
        parser.error("--results stands alone: --json FILE, or --base REV with --json FILE")
    options.ops = list(dict.fromkeys(OPS if ALL in options.ops else options.ops))
    if options.compile is None:
        options.compile = options.device == "cuda" and not options.quick
    return options


def run_op(op: Op, options: argparse.Namespace, about: dict[str, object]) -> list[dict]:
    """Measure the op's cases and show their table: its records, [] where no case is asked for.

    Records are also appended to the file that options ask for, case by case.
    """
    setup = Setup(
        device=torch.device(options.device),
        quick=options.quick,
        dtype=DTYPES.get(options.dtype),
        compiled=options.compile,
    )
    cases = [case for case in op.cases(setup) if options.filter in case.name]
    if not cases:
        named = f"{options.filter!r} in its name" if options.filter else f"{options.dtype} operands"
        print(f"no case of {op.name} has {named}", file=sys.stderr)
        return []
    budget = (timing.QUICK if setup.quick else timing.FULL)[options.device]
    if options.seconds is not None:
        budget = replace(budget, seconds=options.seconds)
    baselines = list(dict.fromkeys(case.baseline for case in cases))
    table.show(table.heading(op, about, baselines))
    records: list[dict] = []
    for case in table.progress([op.limit(setup), *cases], op.name):
        found = measure(case, op, setup, budget, about, options.ours)
        table.show(table.rows(found, op.rate))
        if options.json:
            ledger.append(options.json, found)
        records += found
        if fault := timing.device_fault():
            print(f"{op.name} ends here, the GPU is lost: {fault}", file=sys.stderr)
            break
    table.show(table.mean_rows(records))
    foreign = max(record["foreign_cores"] or 0.0 for record in records)
    if foreign > timing.FOREIGN_CORES:
        table.show(
            [f"note: other processes held up to {foreign:.1f} cores; repeat on a quiet machine"]
        )
    return records


def compare_with_base(options: argparse.Namespace) -> int:
    """Run the same benchmarks on the base's amp_ext and on the present one; show ratios."""
    arguments = ["--device", options.device, "--filter", options.filter, "--ours", "--no-compile"]
    if options.dtype:
        arguments += ["--dtype", options.dtype]
    if options.quick:
        arguments.append("--quick")
    if options.seconds is not None:
        arguments += ["--seconds", str(options.seconds)]
    try:
        before, now = base.measure_both(options.base, options.ops, arguments)
    except base.BuildError as error:
        print(f"--base {options.base}: {error}", file=sys.stderr)
        return 2
    if not before and not now:
        return 2
    if options.json:
        ledger.append(options.json, [*before, *now])
    lines, status = base.compared(before, now)
    print(f"amp_ext of {options.base} over that of this tree; above 1 this tree is faster")
    print(*lines, sep="\n")
    return status


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    options = parse(argv)
    if options.base:
        return compare_with_base(options)
    mode = os.environ["AMP_EXT_GEMM"]
    chosen = [] if mode == "library" else [f"AMP_EXT_GEMM={mode}"]
    command = shlex.join([*chosen, "python", "bench/run.py", *argv])
    about = environment.describe(torch.device(options.device), command)
    if options.results:
        names = (about[key] for key in ("device", "device_name", "commit"))
        options.json = ledger.file_in(options.results, *names)
    records: list[dict] = []
    for place, name in enumerate(options.ops):
        if place:
            print()
        records += run_op(load(name), options, about)
        if timing.device_fault():
            break
    if not records:
        return 2
    if options.results:
        print(f"\nwritten to {options.json}")
    return int(any(record["error"] for record in records))


if __name__ == "__main__":
    sys.exit(main())
