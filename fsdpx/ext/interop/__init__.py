"""Adapters of models from other libraries: `fsdpx.ext.interop.torch`, `.jax` and `.function_layer` (autograd). This
file imports none of them."""
