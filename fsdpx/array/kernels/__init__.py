"""Kernels: what layers compute, each as plain array code and, where it is faster, as compiled code.

`f(xp, ...)` runs on NumPy, CuPy and shape-only arrays, in float64 and float32; float16 and bf16 arrays are computed in
float32 and rounded once. Rows may be 0. Nothing is compiled, and Numba is not imported, before a kernel first needs it.
"""

from fsdpx.array.kernels.activation import *
from fsdpx.array.kernels.attention import *
from fsdpx.array.kernels.choice import chosen as chosen
from fsdpx.array.kernels.choice import use as use
from fsdpx.array.kernels.correlation import *
from fsdpx.array.kernels.half import *
from fsdpx.array.kernels.loss import *
from fsdpx.array.kernels.norm import *
