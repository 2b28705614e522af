"""Layers with fused activations."""

from amp_ext.nn.linear import Linear, LinearActivation
from amp_ext.nn.mlp import MLP, GatedMLP

__all__ = ["MLP", "GatedMLP", "Linear", "LinearActivation"]
