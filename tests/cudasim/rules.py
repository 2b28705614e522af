"""Make mutants of a statement of PTX, by rule.

A mutant is another statement in the place of the compiler's. Ordering is dropped or weakened,
operands are swapped, predicates are negated, and immediates of masks, counts, parities and
descriptors are changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple


class Statement(NamedTuple):
    guard: str  # "@%p1", "@!%p1", or empty
    opcode: str  # the name and its modifiers
    operands: tuple[str, ...]  # split at commas, with vectors and addresses whole

    @classmethod
    def read(cls, text: str) -> Statement:
        guard, rest = re.fullmatch(r"(@!?%?\w+)?\s*(.*)", text, re.DOTALL).groups()
        opcode, _, operands = rest.partition(" ")
        return cls(guard or "", opcode, tuple(parts(operands)))

    def __str__(self) -> str:
        return f"{self.guard} {self.opcode} {', '.join(self.operands)}".strip()

    @property
    def words(self) -> list[str]:
        return self.opcode.split(".")

    def with_operand(self, i: int, text: object) -> Statement:
        operands = list(self.operands)
        operands[i] = str(text)
        return self._replace(operands=tuple(operands))

    def swapped(self, i: int, j: int) -> Statement:
        return self.with_operand(i, self.operands[j]).with_operand(j, self.operands[i])

    def with_opcode(self, pattern: str, text: str) -> Statement:
        return self._replace(opcode=re.sub(pattern, text, self.opcode, count=1))


def parts(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    found, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0:
            found.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*found, last] if last else found


# ---- order --------------------------------------------------------------------------------------

ORDERING = re.compile(
    r"bar\.(warp\.)?sync|barrier\.(cta\.)?sync|membar|fence|griddepcontrol\.wait"
    r"|mbarrier\.(init|arrive|expect_tx)|cp\.async|wgmma\.(fence|commit_group|wait_group)"
)
WRITES = re.compile(r"st\.|stmatrix|red\.|cp\.reduce|mma\.|wgmma\.mma_async")


def drop(s: Statement) -> Iterator[Statement | str]:
    if ORDERING.match(s.opcode) or WRITES.match(s.opcode):
        yield "nop"
    elif re.match(r"mbarrier\.(try|test)_wait", s.opcode):
        yield Statement(s.guard, "setp.eq.u32", (s.operands[0], "0", "0"))
    elif re.match(r"bar(rier\.cta)?\.red\.(or|and)", s.opcode):
        yield Statement(s.guard, "and.pred", (s.operands[0], s.operands[-1], s.operands[-1]))


def weaken(s: Statement) -> Iterator[Statement]:
    name = s.words[0]
    if name == "membar":
        yield s.with_opcode(r"\.(gl|sys)", ".cta")
    if name in ("fence", "ld", "st", "atom", "red"):
        yield s.with_opcode(r"\.(gpu|sys)\b(?!\.cta)", ".cta")
    if name in ("atom", "red") and not re.search(r"\.(gpu|sys|cta)\b", s.opcode):
        yield s.with_opcode(r"^(\w+)", r"\1.cta")
    if name in ("ld", "st", "atom", "red", "mbarrier", "barrier"):
        yield s.with_opcode(r"\.(release|acquire|acq_rel)\b", ".relaxed")
    if "wait_group" in s.opcode:
        for more in (1, 2) if name == "wgmma" else (1,):
            yield s.with_operand(0, int(s.operands[0]) + more)


# ---- operands -----------------------------------------------------------------------------------

# Instructions with sources that do not commute; predicates are negated instead.
ORDERED = ("sub", "div", "rem", "shl", "shr")


def swap(s: Statement) -> Iterator[Statement]:
    name, count = s.words[0], len(s.operands)
    if name in ORDERED and count == 3 and not number(s.operands[2]):
        yield s.swapped(1, 2)
    if name in ("prmt", "shf", "bfi") and count >= 4:
        yield s.swapped(1, 2)
    if name in ("fma", "mad") and count == 4 and "wide" not in s.words:
        yield s.swapped(1, 3)
    if name in ("ld", "st", "mov", "stmatrix", "ldmatrix", "mma"):
        yield from swapped_elements(s, most=256)
    if name == "wgmma" and count > 3:
        yield s.swapped(1, 2)
    if "tensor" in s.words:
        yield from swapped_elements(s, most=1)


def swapped_elements(s: Statement, most: int) -> Iterator[Statement]:
    """Yield neighbours of each vector swapped, or of its first elements alone."""
    for i, operand in enumerate(s.operands):
        before, *vector = re.split(r"[{}]", operand)
        elements = parts(vector[0]) if vector else []
        for j in range(min(len(elements) - 1, most)):
            other = [*elements[:j], elements[j + 1], elements[j], *elements[j + 2 :]]
            yield s.with_operand(i, f"{before}{{{', '.join(other)}}}{vector[1]}")


# ---- immediates ---------------------------------------------------------------------------------


def number(text: str) -> int | None:
    return int(text, 0) if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text) else None


MASKS = ("and", "or", "xor")


def immediate(s: Statement) -> Iterator[Statement]:
    name = s.words[0]
    for i, operand in enumerate(s.operands):
        value = number(operand)
        if value is None or (i == 0 and name not in ("bar",)):
            continue
        if name in MASKS and s.words[-1] != "pred":
            yield s.with_operand(i, value & (value - 1))  # without the lowest bit
            bits = int(s.words[-1][1:])
            if bits == 64:  # a descriptor's swizzle, and the lowest bit of its stride
                for bit in (62, 32):
                    changed = (value ^ 1 << bit) & (1 << 64) - 1
                    yield s.with_operand(i, changed - (1 << 64) if changed >> 63 else changed)
            else:
                yield s.with_operand(i, (value ^ value + 1) & 0x7FFFFFFF)
        elif name == "bar" and i == 1:
            yield s.with_operand(i, value - 32)
            yield s.with_operand(i, value + 32)
        elif name == "mbarrier":
            for changed in (value - 1, value + 1, value + 16):
                if changed > 0:
                    yield s.with_operand(i, changed)
        elif s.opcode.startswith("wgmma.mma_async"):
            yield s.with_operand(i, -value if i < len(s.operands) - 2 else 1 - value)
    if name == "mbarrier" and "parity" in s.words:
        yield s.with_operand(2, 0)
        yield s.with_operand(2, 1)
    if "expect_tx" in s.opcode:
        yield s.with_operand(-1, 16)
    if s.opcode.startswith("cp.async.c") and len(s.operands) == 4:
        yield s._replace(operands=s.operands[:3])  # no zeros


# ---- predicates and kinds -----------------------------------------------------------------------

INVERSE = {"lt": "ge", "le": "gt", "eq": "ne", "num": "nan", "lo": "hs", "ls": "hi"}
INVERSE |= {f"{a}u": f"{b}u" for a, b in INVERSE.items() if a in ("lt", "le", "eq")}
INVERSE |= {b: a for a, b in INVERSE.items()}


def negate(s: Statement) -> Iterator[Statement]:
    if s.guard:
        yield s._replace(guard=s.guard.replace("@!", "@") if "!" in s.guard else "@!" + s.guard[1:])
    if s.words[0] == "setp" and s.words[1] in INVERSE:
        yield s.with_opcode(rf"\.{s.words[1]}\b", f".{INVERSE[s.words[1]]}")
    if s.words[0] in ("and", "or") and s.words[-1] == "pred":
        other = "or" if s.words[0] == "and" else "and"
        yield s.with_opcode(r"^\w+", other)


KINDS = (
    (r"^vote\.sync\.any", "vote.sync.all"),
    (r"^(bar|barrier\.cta)\.red\.or", r"\1.red.and"),
    (r"^shfl\.sync\.bfly", "shfl.sync.down"),
    (r"^ldmatrix(.*)\.trans", r"ldmatrix\1"),
    (r"^(atom.*)\.inc\.", r"\1.max."),
    (r"^cp\.reduce\.async(.*)\.add\.", r"cp.async\1."),
    (r"^cvt\.rn\.(f16|bf16)", r"cvt.rz.\1"),
)


def kind(s: Statement) -> Iterator[Statement]:
    for pattern, text in KINDS:
        if re.match(pattern, s.opcode):
            yield s.with_opcode(pattern, text)


RULES = {make.__name__: make for make in (drop, weaken, swap, immediate, negate, kind)}


def mutants(text: str) -> Iterator[tuple[str, str]]:
    """Yield the rule and the new text of each mutant of a statement."""
    statement = Statement.read(text)
    for name, make in RULES.items():
        for made in map(str, make(statement)):
            if made != str(statement):
                yield name, made
