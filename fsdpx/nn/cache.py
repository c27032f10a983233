"""Keys and values of the tokens that a model has read, so that it reads each token once when it writes text."""

from typing import Any

import numpy as np

from fsdpx.core.array import kernels

__all__ = ["KeyValueCache"]


class KeyValueCache:
    """What attention layers keep between forwards, each under its path; `LayerContext.cache` gives it to all layers.

    Row i of a forward's input holds the tokens at positions `lengths[i]`, `lengths[i] + 1`, ... of its text. The
    caller sets all `lengths` before each forward, so a row may also be read again from an earlier position.

    Parameters
    ----------
    rows : texts
    capacity : tokens of the longest text
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

    def positions_of_input(self, time: int) -> np.ndarray:
        """The positions of the tokens of a forward's input, (rows, time), int64."""
        return np.asarray(self.lengths[:, None] + np.arange(time))

    def attend(self, xp: Any, path: str, q: Any, k: Any, v: Any, scale: float, window: int = 0) -> Any:
        """Causal attention of new tokens to themselves and to all before: (rows, heads, time, d_head).

        path: of the layer. The others are those of the kernel.

        Texts begin with any number of tokens, those of shorter ones filled up behind; then all go on by one token."""
        time = q.shape[2]
        if path not in self._held:
            self._held[path] = tuple(xp.empty((*a.shape[:2], self.capacity, a.shape[3]), dtype=a.dtype) for a in (k, v))
        keys, values = self._held[path]
        if self._begins:
            keys[:, :, :time], values[:, :, :time] = k, v
            return kernels.attention(xp, q, k, v, True, scale, window)[0]
        assert time == 1, f"{time} tokens behind others"
        if self._alike:
            return _attend_one_token(xp, (q, k, v), (keys, values), int(self.lengths[0]), scale, window)
        o = xp.empty(q.shape, dtype=q.dtype)
        for i, length in enumerate(self.lengths.tolist()):  # each row as if it were alone: the same bits
            row = slice(i, i + 1)
            o[row] = _attend_one_token(xp, (q[row], k[row], v[row]), (keys[row], values[row]), length, scale, window)
        return o


def _attend_one_token(
    xp: Any, new: tuple[Any, Any, Any], held: tuple[Any, Any], length: int, scale: float, window: int
) -> Any:
    """The attention of one new token per row to itself and to the `length` tokens before it."""
    (q, k, v), (keys, values) = new, held
    keys[:, :, length], values[:, :, length] = k[:, :, 0], v[:, :, 0]
    seen = slice(max(length + 1 - window, 0) if window else 0, length + 1)
    return kernels.attention(xp, q, keys[:, :, seen], values[:, :, seen], False, scale)[0]
