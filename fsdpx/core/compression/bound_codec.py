"""What carries the gradients of one page over one mesh axis, with all that it needs on this rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from fsdpx.core.comm.calls import Handle
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.compression.codec import Codec

__all__ = ["BoundCodec"]


class BoundCodec(NamedTuple):
    """A codec on a communicator. memory: what it keeps of this page. scratch: bytes that it may use until its sum is
    there. sizes: of the last gradient with all that was owed, and of what is owed after it; Euclidean, of a part of the
    elements, for reports. what: names the gradient in errors."""

    codec: Codec
    comm: Communicator
    memory: Mapping[str, Any]
    scratch: Any
    sizes: list[float]
    what: str

    def keep(self, grad: Any) -> None:
        """Add what is owed to a gradient that no other rank adds to."""
        if self.memory:
            self.codec.apply_on_one_rank(grad, self.memory)

    def start_reduce(self, grad: Any, out: Any, counts: Sequence[int]) -> Handle:
        """Start to sum; this rank's part arrives in `out`."""
        with self._measure_error(grad):
            return self.codec.reduce(self.comm, grad, out, counts, self.scratch, self.memory, what=self.what)

    def reduce_all(self, grad: Any) -> Handle:
        """Start to sum in place, for all ranks."""
        with self._measure_error(grad):
            return self.codec.reduce_all(self.comm, grad, self.scratch, self.memory, what=self.what)

    def _measure_error(self, grad: Any) -> AbstractContextManager[None]:
        """Around a call of the codec: see `sizes`. Of arrays on the host, others would wait for it."""
        error = self.memory.get("error")
        return (
            self._measure_residual(grad, error) if error is not None and isinstance(grad, np.ndarray) else nullcontext()
        )

    @contextmanager
    def _measure_residual(self, grad: np.ndarray, error: Any) -> Iterator[None]:
        with np.errstate(all="ignore"):
            whole = float(np.linalg.norm(_sample_elements(grad) + _sample_elements(error)))
        yield
        with np.errstate(all="ignore"):
            self.sizes[:] = whole, float(np.linalg.norm(_sample_elements(error)))


SAMPLED, SPAN = 1024, 1 << 14
"""Of large arrays SAMPLED elements of each SPAN are looked at."""


def _sample_elements(array: Any) -> Any:
    """Enough of a flat array to tell how large it is."""
    rows = array.size // SPAN
    return array if rows < 16 else array[: rows * SPAN].reshape(rows, SPAN)[:, :SAMPLED]
