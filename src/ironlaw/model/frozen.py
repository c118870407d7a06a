"""Storage of QLoRA's frozen base (arXiv 2305.14314), shared by `numerics/frozen_linear.py` and `workload/`."""

NF4_BITS, NF4_BLOCK = 4, 64  # bits per number; numbers of a row that share a scale
SCALES_BLOCK = 256  # scales that share a second-level scale
DEQUANTISED = 2**22  # numbers dequantised at a time
