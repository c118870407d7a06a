"""Low-precision numbers: rounding, block scales, quantised tensors. The table of formats is `catalog/formats.toml`.

weight = quantize(tensor, "mxfp4")
weight.dequantize()      # fp32, of the same shape
weight.bytes             # of codes and scales
quantize(gradient, "nvfp4", rounding="stochastic", seed=0)
"""

from ironlaw.numerics.quantized import Quantized, quantize

__all__ = ["Quantized", "quantize"]
