"""When a scaler takes the word of the products that wrote its gradients, and does not read them."""

import torch
import torch.distributed as dist

from amp_ext._library import _C

# So many steps nothing is asked after one in which it was of no use.
REST = 100


def _is_alone() -> bool:
    """Whether the default process group has no other process, whose collectives may write to
    gradients without counting it."""
    return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


class FreeChecks:
    """Asks products for verdicts from one ``scale`` to the next ``update``, in steps that follow
    one in which an optimizer's gradients were checked without being unscaled. If no gradient was
    judged in a step that asked, the next ``REST`` do not ask.

    All scalers share one switch: when one of them closes its step, gradients of another's that have
    not been checked yet are read. An ``update`` that raises leaves it on until the next one.

    Args:
        wanted: whether verdicts are taken at all.
    """

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._checked_last = self._checks = False
        self._asked = self._judged = False
        self._rest = 0

    def ask(self) -> None:
        """Before a backward pass."""
        may_ask = self._wanted and self._checked_last and not self._rest
        if may_ask and not torch.compiler.is_compiling() and _is_alone():
            self._asked = True
            _C.judge_gradients(True)

    def note_check(self) -> bool:
        """Notes a check that is to come; returns whether it may take verdicts."""
        self._checks = True
        return self._wanted and _is_alone()

    def note_judged(self, count: int) -> None:
        """Notes how many verdicts it took."""
        self._judged |= count > 0

    def forget(self) -> None:
        """Before torch's own unscaling, which autograd does not count as a write."""
        _C.judge_gradients(False)

    def close_step(self) -> None:
        if self._asked and not self._judged:
            self._rest = REST
        elif self._rest:
            self._rest -= 1
        self._checked_last, self._checks = self._checks, False
        self._asked = self._judged = False
        _C.judge_gradients(False)
