"""Kernels: what layers compute, each as plain array code and, where it is faster, as compiled code.

`f(xp, ...)` runs on NumPy, CuPy and shape-only arrays, in float64 and float32; float16 and bf16 arrays are computed in
float32 and rounded once. Rows may be 0. Nothing is compiled, and Numba is not imported, before a kernel first needs it.
"""

from fsdpx.core.array.kernels.activation import *
from fsdpx.core.array.kernels.attention import *
from fsdpx.core.array.kernels.choice import chosen as chosen
from fsdpx.core.array.kernels.choice import use as use
from fsdpx.core.array.kernels.correlation import *
from fsdpx.core.array.kernels.half import *
from fsdpx.core.array.kernels.loss import *
from fsdpx.core.array.kernels.norm import *
