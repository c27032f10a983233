"""GPUs: the choice of a GPU for each rank, streams, kernels and matrix products. CuPy is imported when first needed."""
