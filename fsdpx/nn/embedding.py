"""Embedding: whole numbers to rows of a table."""

from collections.abc import Mapping
from typing import Any

from fsdpx.array import kernels
from fsdpx.errors import DataError
from fsdpx.nn.check import positive
from fsdpx.nn.init import Init, normal
from fsdpx.nn.layer import Array, Env, Layer, Spec
from fsdpx.nn.numeric import is_index

__all__ = ["Embedding", "check_index"]


class Embedding(Layer):
    """`(samples, ...)` of whole numbers in [0, num_embeddings) -> `(samples, ..., embedding_dim)`.

    Parameter `weight (num_embeddings, embedding_dim)`, from N(0, 1) as in PyTorch. The input gets no
    gradient.
    """

    acts_on = "position"
    runs = ("embedding_backward",)

    def __init__(self, num_embeddings: int, embedding_dim: int, *, init: Init | None = None) -> None:
        positive(self, num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.init = init

    def specs(self) -> dict[str, Spec]:
        return {"weight": Spec((self.num_embeddings, self.embedding_dim), self.init or normal(1.0))}

    def forward(self, env: Env, p: Mapping[str, Array], x: Array) -> tuple[Array, Any]:
        check_index(self, x, self.num_embeddings)
        return p["weight"][x], (x,)

    def backward_input(self, env: Env, p: Mapping[str, Array], saved: Any, dy: Array) -> tuple[None, Any]:
        return None, (saved[0], dy)

    def backward_params(self, env: Env, g: Mapping[str, Array], kept: Any) -> None:
        x, dy = kept
        if "weight" in g:
            rows = dy.reshape(-1, self.embedding_dim)
            kernels.embedding_backward(env.xp, g["weight"], x.reshape(-1), rows)


def check_index(layer: Layer, x: Array, count: int) -> None:
    """Refuse what is no row number; NumPy would take -1 for the last row and CuPy would wrap around."""
    if not is_index(x):
        raise DataError(f"{layer!r} wants whole numbers, got {x.dtype}")
    if x.size and (float(x.min()) < 0 or float(x.max()) >= count):
        low, high = int(x.min()), int(x.max())
        wrong = low if low < 0 else high
        raise DataError(f"{layer!r}: index {wrong} is out of range: it must be from 0 to {count - 1}")
