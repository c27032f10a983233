"""A gradient codec bound to one page (a flat buffer of several parameters) and one mesh axis, with the communicator
and buffers that it uses on this rank."""

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
    """A gradient codec together with the communicator and the buffers of one page (a flat buffer of several
    parameters).

    Attributes
    ----------
    memory : arrays that the codec keeps between steps, such as error feedback
    scratch : temporary memory (raw bytes) that the codec may use until the handle of its current call is complete
    error_norms : two Euclidean norms from the last call, for reports: the norm of the values before compression
        (`gradient + kept error`), and the norm of the new compression error. Both are estimated from a sample of the
        elements
    what : name of the gradient in error messages
    """

    codec: Codec
    comm: Communicator
    memory: Mapping[str, Any]
    scratch: Any
    error_norms: list[float]
    what: str

    def add_and_clear_kept_error(self, grad: Any) -> None:
        """Add the kept error (error feedback) to a gradient, then set the error to zero. If there is only one rank,
        this method is called instead of a reduce."""
        if self.memory:
            self.codec.add_and_clear_kept_error(grad, self.memory)

    def start_reduce_scatter(self, grad: Any, out: Any, counts: Sequence[int]) -> Handle:
        """Start a compressed reduce-scatter of `grad` and return its handle. `out` receives this rank's part of the
        sum. Collective."""
        with self._error_norms_context(grad):
            return self.codec.reduce_scatter(self.comm, grad, out, counts, self.scratch, self.memory, what=self.what)

    def start_all_reduce(self, grad: Any) -> Handle:
        """Start a compressed all-reduce of `grad` in place and return its handle. Collective."""
        with self._error_norms_context(grad):
            return self.codec.all_reduce(self.comm, grad, self.scratch, self.memory, what=self.what)

    def _error_norms_context(self, grad: Any) -> AbstractContextManager[None]:
        """Return a context manager in which the codec is called. It sets `error_norms`. It does nothing for GPU arrays,
        because computing the norms would require waiting for the device."""
        error = self.memory.get("error")
        return (
            self._recording_error_norms(grad, error)
            if error is not None and isinstance(grad, np.ndarray)
            else nullcontext()
        )

    @contextmanager
    def _recording_error_norms(self, grad: np.ndarray, error: Any) -> Iterator[None]:
        with np.errstate(all="ignore"):
            whole = float(np.linalg.norm(_sample_elements(grad) + _sample_elements(error)))
        yield
        with np.errstate(all="ignore"):
            self.error_norms[:] = whole, float(np.linalg.norm(_sample_elements(error)))


SAMPLED_ELEMENTS, SPAN_ELEMENTS = 1024, 1 << 14
"""To estimate the norm of a large array, only SAMPLED_ELEMENTS of every SPAN_ELEMENTS elements are read."""


def _sample_elements(array: Any) -> Any:
    """Return a sample of a large flat array that is sufficient to estimate its norm. Return a small array unchanged."""
    rows = array.size // SPAN_ELEMENTS
    return array if rows < 16 else array[: rows * SPAN_ELEMENTS].reshape(rows, SPAN_ELEMENTS)[:, :SAMPLED_ELEMENTS]
