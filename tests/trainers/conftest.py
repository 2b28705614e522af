"""Share fixtures between the tests of training frameworks."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import amp_ext
from amp_ext._library import _C


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """How often each pass over an optimizer's gradients was made by kernels."""
    counts: collections.Counter[str] = collections.Counter()

    def counting(name: str) -> Callable[..., Any]:
        function = getattr(_C, name)

        def counted(*args: Any) -> Any:
            result = function(*args)
            counts[name] += result is not None
            return result

        return counted

    for name in ("unscale_grads", "clip_grads", "check_grads"):
        monkeypatch.setattr(_C, name, counting(name))
    return counts


@pytest.fixture
def installed() -> Iterator[None]:
    """torch.autocast regions with our products; scalers as they are."""
    amp_ext.install()
    yield
    amp_ext.uninstall()


@pytest.fixture
def installed_scaler() -> Iterator[None]:
    """Install amp_ext with its scaler in programs that do not name it."""
    amp_ext.install(scaler=True)
    yield
    amp_ext.uninstall()
