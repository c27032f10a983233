"""Gradients as they are."""

from __future__ import annotations

from collections.abc import Sequence

from fsdpx.codecs.codec import Codec, Memory
from fsdpx.comm.calls import Array, Handle, ReduceOp
from fsdpx.comm.communicator import Communicator
from fsdpx.errors import ConfigError

__all__ = ["Plain"]


class Plain(Codec):
    """Gradients travel as they are: one reduce-scatter, or one all-reduce; (n - n/N) or twice that per rank.

    `algorithm` of all-reduces: "library", the backend's own, or "ring", ours, which is faster than some libraries' from
    a few MiB on."""

    elementwise = True

    def __init__(self, algorithm: str = "library") -> None:
        if algorithm not in ("library", "ring"):
            raise ConfigError(f"Plain({algorithm!r}): choose the algorithm library or ring")
        self.algorithm = algorithm

    def reduce(
        self, comm: Communicator, grad: Array, out: Array, counts: Sequence[int], scratch: Array, memory: Memory,
        *, what: str,
    ) -> Handle:  # fmt: skip
        return comm.reduce_scatter(grad, out, ReduceOp.SUM, counts, what=what)

    def reduce_all(self, comm: Communicator, grad: Array, scratch: Array, memory: Memory, *, what: str) -> Handle:
        return comm.all_reduce(grad, ReduceOp.SUM, self.algorithm, what=what)
