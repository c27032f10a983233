"""Models of other libraries: `fsdpx.ext.interop.torch`, `.jax` and `.autograd`. This file loads none of them."""
