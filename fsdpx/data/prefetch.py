"""A thread that reads ahead: an iterator that works through another one in the background, a few items
deep."""

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from queue import Empty, Full, Queue
from typing import Any

__all__ = ["Prefetch"]

POLL = 0.2  # seconds between looks at `stopped` while the queue is full


@dataclass
class _Line:
    """What the two sides share. The thread holds this and never the iterator, so that a forgotten iterator
    ends it."""

    queue: Queue[tuple[str, Any]]
    stopped: bool = field(default=False)


def _fill(source: Iterator[Any], line: _Line) -> None:
    def put(kind: str, value: Any) -> None:
        while not line.stopped:
            try:
                return line.queue.put((kind, value), timeout=POLL)
            except Full:
                continue

    try:
        for item in source:
            put("item", item)
            if line.stopped:
                return
        put("end", None)
    except BaseException as error:
        put("error", error)


def _stop(line: _Line) -> None:
    line.stopped = True  # takes no lock: it may run inside the garbage collection of any thread


class Prefetch:
    """Iterates over `source` with up to `depth` items ready. An exception of the source is raised from
    `next`, with the traceback of where it happened. Ends with its thread by exhaustion, `close()` or garbage
    collection."""

    def __init__(self, source: Iterator[Any], depth: int, name: str) -> None:
        self._line = _Line(Queue(depth))
        self._thread = threading.Thread(target=_fill, args=(source, self._line), name=name, daemon=True)
        self._finalizer = weakref.finalize(self, _stop, self._line)
        self._thread.start()

    def __iter__(self) -> "Prefetch":
        return self

    def __next__(self) -> Any:
        if self._line.stopped:
            raise StopIteration
        kind, value = self._line.queue.get()
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
                self._line.queue.get_nowait()
            except Empty:
                self._thread.join(POLL / 10)
