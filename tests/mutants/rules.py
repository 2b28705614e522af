"""Find places of C++ and Python sources to break, and put a run-time switch into each place."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from copy import deepcopy
from itertools import pairwise
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

    def overlaps(self, other: Mutant) -> bool:
        return self.path == other.path and self.start < other.end and other.start < self.end


def mutants_of(path: Path, text: str) -> Iterator[Mutant]:
    """Yield the mutants of a file."""
    edits = python_edits(text) if path.suffix == ".py" else cpp_edits(text)
    for start, end, edit, switch in edits:
        line, column = text.count("\n", 0, start) + 1, start - text.rfind("\n", 0, start)
        yield Mutant(path, start, end, line, column, " ".join(edit.split()), switch)


def switched(path: Path, text: str, mutants: list[tuple[int, Mutant]]) -> str:
    """Return a file with the switches of numbered mutants that do not overlap."""
    for number, mutant in sorted(mutants, reverse=True):
        new = mutant.switch.replace("{on}", f"mutated({number})")
        text = text[: mutant.start] + new + text[mutant.end :]
    if path.suffix != ".py":
        depth = "../" * (len(path.parts) - 2)
        return f'#include "{depth}mutated.h"\n{text}'
    first = next(
        node
        for node in ast.parse(text).body
        if not (isinstance(node, ast.Expr) or getattr(node, "module", "") == "__future__")
    )
    lines = text.splitlines(keepends=True)
    lines.insert(first.lineno - 1, "from amp_ext._mutated import mutated\n")
    return "".join(lines)


Edit = tuple[int, int, str, str]  # start, end, text for the reader, expression with a switch

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
            yield start, end, f"{text[start:end]}  ->  {ast.unparse(new)}", switch


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
REPLACED = {"==": "!=", "<": "<=", ">": ">="}
REPLACED |= {new: old for old, new in REPLACED.items()}
HIDDEN = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\])\'', re.DOTALL)
DIRECTIVE = re.compile(r"^ *#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
CALL = re.compile(r"(?:[;{})]|\belse)\s+([a-z_](?:\w|\.|->|::)*)\(")
CONSTANT = re.compile(r"(?<=[\s(])\d+(?=[\s);]|$)")


def blanked(text: str) -> str:
    """Return C++ of the same length without comments, directives and what is in strings."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " " if match[0][0] in "/# " else "_", match[0])

    return DIRECTIVE.sub(blank, HIDDEN.sub(blank, text))


def split(code: str, start: int, end: int, separator: str) -> list[tuple[int, int]]:
    """Return the parts of an expression between separators outside brackets, without spaces."""
    places, depth = [(start, start)], 0
    for match in re.compile(rf"([(\[{{])|([)\]}}])|{separator}").finditer(code, start, end):
        depth += bool(match[1]) - bool(match[2])
        if not (match[1] or match[2] or depth):
            places.append(match.span())
    parts = [(i, j) for (_, i), (j, _) in pairwise([*places, (end, end)])]
    return [(j - len(code[i:j].lstrip()), i + len(code[i:j].rstrip())) for i, j in parts]


def closing(code: str, start: int) -> int:
    """Return the place of the bracket or semicolon that ends what starts here."""
    depth = 0
    for match in re.compile(r"([(\[{])|([)\]}])|;").finditer(code, start):
        depth += bool(match[1]) - bool(match[2])
        if depth < 0 or (match[0] == ";" and depth == 0):
            return match.start()
    return len(code)


CONDITION = re.compile(r"\b(if|while|TORCH_CHECK\w*) ?\(|\breturn |(?<!constexpr )\bbool \w+ = ")
COMPARISON = r"\s([=!]=|[<>]=?)\s"


def conditions(code: str) -> Iterator[tuple[int, int, bool]]:
    """Yield expressions with a truth value, and whether they are checks."""
    for match in CONDITION.finditer(code):
        start, end = match.end(), closing(code, match.end())
        arguments = split(code, start, end, ",")
        is_check = (match[1] or "").startswith("TORCH")
        if not is_check and (len(arguments) > 1 or code[end] != (")" if match[1] else ";")):
            continue  # a list, the default of an argument, or a condition that declares a variable
        start, end = arguments[0]
        parts = split(code, start, end, r"\s\?\s")
        has_operator = len(split(code, *parts[0], rf"\s(?:&&|\|\|)\s|{COMPARISON}")) > 1
        is_bool = match[1] or match[0].startswith("bool") or len(parts) > 1 or has_operator
        if is_bool and " = " not in code[start:end]:
            yield *parts[0], is_check


def cpp_edits(text: str) -> Iterator[Edit]:
    code = blanked(text)

    def edit(start: int, end: int, new: str, switch: str) -> Edit:
        old = text[start:end]
        return start, end, f"{old}  ->  {new.replace('OLD', old)}", switch.replace("OLD", old)

    for start, end, is_check in conditions(code):
        if is_check:
            yield edit(start, end, "true", "({on} || bool(OLD))")
        else:
            yield edit(start, end, "!(OLD)", "({on} != bool(OLD))")
        alternatives = split(code, start, end, r"\s\|\|\s")
        terms = [split(code, *alternative, r"\s&&\s") for alternative in alternatives]
        for start, end in (term for some in terms if len(some) > 1 for term in some):
            yield edit(start, end, "true", "({on} || bool(OLD))")
        for start, end in (some[0] for some in terms if len(some) == 1 < len(terms)):
            yield edit(start, end, "false", "(!{on} && bool(OLD))")
        for start, end in (term for some in terms for term in some):
            sides = split(code, start, end, COMPARISON)
            if len(sides) == 2:
                between = code[sides[0][1] : sides[1][0]].strip()
                new = f"{text[start : sides[0][1]]} {REPLACED[between]} {text[sides[1][0] : end]}"
                yield edit(start, end, new, f"({{on}} ? {new} : OLD)")
            for constant in CONSTANT.finditer(code, start, end):
                yield edit(*constant.span(), "OLD + 1", "(OLD + {on})")
    for match in CALL.finditer(code):
        start, end = match.start(1), closing(code, match.end()) + 1
        is_at_import = re.search(r"^m\.|library->", match[1]) or match[1] == "static_assert"
        if code[end] == ";" and not is_at_import:
            yield edit(start, end, "nothing", "({on} ? void() : void(OLD))")
