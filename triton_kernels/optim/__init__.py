"""The updates of optimizers."""
