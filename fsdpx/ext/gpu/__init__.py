"""GPUs: which one is a rank's, its streams, kernels and matrix products. Loads CuPy when it is first needed."""
