"""Policies: in which types modules compute and keep their variables."""

from __future__ import annotations

import torch

from amp_ext.autocast import autocast

COMPUTE_DTYPES = {
    "float32": torch.float32,
    "mixed_float16": torch.float16,
    "mixed_bfloat16": torch.bfloat16,
}


class Policy:
    """``keras.DTypePolicy``, also known as ``keras.mixed_precision.Policy``, of modules whose
    variables are float32.

    Args:
        name: "float32", "mixed_float16" or "mixed_bfloat16"; that of the global policy when None.

    Attributes:
        name: as given.
        compute_dtype: "float32", "float16" or "bfloat16".
        variable_dtype: "float32".

    Raises:
        TypeError: ``name`` is no string.
        ValueError: another name, such as "float16" of variables in float16.
    """

    def __init__(self, name: str | None = None) -> None:
        if name is None:
            name = global_policy().name
        if not isinstance(name, str):
            raise TypeError(f"Policy: name must be a string, as 'mixed_float16', got {name!r}")
        if name not in COMPUTE_DTYPES:
            mixed = f"mixed_{name}"
            names = ", ".join(map(repr, COMPUTE_DTYPES))
            text = f"Policy: name must be one of {names}, got {name!r}"
            if mixed in COMPUTE_DTYPES:
                text += f": variables stay float32 for the optimizer, use {mixed!r}"
            raise ValueError(text)
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    @property
    def compute_dtype(self) -> str:
        return str(COMPUTE_DTYPES[self._name]).removeprefix("torch.")

    @property
    def variable_dtype(self) -> str:
        return "float32"

    def region(self, device_type: str) -> autocast:
        """A region that computes as the policy says: :class:`amp_ext.autocast`, off for "float32".
        For what is no module, such as a loss function."""
        return region_of(self._name, device_type)

    def get_config(self) -> dict[str, str]:
        return {"name": self._name}

    @classmethod
    def from_config(cls, config: dict[str, str]) -> Policy:
        return cls(**config)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Policy) and other.name == self._name

    def __hash__(self) -> int:
        return hash(self._name)

    def __repr__(self) -> str:
        return f'<Policy "{self._name}">'


def region_of(name: str, device_type: str) -> autocast:
    if name == "float32":
        return autocast(device_type, enabled=False)
    return autocast(device_type, dtype=COMPUTE_DTYPES[name])


_global_policy = Policy("float32")


def set_global_policy(policy: str | Policy) -> None:
    """``keras.mixed_precision.set_global_policy``, also known as ``keras.config.set_dtype_policy``:
    what :func:`apply_policy` and :class:`Policy` use when they are given none, in all threads.

    torch's modules do not ask for it: unlike a layer of Keras, a module is given a policy by
    :func:`apply_policy`, and has it from then on.

    Raises:
        TypeError: neither a policy nor a name.
        ValueError: a name that :class:`Policy` does not take.
    """
    global _global_policy
    _global_policy = as_policy(policy)


def global_policy() -> Policy:
    """``keras.mixed_precision.global_policy``, also known as ``keras.config.dtype_policy``;
    "float32" at the start."""
    return _global_policy


def as_policy(policy: str | Policy | None) -> Policy:
    return policy if isinstance(policy, Policy) else Policy(policy)
