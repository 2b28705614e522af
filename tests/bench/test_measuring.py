"""Test what is computed from ledgers: docs/measuring.md, and the comparison with a commit."""

from pathlib import Path

import pytest

from harness import base, ledger, page

NEWER = "2031-01-01T00:00:00+00:00"


def record(**changes: object) -> ledger.Record:
    """Return a line of a ledger."""
    return {
        **dict.fromkeys(ledger.Record.__annotations__),
        "op": "unscale",
        "case": "7 x 7",
        "provider": "cpu",
        "ratio": 2.0,
        "counted": True,
        "utc": "2030-01-01T00:00:00+00:00",
        "command": "python bench/run.py unscale --device cpu",
        **changes,
    }


COMMAND = record()["command"]
WRONG = {"ratio": None, "error": "CheckError: wrong"}


# ---- docs/measuring.md -------------------------------------------------------------------------


def test_the_results_are_what_the_ledgers_say() -> None:
    shown = page.PAGE.read_text().partition(page.BEGIN + "\n")[2]
    results = shown.partition("\n" + page.END)[0]
    assert results == page.section(page.RESULTS), "run `make figures`"


def test_committed_figures_are_of_the_ledgers() -> None:
    draw = pytest.importorskip("plot", reason="figures are drawn with matplotlib")
    wanted = {file: draw.digest(runs) for _, file, runs in page.figures(page.RESULTS)}
    found = sorted((page.ROOT / page.PLOTS).iterdir())
    assert [path.name for path in found] == sorted(wanted), "run `make figures`"
    for path in found:
        assert f">data {wanted[path.name]}<" in path.read_text(), "run `make figures`"


OLD, NEW = record(), record(ratio=3.0, utc=NEWER)
OTHER = record(case="8 x 8", ratio=8.0)


@pytest.mark.parametrize(
    ("records", "ratios"),
    [
        ([NEW, OTHER, OLD], {"7 x 7": 3.0, "8 x 8": 8.0}),
        ([OLD, OTHER, record(utc=NEWER, **WRONG)], {"8 x 8": 8.0}),
        ([OLD, {**NEW, "command": f"{COMMAND} --quick"}], {"7 x 7": 2.0}),
        ([OLD, {**NEW, "command": f"{COMMAND} --providers=cpu"}], {"7 x 7": 2.0}),
        ([OLD, record(case="1 x 1", ratio=0.01, counted=False)], {"7 x 7": 2.0}),
    ],
    ids=["by date", "wrong", "quick", "of some providers", "not counted"],
)
def test_the_newest_whole_measurement_of_a_case_counts(
    tmp_path: Path, records: list[ledger.Record], ratios: dict[str, float]
) -> None:
    ledger.append(tmp_path / "cpu/1.jsonl", records)
    (run,) = page.newest(tmp_path)["cpu"]
    assert run.ratios["cpu"] == ratios


# ---- another commit ----------------------------------------------------------------------------


def test_ratios_to_the_base_are_medians_of_rounds() -> None:
    def timed(*times: float, **more: object) -> list[ledger.Record]:
        return [record(p20_us=p20, **more) for p20 in times]

    good, bad = timed(5.0, case="b"), timed(5.0, case="b", error="CheckError: wrong")
    others = timed(1.0, provider="copy", limit=True, error="wrong")
    others += timed(1.0, provider="torch")
    _, rows, reasons = base.compared(
        [*timed(8.0, 2.0, 5.0), *good, *bad, *good, *others],
        [*timed(2.0, 2.0, 2.0), *3 * good, *timed(2.0, case="c"), *others],
    )
    assert rows[0] == ["7 x 7", "cpu", "unscale", "5.00", "2.00", "2.50", "1.00..4.00"]
    assert rows[1][:2] == ["geometric mean of 1 ratios base / now", "cpu"]
    assert reasons == [
        "NO RATIO for unscale, b, cpu: the base: CheckError: wrong",
        "NO RATIO for unscale, c, cpu: the base cannot run it",
    ]
