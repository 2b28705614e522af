"""The updates of parameters by optimizers."""
