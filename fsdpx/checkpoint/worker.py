"""A thread that lends a hand: it does one thing while its owner does another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType

__all__ = ["Worker"]

Task = Callable[[], object]


class Worker:
    """One task at a time: `begin(task)`, then `end()`, which waits for it and raises what it raised.

    Not an executor of `concurrent.futures`: those refuse work once the main program has ended, and a save in the
    background goes on after that. The thread is there while the `with` block lasts."""

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._ends: SimpleQueue[BaseException | None] = SimpleQueue()
        self._begun = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def free(self) -> bool:
        """Whether `begin` would not wait."""
        return not self._begun or not self._ends.empty()

    def begin(self, task: Task) -> None:
        """Start `task`, when the one before has ended."""
        self.end()
        self._begun = True
        self._tasks.put(task)

    def end(self) -> None:
        if self._begun:
            self._begun = False
            error = self._ends.get()
            if error is not None:
                raise error

    def __enter__(self) -> Worker:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
                self._ends.put(None)
            except BaseException as error:
                self._ends.put(error)
            del task  # and with it the memory that it refers to
