"""Share the parts of benchmarks. A user's amp_ext.tune() has no effect by default."""

import os

os.environ.setdefault("AMP_EXT_GEMM", "library")  # before amp_ext is imported
