"""Find places of C++ and Python sources to break, and put a run-time switch into each place."""

import ast
import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple


class Mutant(NamedTuple):
    """A place of a file, and the expression there while the switch `{on}` is on."""

    path: Path
    start: int
    end: int
    line: int
    column: int
    edit: str
    switch: str  # an expression for the place

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}:{self.column}: {self.edit}:"

    def overlaps(self, other: "Mutant") -> bool:
        return self.path == other.path and self.start < other.end and other.start < self.end


def mutants_of(path: Path, text: str) -> Iterator[Mutant]:
    """Yield the mutants of a file."""
    edits = python_edits(text) if path.suffix == ".py" else cpp_edits(text)
    for start, end, new, switch in edits:
        line, column = text.count("\n", 0, start) + 1, start - text.rfind("\n", 0, start)
        edit = " ".join(f"{text[start:end]}  ->  {new}".split())
        yield Mutant(path, start, end, line, column, edit, switch)


def switched(path: Path, text: str, mutants: list[tuple[int, Mutant]]) -> str:
    """Return a file with the switches of numbered mutants that do not overlap."""
    for number, mutant in sorted(mutants, reverse=True):
        new = mutant.switch.replace("{on}", f"mutated({number})")
        text = text[: mutant.start] + new + text[mutant.end :]
    if path.suffix != ".py":
        depth = "../" * (len(path.parts) - 2)
        return f'#include "{depth}mutated.h"\n{text}'
    lines = text.splitlines(keepends=True)
    first, *rest = ast.parse(text).body
    last = [first, *(n for n in rest if getattr(n, "module", "") == "__future__")][-1]
    lines.insert(last.end_lineno, "from amp_ext._mutated import mutated\n")
    return "".join(lines)


Edit = tuple[int, int, str, str]  # start, end, new text for the reader, expression with a switch

# ---- Python -------------------------------------------------------------------------------------

REPLACED_NODES: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq,
    ast.Lt: ast.LtE,
    ast.Gt: ast.GtE,
    ast.Is: ast.IsNot,
    ast.In: ast.NotIn,
    ast.And: ast.Or,
    ast.Add: ast.Sub,
    ast.Mult: ast.Div,
}
REPLACED_NODES |= {new: old for old, new in REPLACED_NODES.items()}
MODULE = '''"""Say which mutant is on and record the reached ones, in a file of 32-bit integers."""

import mmap
import os

shared = [0] * 100_000
if "AMP_EXT_MUTANTS" in os.environ:
    with open(os.environ["AMP_EXT_MUTANTS"], "r+b") as file:
        shared = memoryview(mmap.mmap(file.fileno(), 0)).cast("i")


def mutated(number):
    shared[number + 1] = 1
    return shared[0] == number


mutated._dynamo_marked_constant = True  # torch.compile calls it, and does not trace it
'''


def changed(node: ast.AST) -> tuple[ast.AST, ast.AST] | None:
    """Return an expression and another one in its place, or None if no rule fits."""
    new = deepcopy(node)
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        return node.test, ast.UnaryOp(ast.Not(), node.test)
    if isinstance(new, ast.Compare) and type(new.ops[0]) in REPLACED_NODES:
        new.ops[0] = REPLACED_NODES[type(new.ops[0])]()
    elif isinstance(new, ast.BoolOp | ast.BinOp) and type(new.op) in REPLACED_NODES:
        new.op = REPLACED_NODES[type(new.op)]()
    elif isinstance(new, ast.Constant) and isinstance(new.value, bool | int | float):
        new.value = not new.value if isinstance(new.value, bool) else new.value + 1
    elif isinstance(node, ast.Expr | ast.Return) and not isinstance(
        node.value, ast.Constant | None
    ):
        return node.value, ast.Constant(None)
    else:
        return None
    return node, new


def executed(node: ast.AST, is_inside: bool = False) -> Iterator[ast.AST]:
    """Yield the nodes that calls of functions evaluate, without default arguments."""
    if is_inside:
        yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(node, ast.FunctionDef) and child not in node.body:
            continue
        if not isinstance(child, ast.JoinedStr | ast.pattern | ast.arguments):
            yield from executed(child, is_inside or isinstance(node, ast.FunctionDef))


def python_edits(text: str) -> Iterator[Edit]:
    lines = text.splitlines(keepends=True)

    def offset(line: int, column: int) -> int:  # columns count bytes
        return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())

    for node in executed(ast.parse(text)):
        if found := changed(node):
            old, new = found
            start = offset(old.lineno, old.col_offset)
            end = offset(old.end_lineno, old.end_col_offset)
            switch = f"(({ast.unparse(new)}) if {{on}} else ({text[start:end]}))"
            yield start, end, ast.unparse(new), switch


# ---- C++ ----------------------------------------------------------------------------------------

HEADER = """#pragma once
// Says which mutant is on, and records which ones are reached, in a file of 32-bit integers.
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static int* mutants_file = nullptr;

// Runs before all other code of a library.
__attribute__((constructor(101))) static void map_mutants() {
  const char* const path = getenv("AMP_EXT_MUTANTS");
  const int file = path ? open(path, O_RDWR) : -1;
  if (file < 0) return;
  mutants_file = static_cast<int*>(
      mmap(nullptr, lseek(file, 0, 2), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
}

[[maybe_unused]] static bool is_mutated(int number) {
  if (!mutants_file) return false;
  mutants_file[number + 1] = 1;
  return mutants_file[0] == number;
}

[[maybe_unused]] static constexpr bool mutated(int number) {
  return !__builtin_is_constant_evaluated() && is_mutated(number);
}
"""
HIDDEN = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\])\'', re.DOTALL)
DIRECTIVE = re.compile(r"^ *#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
BOUNDARY = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
JOINED = {"&&": ("true", "({on} || bool(OLD))"), "||": ("false", "(!{on} && bool(OLD))")}
NESTED = r"[^()]*"
for _ in range(5):
    NESTED = rf"(?:[^()]|\({NESTED}\))*"
CALL = re.compile(rf"(?:[;{{)}}]|\belse)\s+(?=([a-z_](?:\w|\.|->|::)*\({NESTED}\));)")
BEFORE = re.compile(
    r"\b(?:if|while|TORCH_CHECK\w*) ?\(|\s(?:&&|\|\|)\s+|\breturn |(?<!constexpr )\bbool \w+ = "
)
OPERAND = re.compile(
    rf"((?:\b<[\w:, ]+>|[^();:,?&|{{}}=]|::|[=!<>]=|\({NESTED}\))+)(?<!\s)\s*([);:,?]|&&|\|\|)"
)
CONSTANT = re.compile(r"(?<=[\s(])\d+(?=[\s);]|$)")


def blanked(text: str) -> str:
    """Return C++ of the same length without comments, directives and what is in strings."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " " if match[0][0] in "/# " else "_", match[0])

    return DIRECTIVE.sub(blank, HIDDEN.sub(blank, text))


def operands(code: str) -> Iterator[tuple[int, int, str]]:
    """Yield the expressions with a truth value, and the operator that joins them to others."""
    for before in BEFORE.finditer(code):
        found = OPERAND.match(code, before.end())
        if not found or found[1] == "...":
            continue  # a lambda, a condition that declares a variable, or a fold
        joint = found[2] if found[2] in JOINED else before[0].strip()
        if joint.startswith("TORCH"):
            joint = "&&"
        outside = re.sub(rf"\({NESTED}\)", "", found[1])
        is_bool = joint != "return" or found[2] == "?"
        if is_bool or re.search(r"\s([=!]=|[<>]=?)\s|^!", outside):
            yield *found.span(1), joint


def cpp_edits(text: str) -> Iterator[Edit]:
    code = blanked(text)
    for start, end, joint in operands(code):
        old = text[start:end]
        new, switch = JOINED.get(joint, (f"!({old})", "({on} != bool(OLD))"))
        yield start, end, new, switch.replace("OLD", old)
        sides = re.split(r"\s(<=?|>=?)\s", code[start:end])
        if len(sides) == 3 and sides[0].count("(") == sides[0].count(")"):
            left, right = start + len(sides[0]), end - len(sides[2])
            new = f"{text[start:left]} {BOUNDARY[sides[1]]} {text[right:end]}"
            yield start, end, new, f"({{on}} ? {new} : {old})"
        for constant in CONSTANT.finditer(code, start, end):
            yield *constant.span(), f"{constant[0]} + 1", f"({constant[0]} + {{on}})"
    for call in CALL.finditer(code):
        start, end = call.span(1)
        if not re.match(r"m\.|library->|static_assert", call[1]):  # these run at the import
            yield start, end, "nothing", f"({{on}} ? void() : void({text[start:end]}))"
