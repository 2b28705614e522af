"""Share fixtures between the tests of training frameworks."""

import collections
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import amp_ext
from amp_ext._library import _C


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """Count the passes of kernels over an optimizer's gradients: check, unscale and clip.

    A pass that takes the norm for a step that clips by itself counts as a clip.
    """
    counts: collections.Counter[str] = collections.Counter()
    grad_pass = _C.grad_pass

    def counted(params: Any, kind: str, *args: Any, **kwargs: Any) -> Any:
        result = grad_pass(params, kind, *args, **kwargs)
        counts["clip" if kind == "norm" else kind] += result is not None
        return result

    monkeypatch.setattr(_C, "grad_pass", counted)
    return counts


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Undo amp_ext.install(), and reset the state of an accelerator, which is the process's."""
    yield
    amp_ext.uninstall()
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
