"""Arrays: array namespaces (NumPy, CuPy, shape-only), kernels, random numbers and buffer memory."""

from fsdpx.core.array.namespace import parse_dtype, from_host, get_namespace, namespace_of, to_host

__all__ = ["from_host", "get_namespace", "namespace_of", "parse_dtype", "to_host"]
