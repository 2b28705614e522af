"""Test the shared parts of the integrations."""

import torch

from amp_ext.integrations import has_gradients_of


def test_frozen_parameters_do_not_matter() -> None:
    frozen, first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    first.grad = second.grad = torch.ones(2)
    optimizer = torch.optim.SGD([frozen, first], lr=1.0)
    assert has_gradients_of(optimizer, [first])
    assert has_gradients_of(optimizer, iter([first, torch.nn.Parameter(torch.ones(2))]))
    assert not has_gradients_of(optimizer, [first, second])
    assert not has_gradients_of(optimizer, [frozen])
