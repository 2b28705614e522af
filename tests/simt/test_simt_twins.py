"""tests/simt: the headers found instead of csrc/kernels/ptx declare the same functions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from simt import build

FUNCTION = re.compile(
    r"(?P<template>template <[^;{}]*?>\s)?\s*"
    r"(?P<result>(?:const )?\w+(?:<\w+>)?[&*]?) (?P<name>\w+)\((?P<parameters>[^;{}]*)\) ?[;{]"
)
WORDS = ("__device__", "__forceinline__", "inline", "constexpr")
STATEMENTS = ("if", "for", "while", "return", "asm", "else")


def declarations(path: Path) -> set[str]:
    """Return the functions of the namespace amp_ext::ptx: templates, results, parameters."""
    text = path.read_text().partition("namespace amp_ext::ptx {")[2]
    text = re.sub(r"//.*|(?m:^#(?:.*\\\n)*.*$)", "", text)
    text = re.sub(rf"\b({'|'.join(WORDS)})\s", "", text)
    text = re.sub(r"\s+", " ", text)
    return {
        f"{(found['template'] or '').strip()} {found['result']} {found['name']}"
        f"({found['parameters']})".strip()
        for found in FUNCTION.finditer(text)
        if found["result"] not in STATEMENTS
    }


@pytest.mark.parametrize("name", ["common.cuh", "sm80.cuh", "sm90.cuh", "wgmma.cuh"])
def test_same_functions(name: str) -> None:
    real, twin = (declarations(folder / "ptx" / name) for folder in (build.KERNELS, build.ENGINE))
    assert len(real) >= 5
    assert real == twin
