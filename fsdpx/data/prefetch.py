"""Reading ahead: an iterator that consumes another one in a thread, a few items deep."""

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from queue import Empty, Full, Queue
from typing import Any

__all__ = ["Prefetch"]

POLL = 0.2  # seconds between looks at `stopped` while the queue is full


@dataclass
class _Channel:
    """What the iterator and its thread share. The thread has no reference to the iterator, so that garbage collection
    of the iterator ends the thread."""

    queue: Queue[tuple[str, Any]]
    stopped: bool = field(default=False)


def _fill(source: Iterator[Any], channel: _Channel) -> None:
    def put(kind: str, value: Any) -> None:
        while not channel.stopped:
            try:
                return channel.queue.put((kind, value), timeout=POLL)
            except Full:
                continue

    try:
        for item in source:
            put("item", item)
            if channel.stopped:
                return
        put("end", None)
    except BaseException as error:
        put("error", error)


def _stop(channel: _Channel) -> None:
    channel.stopped = True  # takes no lock: it may run inside the garbage collection of any thread


class Prefetch:
    """Iterates over `source` with up to `depth` items ready. An exception of the source is raised from `next`, with its
    traceback. The thread ends with exhaustion, `close()` or garbage collection."""

    def __init__(self, source: Iterator[Any], depth: int, name: str) -> None:
        self._channel = _Channel(Queue(depth))
        self._thread = threading.Thread(target=_fill, args=(source, self._channel), name=name, daemon=True)
        self._finalizer = weakref.finalize(self, _stop, self._channel)
        self._thread.start()

    def __iter__(self) -> "Prefetch":
        return self

    def __next__(self) -> Any:
        if self._channel.stopped:
            raise StopIteration
        kind, value = self._channel.queue.get()
        if kind == "item":
            return value
        self.close()
        if kind == "end":
            raise StopIteration
        raise value

    def close(self) -> None:
        """End the thread and wait for it (for the item it is reading)."""
        self._finalizer()
        while self._thread.is_alive():
            try:
                self._channel.queue.get_nowait()
            except Empty:
                self._thread.join(POLL / 10)
