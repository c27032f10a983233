"""Key-value cache for text generation, so that a model processes each token only once."""

from typing import Any

import numpy as np

from fsdpx.core.array import kernels

__all__ = ["KeyValueCache"]


class KeyValueCache:
    """Key-value cache for a batch of texts. The keys and values of earlier tokens are stored under the path of the
    attention layer. Layers access the cache as `LayerContext.cache`.

    Row i of an input contains the tokens of text i, beginning at position `lengths[i]`. The caller sets all `lengths`
    before each forward pass. To process a text again from an earlier position, use that position as its length.

    Parameters
    ----------
    rows : number of texts
    capacity : maximum number of tokens in a text
    """

    def __init__(self, rows: int, capacity: int) -> None:
        self.capacity = capacity
        self.lengths = np.zeros(rows, np.int64)
        self._held: dict[str, tuple[Any, Any]] = {}

    @property
    def lengths(self) -> np.ndarray:
        return self._lengths

    @lengths.setter
    def lengths(self, lengths: np.ndarray) -> None:
        self._lengths = lengths
        self._begins = not lengths.any()
        self._alike = bool((lengths == lengths[:1]).all())

    def get_input_positions(self, time: int) -> np.ndarray:
        """For an input with `time` tokens per text, return the positions of the tokens within their texts, as an int64
        array (rows, time)."""
        return np.asarray(self.lengths[:, None] + np.arange(time))

    def store_and_attend(self, xp: Any, path: str, q: Any, k: Any, v: Any, scale: float, window: int = 0) -> Any:
        """Store the keys and values of new tokens, and return the causal attention of these tokens to themselves and
        to all earlier tokens, as an array (rows, heads, time, d_head).

        `path` is the path of the attention layer; the other arguments are the same as for `kernels.attention`. The
        first call may read any number of tokens per text, with shorter texts padded at the end. Each later call reads
        one token per text."""
        time = q.shape[2]
        if path not in self._held:
            self._held[path] = tuple(xp.empty((*a.shape[:2], self.capacity, a.shape[3]), dtype=a.dtype) for a in (k, v))
        keys, values = self._held[path]
        if self._begins:
            keys[:, :, :time], values[:, :, :time] = k, v
            return kernels.attention(xp, q, k, v, True, scale, window)[0]
        assert time == 1, f"{time} tokens behind others"
        if self._alike:
            return _store_and_attend(xp, (q, k, v), (keys, values), int(self.lengths[0]), scale, window)
        o = xp.empty(q.shape, dtype=q.dtype)
        # process one sequence at a time, so that rounding does not depend on the other sequences in the batch
        for i, length in enumerate(self.lengths.tolist()):
            row = slice(i, i + 1)
            o[row] = _store_and_attend(xp, (q[row], k[row], v[row]), (keys[row], values[row]), length, scale, window)
        return o


def _store_and_attend(
    xp: Any, new: tuple[Any, Any, Any], held: tuple[Any, Any], length: int, scale: float, window: int
) -> Any:
    """Store the key and value of one new token per text in the cached arrays `held`, and return the attention of each
    new token to itself and to the `length` tokens before it."""
    (q, k, v), (keys, values) = new, held
    keys[:, :, length], values[:, :, length] = k[:, :, 0], v[:, :, 0]
    seen = slice(max(length + 1 - window, 0) if window else 0, length + 1)
    return kernels.attention(xp, q, keys[:, :, seen], values[:, :, seen], False, scale)[0]
