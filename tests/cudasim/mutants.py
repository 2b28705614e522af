"""Break compiled kernels by rule, and run cases on each mutant in a fork: one of them must fail.

Nothing is compiled: a fork decodes one kernel again, with another statement. It ends at the first
wrong result, fault or race.
"""

import ctypes
import functools
import gc
import hashlib
import linecache
import os
import re
import resource
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cudasim import rules

LACKS = "The executor lacks this instruction"
LONGEST_S = 60  # of the processor for a mutant; its count of instructions ends it before
# Cases run on a mutant by each schedule: the shortest that execute the statement, and the longest.
SCHEDULES = ((("forward", "late"), 100), (("random", "random"), 3), (("reverse", "early"), 3))


class Mutant(NamedTuple):
    kernel: str
    statement: int
    rule: str
    old: str
    new: str
    line: int  # of the PTX
    source: str  # of the statement, with the calls that it was inlined through

    def __str__(self) -> str:
        edit = f"line {self.line}: {self.old}  ->  {self.new}"
        place = re.sub(r"[^ ,]*/", "", self.source)
        return f"{self.family}: {self.rule}: {edit} ({place})"

    @property
    def family(self) -> str:
        """The kernel's template."""
        name = re.sub(r"\(anonymous namespace\)", "", self.kernel)
        return re.split(r"::", re.split(r"[<(]", name.removeprefix("void "))[0])[-1]

    @property
    def kin(self) -> tuple[str, ...]:
        """The same edit of the same source lines, whatever its copy, registers and folder."""
        edit = re.sub(r"\d+", "", self.old + self.new)
        return self.family, *source_texts(self.source), self.rule, edit


@dataclass
class Case:
    """A call that must fail on a mutant."""

    name: str
    run: Callable[[], object]  # raises where a result is wrong
    instructions: int = 0
    executed: dict[str, set[int]] = field(default_factory=dict)


class Equivalent(NamedTuple):
    """Mutants with the same behaviour as the kernel."""

    kernel: str  # is found in the kernel's name, with the arguments of its template
    source: str  # is in the text of a source line of the statement
    rule: str  # of the mutants; "" for any
    statement: str  # matches the PTX, old and new with an arrow in between
    reason: str


class Kernels:
    """The executor's library, as this process has loaded it."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        for name in ("executed", "fault"):
            getattr(self._library, f"cudasim_{name}").restype = ctypes.c_char_p
        self._library.cudasim_instructions.restype = ctypes.c_uint64

    def schedule(self, order: str, copies: str) -> None:
        os.environ |= {"CUDASIM_ORDER": order, "CUDASIM_ASYNC": copies}
        self._library.cudasim_configure()

    def watch(self, case: Case) -> Iterator[tuple[str, int, int, str, str]]:
        """Run a case; yield kernel, statement, line, source and text of each executed statement."""
        self._library.cudasim_forget()
        before = self._library.cudasim_instructions()
        case.run()
        case.instructions = self._library.cudasim_instructions() - before
        kernel = ""
        for line in self._library.cudasim_executed().decode().splitlines():
            if line.startswith("kernel "):
                kernel = line.removeprefix("kernel ")
                continue
            number, ptx_line, source, text = line.split("\t")
            case.executed.setdefault(kernel, set()).add(int(number))
            yield kernel, int(number), int(ptx_line), source, text

    def apply(self, mutant: Mutant) -> None:
        self._library.cudasim_edit(
            mutant.kernel.encode(), ctypes.c_uint32(mutant.statement), mutant.new.encode()
        )

    def limit(self, instructions: int) -> None:
        self._library.cudasim_limit(ctypes.c_uint64(instructions))

    def fault(self) -> str:
        return str(self._library.cudasim_fault().decode())


def all_mutants(kernels: Kernels, cases: Iterable[Case]) -> Counter[Mutant]:
    """Return the mutants of all statements that the cases execute, and how many cases do.

    The cases must pass.
    """
    kernels.schedule(*SCHEDULES[0][0])
    found: Counter[Mutant] = Counter()
    for case in cases:
        for kernel, number, line, source, text in kernels.watch(case):
            for rule, new in rules.mutants(text):
                found[Mutant(kernel, number, rule, text, new, line, source)] += 1
    return found


def sample(mutants: Counter[Mutant], most: int, seed: int) -> list[Mutant]:
    """Return up to `most` of each kernel's template, of a kind the one that most cases execute.

    Kinds are chosen by hashes, so that most stay the same when a kernel changes.
    """

    def rank(*words: object) -> bytes:
        return hashlib.sha256("\0".join(map(str, (seed, *words))).encode()).digest()

    kinds: defaultdict[str, defaultdict[tuple[str, ...], list[Mutant]]]
    kinds = defaultdict(lambda: defaultdict(list))
    for mutant in mutants:
        kinds[mutant.family][mutant.kin].append(mutant)
    chosen = []
    for of_family in kinds.values():
        for kin in sorted(of_family, key=lambda kin: rank(*kin))[:most]:
            chosen.append(max(of_family[kin], key=lambda m: (mutants[m], rank(m.kernel, m.line))))
    return chosen


# ---- forks --------------------------------------------------------------------------------------


def tried(kernels: Kernels, mutant: Mutant | None, cases: Sequence[Case]) -> str:
    """Return how a mutant, or a kernel as it is, was caught; empty if it was not."""
    if mutant:
        kernels.apply(mutant)
    for i, (schedule, most) in enumerate(SCHEDULES):
        kernels.schedule(*schedule)
        for case in some_of(cases, most) if mutant else cases if i else cases[:1]:
            kernels.limit(5 * case.instructions + 100_000)
            try:
                case.run()
            except BaseException as error:
                fault = kernels.fault()
                said = fault.replace("\n", " ") if fault else f"{type(error).__name__}: {error}"
                return f"{case.name}: {said}"
    return ""


def of_mutant(mutant: Mutant, cases: Sequence[Case]) -> list[Case]:
    """Return the cases that execute the statement, the shortest first."""
    found = [c for c in cases if mutant.statement in c.executed.get(mutant.kernel, ())]
    return sorted(found, key=lambda case: case.instructions)


def some_of(cases: Sequence[Case], most: int) -> list[Case]:
    return [*cases[:most], *cases[most:][-1:]]


def in_forks(
    works: dict[Mutant | None, Callable[[], str]], jobs: int = 1, seconds: int = LONGEST_S
) -> Iterator[tuple[Mutant | None, str]]:
    """Do each work in a process of its own; yield its key and outcome as it ends."""
    left = list(works.items())
    running: dict[int, tuple[Mutant | None, int]] = {}
    while left or running:
        while left and len(running) < jobs:
            key, work = left.pop(0)
            read, write = os.pipe()
            child = os.fork()
            if not child:
                try:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
                    os.write(write, b"=" + work().encode()[:4000])
                finally:
                    os._exit(0)
            os.close(write)
            running[child] = key, read
        child, status = os.wait()
        key, read = running.pop(child)
        said = os.read(read, 8192).decode(errors="replace")
        os.close(read)
        yield key, said[1:] if said else f"ends by signal {os.WTERMSIG(status)}"


def control(kernels: Kernels, mutants: Iterable[Mutant], all_cases: Sequence[Case]) -> None:
    """Assert that a fork without a mutant passes in the schedules all_mutants() does not run."""
    most = max(most for _, most in SCHEDULES[1:])
    cases = [*{c.name: c for m in mutants for c in some_of(of_mutant(m, all_cases), most)}.values()]
    for _, said in in_forks({None: lambda: tried(kernels, None, cases)}, seconds=20 * LONGEST_S):
        if said:
            raise RuntimeError(f"without a mutant: {said}")


# ---- report -------------------------------------------------------------------------------------


@functools.cache
def source_texts(source: str) -> tuple[str, ...]:
    """Return the texts of the lines of "a.cuh:3, inlined at b.cuh:7"."""
    found = re.findall(r"([^\s,]+):(\d+)", source)
    return tuple(linecache.getline(path, int(line)).strip() for path, line in found)


def reason(mutant: Mutant, equivalents: Iterable[Equivalent]) -> str:
    """Return why a mutant is an equivalent; empty if it is not listed."""
    for one in equivalents:
        if (
            one.rule in ("", mutant.rule)
            and re.search(one.kernel, mutant.kernel)
            and re.search(one.statement, f"{mutant.old} -> {mutant.new}")
            and one.source in "\n".join(source_texts(mutant.source))
        ):
            return one.reason
    return ""


def hunt(
    kernels: Kernels,
    cases: Sequence[Case],
    equivalents: Sequence[Equivalent] = (),
    *,
    most: int = 60,
    seed: int = 0,
    jobs: int = 1,
    verbose: bool = False,
) -> int:
    """Break the kernels that the cases launch; print the survivors and return their number.

    At most `most` mutants of a kernel's template are in the sample, `jobs` forks run at a time, and
    `verbose` prints what is caught too.
    """
    everything = all_mutants(kernels, cases)
    chosen = sample(everything, most, seed)
    gc.collect()
    gc.freeze()  # collections would touch memory that forks share
    control(kernels, chosen, cases)
    works = {m: functools.partial(tried, kernels, m, of_mutant(m, cases)) for m in chosen}
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for mutant, said in in_forks(works, jobs):
        outcome = "caught"
        if LACKS in said:
            outcome = "NOT RUN"
        elif not said:
            outcome = "equivalent" if reason(mutant, equivalents) else "SURVIVED"
        counts[mutant.family][outcome] += 1
        if outcome in ("SURVIVED", "NOT RUN") or verbose:
            print(f"{outcome}: {mutant} {said}", flush=True)
        if outcome == "SURVIVED":
            print(f"    {mutant.kernel}", *source_texts(mutant.source), sep="\n    ")
    for family, of in sorted(counts.items()):
        print(f"{family:32} {of.total():4} mutants, {of['caught']:4} caught")
    total = sum(counts.values(), Counter())
    outcomes = ", ".join(f"{n} {outcome}" for outcome, n in sorted(total.items()))
    print(f"{len(chosen)} mutants of {len(everything)}: {outcomes}")
    return total["SURVIVED"] + total["NOT RUN"]
