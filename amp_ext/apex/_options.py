"""The optimization levels O0 to O3 and what may be chosen beside them."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Options:
    """Apex's properties, of which None stands for "not said"; by default those of a disabled amp.

    Attributes:
        cast_model_type: the dtype of parameters, buffers and inputs; None for no cast.
        patch_torch_functions: whether forward passes run under :class:`amp_ext.autocast`.
        keep_batchnorm_fp32: whether batch norm is left out of ``cast_model_type``.
        master_weights: whether 16-bit parameters have float32 masters.
        loss_scale: "dynamic" or a number.
    """

    enabled: bool = False
    opt_level: str | None = None
    cast_model_type: torch.dtype | None = None
    patch_torch_functions: bool = False
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: float | str = 1.0

    @property
    def keeps_masters(self) -> bool:
        return bool(self.master_weights) and self.cast_model_type in HALVES

    def __str__(self) -> str:
        return ", ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


HALVES = (torch.float16, torch.bfloat16)
_LEVELS = {
    "O0": Options(True, "O0", torch.float32, False, None, False, 1.0),
    "O1": Options(True, "O1", None, True, None, None, "dynamic"),
    "O2": Options(True, "O2", torch.float16, False, True, True, "dynamic"),
    "O3": Options(True, "O3", torch.float16, False, False, False, 1.0),
}


def options_of(opt_level: str, **overrides: Any) -> Options:
    """Those of a level, with what has been given beside it.

    Raises:
        RuntimeError: no such level, or an override that contradicts it.
        ValueError: a value that an option cannot have.
    """
    if opt_level not in _LEVELS:
        raise RuntimeError(
            "amp.initialize: opt_level must be 'O0', 'O1', 'O2' or 'O3', with the letter O, "
            f"got {opt_level!r}"
        )
    given = {name: value for name, value in overrides.items() if value is not None}
    checked = {name: _CHECKS[name](value) for name, value in given.items()}
    _check_consistency(opt_level, given)
    return replace(_LEVELS[opt_level], **checked)


def _check_consistency(opt_level: str, given: dict[str, Any]) -> None:
    if opt_level != "O1":
        if given.get("patch_torch_functions"):
            raise RuntimeError(
                f"amp.initialize: patch_torch_functions=True contradicts opt_level={opt_level!r}: "
                "write opt_level='O1'"
            )
        return
    if given.get("cast_model_type", False) not in (False, torch.float32):
        raise RuntimeError(
            "amp.initialize: with opt_level='O1' parameters stay float32, got "
            f"cast_model_type={given['cast_model_type']}: write opt_level='O2' or 'O3' to cast the "
            "model, or amp_ext.autocast in the place of amp for another dtype than float16"
        )
    for name, why in (
        ("keep_batchnorm_fp32", "batch norm computes in float32 anyway"),
        ("master_weights", "the parameters are float32 themselves"),
    ):
        if name in given:
            raise RuntimeError(
                f"amp.initialize: with opt_level='O1' {why}, got {name}={given[name]}: leave it out"
            )


def _cast_model_type(value: Any) -> torch.dtype | None:
    if value is False:
        return None
    if value not in (torch.float32, *HALVES):
        raise ValueError(
            "amp.initialize: cast_model_type must be torch.float16, torch.bfloat16, torch.float32 "
            f"or False, got {value!r}"
        )
    return value


def _keep_batchnorm_fp32(value: Any) -> bool:
    if value not in (True, False, "True", "False"):
        raise ValueError(
            "amp.initialize: keep_batchnorm_fp32 must be True, False, 'True', 'False' or None, "
            f"got {value!r}"
        )
    return value in (True, "True")


def _loss_scale(value: Any) -> float | str:
    if value == "dynamic":
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number <= torch.finfo(torch.float32).max:
        raise ValueError(
            "amp.initialize: loss_scale must be 'dynamic' or a positive number of float32's range, "
            f"got {value!r}"
        )
    return number


_CHECKS = {
    "cast_model_type": _cast_model_type,
    "patch_torch_functions": bool,
    "keep_batchnorm_fp32": _keep_batchnorm_fp32,
    "master_weights": bool,
    "loss_scale": _loss_scale,
}
