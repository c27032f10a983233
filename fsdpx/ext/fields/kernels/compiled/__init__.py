"""Convolution and pooling kernels compiled with Numba, with the names and signatures of the plain ones."""
