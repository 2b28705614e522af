"""The tests on the fake CUDA runtime."""
