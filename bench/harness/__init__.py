"""Share the parts of benchmarks. A user's amp_ext.tune() has no effect by default."""

import ctypes
import os

os.environ.setdefault("AMP_EXT_GEMM", "library")  # before amp_ext is imported

# glibc would return freed memory to the system and map it again, at the whim of what the process
# has freed before: up to a third of the time of a layer on a CPU.
if hasattr(libc := ctypes.CDLL(None), "mallopt"):
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
    libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 25)
