"""Time amp_ext against torch, interleaved in one run, with a check of every result.

    python bench/run.py all                     # on the GPU, or on the CPU where there is none
    python bench/run.py gemm --m 4096 --n 4096 --k 4096 --layout NT --dtype fp16
    python bench/run.py unscale --sizes 4000x100,1x64Mi --providers cuda,torch
    python bench/run.py scaler gemm --device cpu --quick --csv results.csv
    python bench/run.py unscale grad_norm --base main

A provider with a wrong result gets no ratio, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness import base, ledger, lists, table, timing
from harness.measure import measure
from harness.registry import BASELINE, DTYPES, OPS, Op, Setup, load
from ops.check_finite import NORMS
from ops.gemm import CUBLASLT
from workloads.common import device_parser, positive

ALL = "all"
LAYOUTS = ("NN", "NT", "TN", "TT")
PROVIDERS = (*ledger.OURS, BASELINE, CUBLASLT, ledger.FP32_LINE, NORMS)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = device_parser(__doc__)
    add = parser.add_argument
    add("ops", nargs="+", choices=(*OPS, ALL), metavar="OP", help=f"{', '.join(OPS)}, or {ALL}")
    add("--dtype", choices=DTYPES, help="only this dtype; by default an op's usual ones")
    for size in "mnk":
        add(f"--{size}", type=positive, help="size of a product [m, k] @ [k, n]")
    add("--layout", choices=LAYOUTS, help="of that product, T for a transposed operand; NT")
    add("--sizes", type=lists.parse_sizes, metavar="LIST", help="lists such as 4000x100,1x64Mi")
    add("--providers", default="", metavar="LIST", help="only these, such as cuda,torch")
    add("--quick", action="store_true", help="small inputs, few repeats: seconds")
    add("--filter", default="", metavar="TEXT", help="only cases named like this")
    add("--csv", type=Path, metavar="FILE", help="write the table's lines, with all their figures")
    add("--json", type=Path, metavar="FILE", help="append the same, one object a line")
    add("--results", type=Path, metavar="DIR", help="append to DIR/<device>/<date>-<commit>.jsonl")
    add("--seconds", type=float, metavar="S", help="measure each line of a table for so long")
    add("--base", metavar="COMMIT", help="compare with the amp_ext of another commit")
    options = parser.parse_args(argv)
    options.ops = list(dict.fromkeys(OPS if ALL in options.ops else options.ops))
    options.providers = tuple(filter(None, map(str.strip, options.providers.split(","))))
    if unknown := sorted(set(options.providers) - set(PROVIDERS)):
        parser.error(f"--providers: expected {', '.join(PROVIDERS)}, got {', '.join(unknown)}")
    if options.base and options.providers and not set(options.providers) & set(ledger.OURS):
        parser.error(f"--base compares amp_ext: expected one of {', '.join(ledger.OURS)}")
    for file in (options.csv, options.json):
        if file and file.is_dir():
            parser.error(f"{file} is a folder, expected a file")
    product = options.m, options.n, options.k
    options.product = None
    if any(product) or options.layout:
        if not all(product):
            parser.error("a product needs --m, --n and --k")
        options.product = (*product, options.layout or "NT")
    for axis, names in (("product", "--m, --n, --k"), ("sizes", "--sizes")):
        others = [name for name in options.ops if load(name).axis != axis]
        if getattr(options, axis) and others:
            parser.error(f"{names}: not for {', '.join(others)}")
    if options.results and (options.json or options.base):
        parser.error("--results names a file of its own: leave out --json and --base")
    return options


def run_op(op: Op, options: argparse.Namespace, about: dict[str, object]) -> list[dict]:
    """Measure the op's cases and print their table; return its records, [] without a case.

    Records are appended to the file of the options case by case, and the table has the measured
    cases even if the run is interrupted.
    """
    setup = Setup(
        device=options.device,
        quick=options.quick,
        dtype=DTYPES.get(options.dtype),
        sizes=options.sizes or (),
        product=options.product,
    )
    cases = [case for case in op.cases(setup) if options.filter in case.name]
    if not cases:
        named = f"{options.filter!r} in its name" if options.filter else f"{options.dtype} operands"
        print(f"no case of {op.name} has {named}", file=sys.stderr)
        return []
    budget = (timing.QUICK if setup.quick else timing.FULL)[options.device.type]
    if options.seconds is not None:
        budget = replace(budget, seconds=options.seconds)
    records: list[dict] = []
    try:
        for number, case in enumerate([op.limit(setup), *cases]):
            print(f"{op.name} {number}/{len(cases)}: {case.name}", file=sys.stderr, flush=True)
            found = measure(case, op, setup, budget, about, options.providers)
            if options.json:
                ledger.append(options.json, found)
            records += found
            if fault := timing.device_fault():
                print(f"{op.name} ends here, the GPU is lost: {fault}", file=sys.stderr)
                break
    finally:
        if records:
            show(op, records, about)
    return records


def show(op: Op, records: Sequence[dict], about: dict[str, object]) -> None:
    """Print the op's notes, its table, and the reasons for missing ratios."""
    where = "{device}: {device_name}, {threads} threads, torch {torch}, commit {commit}"
    baselines = " or ".join(dict.fromkeys(r["baseline"] for r in records if not r["limit"]))
    ratio = f"ratio: p20 of {baselines} over that of the line, which is faster above 1."
    for text in (f"{op.name} on {where.format(**about)}", op.notes, f"Rates are at p20; {ratio}"):
        print(textwrap.fill(text, 100))
    print()
    table.show(*table.table(records, op.rate))
    for record in records:
        if record["error"]:
            reason = record["error"].partition("\n")[0]
            print(f"NO RATIO for {record['case']}, {record['provider']}: {reason}")


def compare_with_base(argv: Sequence[str], options: argparse.Namespace) -> int:
    """Run the same benchmarks on the base's amp_ext and on the present one; print ratios."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--base", "--csv", "--json"):
        own.add_argument(name)
    _, arguments = own.parse_known_args(argv)
    arguments.append(f"--providers={','.join(options.providers or ledger.OURS)}")
    try:
        before, now = base.measure_both(options.base, arguments)
    except base.BuildError as error:
        print(f"--base {options.base}: {error}", file=sys.stderr)
        return 2
    if not before and not now:
        return 2
    if options.json:
        ledger.append(options.json, [*before, *now])
    if options.csv:
        table.write_csv(options.csv, [*before, *now])
    headers, rows, reasons = base.compared(before, now)
    print(f"amp_ext of {options.base} over that of this tree; above 1 this tree is faster")
    table.show(headers, rows)
    for reason in reasons:
        print(reason)
    return int(bool(reasons))


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    options = parse(argv)
    if options.base:
        return compare_with_base(argv, options)
    mode = os.environ["AMP_EXT_GEMM"]
    chosen = [] if mode == "library" else [f"AMP_EXT_GEMM={mode}"]
    command = shlex.join([*chosen, "python", "bench/run.py", *argv])
    about = ledger.describe(options.device, command)
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
    if options.csv:
        table.write_csv(options.csv, records)
    if options.results:
        print(f"\nwritten to {options.json}")
    return int(any(record["error"] for record in records))


if __name__ == "__main__":
    sys.exit(main())
