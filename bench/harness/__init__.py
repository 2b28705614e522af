"""What benchmarks share. They do not depend on what a user has measured (amp_ext.tune()), unless
AMP_EXT_GEMM says so."""

import os

os.environ.setdefault("AMP_EXT_GEMM", "library")  # before amp_ext is imported
