"""GPU support through CuPy, imported when first needed: devices, streams, kernels, matrix products and NCCL."""
