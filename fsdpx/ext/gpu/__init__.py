"""GPU support through CuPy, imported only when first needed: devices, streams, kernels, matrix products and NCCL."""
