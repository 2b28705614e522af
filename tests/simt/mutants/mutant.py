"""What a mutant is: see run.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One edit of a kernel's text.

    Attributes:
        name: what is wrong with it.
        file: in the folder of the kernels.
        old: occurs once in the file.
        new: replaces it.
        tests: test_<this>.py must fail.
        select: which of its tests that few_sources() of build.py has kernels for; all if empty.
        variant: of build.VARIANTS.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    select: str = ""
    variant: str = "plain"
