"""Triton kernels over the paged KV pool, and the elementwise kernels of the decoder."""

import os

# Multiplications and additions may fuse; Triton 3.9 warns unless that is said.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
