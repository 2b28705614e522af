"""bench/lists.py: copies of lists, how they are compared, and the limits of ops on them."""

from __future__ import annotations

import pytest
import torch

from harness import lists
from harness import registry
from amp_ext import testing
from bench_program import BENCH, quiet, run_quick  # noqa: F401  (a fixture)
from harness.registry import BF16, FP16, FP32

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_clones_are_aligned_and_of_equal_values() -> None:
    shapes = [100, (3, 5), 1, (), 256, 0]
    originals = testing.gradients(shapes, [FP32, FP16, BF16])
    copied = lists.clones(originals)
    assert lists.different(copied, originals) == 0
    for copy, original in zip(copied, originals, strict=True):
        assert (copy.shape, copy.dtype) == (original.shape, original.dtype)
        assert copy.stride() == original.stride()
        assert copy.storage_offset() * copy.itemsize % lists.ALIGNMENT == 0
    for copy in copied:
        copy.fill_(torch.nan)
    assert all(original.isfinite().all() for original in originals), "not theirs"
    assert lists.different(lists.clones(copied), copied) == 0


def test_clones_do_not_overlap() -> None:
    originals = testing.gradients([127, 128, 129, 1000])
    copied = lists.clones(originals)
    for place, copy in enumerate(copied):
        copy.fill_(place)
    assert [copy.unique().tolist() for copy in copied] == [[0.0], [1.0], [2.0], [3.0]]


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_different_counts_tensors_whose_bits_differ(dtype) -> None:
    tensors = testing.gradients([3, 4, 5], dtype)
    others = lists.clones(tensors)
    tensors[0][0], others[0][0] = torch.nan, torch.nan
    assert lists.different(tensors, others) == 0
    others[1][-1] *= -1
    others[2].zero_()
    assert lists.different(tensors, others) == 2
    assert lists.different([torch.zeros(1)], [-torch.zeros(1)]) == 1


def test_nans_are_alike() -> None:
    """torch's product of a BF16 NaN and 1 is another NaN."""
    nan, other, number = (torch.tensor([bits], dtype=torch.int16) for bits in (0x7FC0, 0x7FFF, 1))
    nan, other, number = (tensor.view(BF16) for tensor in (nan, other, number))
    assert lists.different([nan], [other]) == 0
    assert lists.different([nan, number], [number, nan]) == 2


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("op", ["unscale", "check", "norm"])
def test_lists_of_one_dtype(tmp_path, capsys, op, dtype) -> None:
    options = (op, "--dtype", dtype, "--filter", "2 x 10")
    status, (limit, *records) = run_quick(tmp_path / "out.jsonl", *options)
    assert status == 0, capsys.readouterr().out
    assert limit["dtype"] == "fp32"
    assert {record["dtype"] for record in records} == {dtype}


def test_sets_exceed_a_gpus_cache(monkeypatch) -> None:
    properties = type("Properties", (), {"L2_cache_size": 1000})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    grads = lists.GradientList("", 3 * [50], [FP16]).gradients(CPU)
    sets = lists.rotated(grads, grads.bytes, lists.Gradients.clone, CUDA)
    assert len(sets) == 11
    assert sets[0] is grads
    assert [leaf.grad for leaf in grads.leaves] == grads.flat
    assert len(lists.rotated(grads, grads.bytes, lists.Gradients.clone, CPU)) == 1


def test_a_lists_dtype() -> None:
    assert lists.GradientList("", [1], [BF16]).dtype == BF16
    assert lists.GradientList("", [1, 1], [BF16, FP16]).dtype is None


def test_limits_in_place() -> None:
    """A CPU reads what a copy is to overwrite: in place it is faster."""
    assert lists.in_place_limit(registry.Setup(CUDA)).name == "copy 64 Mi fp32"
    limit = lists.in_place_limit(registry.Setup(CPU, quick=True))
    assert (limit.name, limit.limit, limit.dtype) == ("mul_ 1 Mi fp32", True, FP32)
    trial = limit.build()
    trial.providers[0].launch()
    assert trial.work.bytes == 2 * 4 * 2**20
