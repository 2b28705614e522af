"""When a scaler takes the word of the products that wrote its gradients, and does not read them."""

import torch
import torch.distributed as dist

from amp_ext._library import _C


def _is_alone() -> bool:
    """Whether no other process can be writing to gradients: autograd need not count collectives."""
    return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


class FreeChecks:
    """Asks products for verdicts from one ``scale`` to the next ``update``, in steps like one that
    had use for them: one in which an optimizer's gradients were checked without being unscaled.

    Args:
        wanted: whether verdicts are taken at all.
    """

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._was_useful = self._is_useful = False

    def ask(self) -> None:
        """Before a backward pass."""
        if self._was_useful and self._wanted and not torch.compiler.is_compiling() and _is_alone():
            _C.judge_gradients(True)

    def may_take(self) -> bool:
        """Before a check."""
        self._is_useful = True
        return self._wanted and _is_alone()

    def forget(self) -> None:
        """Before torch's own unscaling, which autograd does not count as a write."""
        _C.judge_gradients(False)

    def close_step(self) -> None:
        self._was_useful, self._is_useful = self._is_useful, False
        _C.judge_gradients(False)
