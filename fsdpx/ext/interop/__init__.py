"""Adapters for models from other libraries: PyTorch (`.torch`), JAX (`.jax`) and autograd (`.function_layer`). This
file imports none of them."""
