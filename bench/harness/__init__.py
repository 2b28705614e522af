"""Share the parts of benchmarks, which ignore a user's amp_ext.tune() by default."""

import os

os.environ.setdefault("AMP_EXT_GEMM", "library")  # before amp_ext is imported
