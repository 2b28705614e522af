"""Run a CUDA extension's compiled PTX without a GPU."""
