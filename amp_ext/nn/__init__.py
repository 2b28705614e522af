"""Layers with fused activations, and with weight gradients added in place."""

from amp_ext.nn.convert import to_torch
from amp_ext.nn.gated_mlp import GatedMLP
from amp_ext.nn.linear import Linear, LinearActivation
from amp_ext.nn.mlp import MLP

__all__ = ["MLP", "GatedMLP", "Linear", "LinearActivation", "to_torch"]
