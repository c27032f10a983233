"""Embedding: whole numbers to rows of a table."""

from typing import Any

from fsdpx.array import kernels
from fsdpx.errors import DataError, ShapeError
from fsdpx.nn.check import positive
from fsdpx.nn.init import Init, normal
from fsdpx.nn.layer import Array, Env, Layer, Params, Spec
from fsdpx.nn.numeric import is_index

__all__ = ["Embedding", "TokenEmbedding", "Tokens", "check_index", "want_tokens"]


class Embedding(Layer):
    """`(samples, ...)` of integers in [0, num_embeddings) -> rows of `weight`, `(samples, ..., embedding_dim)`.

    DataError for other numbers.

    Parameters
    ----------
    num_embeddings : rows of `weight (num_embeddings, embedding_dim)`
    embedding_dim : features of a row
    init : of `weight`; None: N(0, 1) as in PyTorch
    """

    acts_on = "position"
    takes = "indices"
    runs = ("embedding_backward",)

    def __init__(self, num_embeddings: int, embedding_dim: int, *, init: Init | None = None) -> None:
        positive(self, num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        self.num_embeddings, self.embedding_dim, self.init = num_embeddings, embedding_dim, init

    def specs(self) -> dict[str, Spec]:
        return {"weight": Spec((self.num_embeddings, self.embedding_dim), self.init or normal(1.0))}

    def forward(self, env: Env, p: Params, x: Array) -> tuple[Array, Any]:
        check_index(self, x, self.num_embeddings)
        return p["weight"][x], (x,)

    def backward_input(self, env: Env, p: Params, saved: Any, dy: Array) -> tuple[None, Any]:
        return None, (saved[0], dy)

    def backward_params(self, env: Env, g: Params, kept: Any) -> None:
        x, dy = kept
        if "weight" in g:
            rows = dy.reshape(-1, self.embedding_dim)
            kernels.embedding_backward(env.xp, g["weight"], x.reshape(-1), rows)


class Tokens(Layer):
    """The base of token embeddings: weight[token] + position[time].

    Subclasses say which tokens they accept (`_want`), which positions these have (`_positions`), and, where a rank
    does not hold all rows of `weight`, how rows are looked up and their gradients added (`_rows`, `_add_rows`)."""

    takes = "indices"
    runs = ("embedding_backward",)
    caches = True

    def __init__(
        self, vocab: int, d_model: int, seq_len: int, *, init: Init | None = None, position_init: Init | None = None
    ) -> None:
        positive(self, vocab=vocab, d_model=d_model, seq_len=seq_len)
        self.vocab, self.d_model, self.seq_len = vocab, d_model, seq_len
        self.init, self.position_init = init, position_init

    def specs(self) -> dict[str, Spec]:
        return {
            "weight": Spec((self.vocab, self.d_model), self.init or normal(1.0)),
            "position": Spec((self.seq_len, self.d_model), self.position_init or normal(1.0)),
        }

    def forward(self, env: Env, p: Params, x: Array) -> tuple[Array, Any]:
        self._want(env, x)
        check_index(self, x, self.vocab)
        y = self._rows(env, p["weight"], x)
        if env.cache is None:
            kernels.add_bias(env.xp, y, p["position"][self._positions(env, x)])
        else:
            y += p["position"][env.xp.asarray(env.cache.positions(x.shape[1]))]
        return y, (x,)

    def backward_input(self, env: Env, p: Params, saved: Any, dy: Array) -> tuple[None, Any]:
        return None, (saved[0], dy)

    def backward_params(self, env: Env, g: Params, kept: Any) -> None:
        x, dy = kept
        if "weight" in g:
            self._add_rows(env, g["weight"], x, dy)
        if "position" in g:
            kernels.sum_rows(env.xp, dy, g["position"][self._positions(env, x)])

    def _want(self, env: Env, x: Array) -> None:
        want_tokens(self, x, self.seq_len)

    def _positions(self, env: Env, x: Array) -> slice:
        return slice(x.shape[1])

    def _rows(self, env: Env, weight: Array, x: Array) -> Array:
        return weight[x]

    def _add_rows(self, env: Env, gw: Array, x: Array, dy: Array) -> None:
        kernels.embedding_backward(env.xp, gw, x.reshape(-1), dy.reshape(-1, self.d_model))


class TokenEmbedding(Tokens):
    """Tokens `(samples, time)` -> weight[token] + position[time], `(samples, time, d_model)`.

    Parameters
    ----------
    vocab : tokens are integers in [0, vocab)
    d_model : features of the result
    seq_len : the longest time
    init : of `weight (vocab, d_model)`; None: N(0, 1)
    position_init : of `position (seq_len, d_model)`; None: N(0, 1)
    """


def check_index(layer: Layer, x: Array, count: int) -> None:
    """DataError unless `x` holds numbers of `count` rows; NumPy would take -1 for the last row, CuPy would wrap."""
    if not is_index(x):
        raise DataError(f"{layer!r} wants whole numbers, got {x.dtype}")
    if x.size and (float(x.min()) < 0 or float(x.max()) >= count):
        low, high = int(x.min()), int(x.max())
        wrong = low if low < 0 else high
        raise DataError(f"{layer!r}: index {wrong} is out of range: it must be from 0 to {count - 1}")


def want_tokens(layer: Layer, x: Array, seq_len: int) -> None:
    """`x` must be (samples, time) with a time of at most `seq_len`."""
    if x.ndim != 2 or x.shape[1] > seq_len:
        wanted = f"(samples, time <= {seq_len})"
        raise ShapeError(f"{layer!r} wants tokens of shape {wanted}, got {tuple(x.shape)}")
