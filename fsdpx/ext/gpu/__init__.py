"""GPUs: the choice of one for each rank, streams, kernels and matrix products. CuPy is imported when first needed."""
