"""Break lines of amp_ext by rule; the tests of their wing must fail each time.

    python tests/mutants/sources.py [--most N] [--seed N] [scaler autocast optim ...]

Each mutant is written into a copy of the package, in build/mutants, and the wing's tests run on the
copy up to their first failure. The script prints the survivors; the exit status is 1 if there are
any. Some survivors change nothing that a program can see.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
COPY = ROOT / "build/mutants"
WINGS = {  # files of amp_ext, and their tests
    "scaler": "scaler",
    "autocast": "autocast",
    "optim": "optim",
    "nn": "layers",
    "graph.py": "graph",
    "tune.py": "backends",
    "verify.py": "backends",
    "backend.py": "backends",
    "compat": "compat",
}
SECONDS = 300  # for the tests of a mutant: a loop may not end
OPPOSITES: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}


class Mutant(NamedTuple):
    file: Path
    line: int
    old: str
    new: str


def changed(node: ast.AST) -> ast.AST | None:
    """Return a node in the place of another one, or None if no rule fits."""
    new = deepcopy(node)
    if isinstance(new, ast.If | ast.IfExp | ast.While):
        new.test = ast.UnaryOp(ast.Not(), new.test)
    elif isinstance(new, ast.Compare) and type(new.ops[0]) in OPPOSITES:
        new.ops[0] = OPPOSITES[type(new.ops[0])]()
    elif isinstance(new, ast.BoolOp | ast.BinOp) and type(new.op) in OPPOSITES:
        new.op = OPPOSITES[type(new.op)]()
    elif isinstance(new, ast.Constant) and isinstance(new.value, bool | int | float):
        new.value = not new.value if isinstance(new.value, bool) else new.value + 1
    elif isinstance(new, ast.Expr) and isinstance(new.value, ast.Call):
        return ast.Pass()
    elif isinstance(new, ast.Return) and new.value:
        new.value = ast.Constant(None)
    else:
        return None
    return new


def mutants(file: Path) -> Iterator[Mutant]:
    text = file.read_text()
    for node in ast.walk(ast.parse(text)):
        new = changed(node)
        old = ast.get_source_segment(text, node) if new else None
        if new and old and text.count(old) == 1:  # the place of others is not known
            yield Mutant(file, node.lineno, old, ast.unparse(new))


def survives(mutant: Mutant, wing: str) -> bool:
    """Return whether all tests of a wing pass on a mutant."""
    copied = COPY / mutant.file.relative_to(ROOT)
    text = mutant.file.read_text()
    indent = text[: text.index(mutant.old)].rpartition("\n")[2]
    new = mutant.new.replace("\n", "\n" + " " * (len(indent) - len(indent.lstrip())))
    copied.write_text(text.replace(mutant.old, new))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["-m", "not full", "-k", "not ptx and not triton", str(ROOT / "tests" / wing)]
    environment = os.environ | {"PYTHONPATH": str(COPY), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        # Python looks for packages in the working directory first.
        done = subprocess.run(
            command, cwd=COPY, env=environment, capture_output=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return False
    finally:
        shutil.copy(mutant.file, copied)
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wings", nargs="*", default=list(WINGS), metavar="WING")
    parser.add_argument("--most", type=int, default=10, help="mutants of a wing")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    options = parser.parse_args()
    shutil.rmtree(COPY, ignore_errors=True)
    shutil.copytree(ROOT / "amp_ext", COPY / "amp_ext", ignore=shutil.ignore_patterns("__pyc*"))
    survivors = 0
    for wing in options.wings:
        path = ROOT / "amp_ext" / wing
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
        found = [mutant for file in files for mutant in mutants(file)]
        chosen = random.Random(options.seed).sample(found, min(options.most, len(found)))
        for mutant in chosen:
            if survives(mutant, WINGS[wing]):
                survivors += 1
                edit = f"{' '.join(mutant.old.split())}  ->  {' '.join(mutant.new.split())}"
                print(
                    f"SURVIVED: {mutant.file.relative_to(ROOT)}:{mutant.line}: {edit}", flush=True
                )
        print(f"{wing}: {len(chosen)} mutants of {len(found)}", flush=True)
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
