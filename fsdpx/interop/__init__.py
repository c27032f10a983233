"""Models of other libraries: `fsdpx.interop.torch`, `.jax` and `.autograd`. This file loads none of them."""
