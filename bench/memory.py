"""How much memory this process holds: the peak of its life, and its share of what ranks hold together."""

import resource
import sys
import threading
from types import TracebackType

__all__ = ["PeakPss", "peak_rss", "pss"]

ROLLUP = "/proc/self/smaps_rollup"


def peak_rss() -> int:
    """The most bytes that were ever resident; a page that two ranks share counts in both. The number that `getrusage`
    has begins, in Linux, with what the process had that started this one."""
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        pass
    value = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return value if sys.platform == "darwin" else value * 1024


def pss() -> int | None:
    """Resident bytes now, each shared page divided by the number of its holders; None where the kernel does not say."""
    try:
        with open(ROLLUP) as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return None


class PeakPss:
    """The largest PSS inside a `with` block, looked up every few milliseconds by a thread of its own.

    Looking costs time (the kernel walks all pages), so steps inside the block are not the ones that are timed.
    """

    def __init__(self, pause: float = 0.01) -> None:
        self.peak = pss()
        self._pause, self._end = pause, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while self.peak is not None and not self._end.wait(self._pause):
            self.peak = max(self.peak, pss() or 0)

    def __enter__(self) -> "PeakPss":
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end.set()
        self._thread.join()
