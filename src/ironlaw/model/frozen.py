"""How the base of QLoRA is held (arXiv 2305.14314): what `numerics/frozen_linear.py` does and `workload/` counts."""

NF4_BITS, NF4_BLOCK = 4, 64  # of a number; numbers of a row that share a scale
SCALES_BLOCK = 256  # scales that share one of theirs
DEQUANTISED = 2**22  # numbers at a time
