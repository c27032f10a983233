"""Steps of a codec by itself on thread ranks: what arrives, what is kept, what travels."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fsdpx.core.comm import Communicator, spawn, split_evenly
from fsdpx.core.comm.communicator import CountingCommunicator, TrafficCounters


def steps(
    codec: Any, size: int, count: int, together: bool, make: Any, counts: Sequence[int] | None = None, moved: Any = None
) -> list[Any]:
    """What arrived on each rank in each step, and what it keeps in the end. together: by `all_reduce`; else each rank
    gets a part of `counts`, by default even ones. moved: a dict for the traffic of each rank."""

    def body(comm: Communicator) -> Any:
        first, counters = make(comm.rank, 0), TrafficCounters()
        n, counted = first.size, CountingCommunicator(comm, "x", counters)
        parts = counts or split_evenly(n, size)
        scratch = np.empty(codec.scratch_bytes(n, size), np.uint8)
        memory = {name: np.zeros(elements, first.dtype) for name, elements in codec.memory_sizes(n).items()}
        found = []
        for step in range(count):
            grad = make(comm.rank, step).copy()
            out = grad if together else np.empty(parts[comm.rank], grad.dtype)
            if together:
                codec.all_reduce(counted, grad, scratch, memory, what="g").wait()
            else:
                codec.reduce_scatter(counted, grad, out, parts, scratch, memory, what="g").wait()
            found.append(out)
        if moved is not None:
            moved[comm.rank] = {verb: (calls, nbytes) for _, verb, calls, nbytes in counters}
        return found, memory

    return spawn(body, size, timeout=60)


def arrived(found: list[Any], step: int, together: bool) -> np.ndarray:
    parts = [outs[step] for outs, _ in found]
    assert not together or len({part.tobytes() for part in parts}) == 1
    return (parts[0] if together else np.concatenate(parts)).astype(np.float64)
