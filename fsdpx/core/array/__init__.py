"""What an array is: namespaces, kernels, random numbers, shape-only arrays and the arena."""

from fsdpx.core.array.namespace import dtype, from_host, namespace, namespace_of, to_host

__all__ = ["dtype", "from_host", "namespace", "namespace_of", "to_host"]
