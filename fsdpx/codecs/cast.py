"""Gradients in 16 bits, added in float32."""

from __future__ import annotations

from collections.abc import Sequence

from fsdpx.array.namespace import dtype as dtype_of
from fsdpx.codecs.codec import Codec, Memory
from fsdpx.comm.calls import Array, Handle
from fsdpx.comm.communicator import Communicator
from fsdpx.errors import ConfigError

__all__ = ["Cast"]


class Cast(Codec):
    """Gradients travel in 16 bits and are added in fp32 in rank order by the owner of a part: half the bytes, one
    rounding per contribution, none in the sum. For all ranks the sum is rounded once more. Inside a host nothing
    travels: the rank that adds reads the others' gradients where they lie, and rounds them then. `name` of the format:
    "bf16" or "float16".

    Where all parts are equal, what is sent and what arrives take the place of the gradient, and no more memory."""

    elementwise = True
    itemsize: int | None = 2

    def __init__(self, name: str) -> None:
        self.dtype = dtype_of(name)
        if self.dtype.itemsize != 2:
            raise ConfigError(f"Cast({name!r}): a 16-bit format is needed, float16 or bf16")

    def reduce(
        self, comm: Communicator, grad: Array, out: Array, counts: Sequence[int], scratch: Array, memory: Memory,
        *, what: str,
    ) -> Handle:  # fmt: skip
        return comm.reduce_scatter(grad, out, counts=counts, what=what, wire=self.dtype)

    def reduce_all(self, comm: Communicator, grad: Array, scratch: Array, memory: Memory, *, what: str) -> Handle:
        return comm.all_reduce(grad, what=what, wire=self.dtype)
