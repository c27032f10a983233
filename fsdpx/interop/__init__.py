"""Models of other libraries: `fsdpx.interop.torch`, `.jax` and `.autograd`. This file loads none of them."""

from fsdpx.interop.values import handed_on, native, same_values

__all__ = ["handed_on", "native", "same_values"]
