"""Memory use of a rank's process: its arena (large buffers), the memory that it shares with other ranks of the host,
and everything else."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fsdpx.core.base.config import parse_byte_count
from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.base.messages import format_bytes, format_table
from fsdpx.core.comm.init import find_node_communicator
from fsdpx.core.state.train_state import TrainState

__all__ = [
    "Footprint",
    "ProcessBytes",
    "count_arena_and_window_bytes",
    "find_memory_budget",
    "get_peak_rss",
    "make_footprint_reader",
]


class ProcessBytes(NamedTuple):
    """Number of bytes of memory that a process uses.

    Attributes
    ----------
    rss : resident bytes; memory shared by several ranks counts in full for each rank
    pss : resident bytes; memory shared by several ranks is divided by their number
    """

    rss: int
    pss: int


@dataclass(frozen=True)
class Footprint:
    """Memory use of one rank's process, split into its parts.

    Parameters
    ----------
    parts : size in bytes of each part, keyed by name (such as "arena"); together, the parts make up the memory of the
        process
    ranks_here : number of ranks on the host; None if it is unknown
    """

    parts: Mapping[str, ProcessBytes]
    ranks_here: int | None = 1

    @property
    def rss(self) -> int:
        """Resident bytes of this rank's process. Memory shared with other ranks counts in full."""
        return sum(part.rss for part in self.parts.values())

    @property
    def pss(self) -> int:
        """Resident bytes of this rank's process. Memory shared by several ranks is divided by their number, so the sum
        over all ranks of a host is the memory that they use together."""
        return sum(part.pss for part in self.parts.values())

    @property
    def host_bytes(self) -> int | None:
        """Number of bytes that all ranks on the host use together, assuming that each rank uses as much memory as this
        rank. None if the number of ranks is unknown."""
        return None if self.ranks_here is None else self.ranks_here * self.pss

    def __str__(self) -> str:
        """Return a table of the parts, their sum, and the total over all ranks of the host."""
        rows: list[tuple[str, ...]] = [("memory of the process", "RSS", "PSS")]
        rows += [(name, format_bytes(part.rss), format_bytes(part.pss)) for name, part in self.parts.items()]
        rows += [("in all", format_bytes(self.rss), format_bytes(self.pss))]
        if self.host_bytes is not None and self.ranks_here != 1:
            rows += [(f"{self.ranks_here} such ranks on a host", "", format_bytes(self.host_bytes))]
        return format_table(rows)

    def is_within(self, budget: int | str) -> bool:
        """Return whether this rank uses at most `budget` bytes of its host's memory, counted as `pss`.

        Parameters
        ----------
        budget : number of bytes, or text such as "2GiB"

        Returns
        -------
        bool : True if the memory use is within the budget
        """
        return self.pss <= parse_byte_count(budget, "memory")


def count_arena_and_window_bytes(state: TrainState, ranks_here: int) -> dict[str, ProcessBytes]:
    """Return the planned number of resident bytes of a rank's arena (large buffers) and of its shared memory.

    To sum gradients, each rank reads its shard from the shared memory of the other ranks. This memory then becomes
    resident in the rank's own process too, so it is also counted."""
    arena, total = state.arena, sum(state.count_bytes_by_kind().values())
    shared = [row for row in state.ledger if row.is_kept and row.inside is None and row.sharers > 1]
    common, share = sum(row.nbytes for row in shared), sum(row.nbytes // row.sharers for row in shared)
    private_bytes = max(sum(block.nbytes for block in arena.blocks) - common, 0)
    read = private_bytes * (ranks_here - 1) // ranks_here
    # do not count arrays that each update frees, because they use the same memory as activations
    private = max(total - share - private_bytes - state.ledger.count_bytes_freed_by_update(), 0)
    parts = {
        "arena": ProcessBytes(private, private),
        "shared windows": ProcessBytes(common + private_bytes + read, share + private_bytes),
    }
    return {name: part for name, part in parts.items() if part.rss}


def make_footprint_reader(state: TrainState) -> partial[Footprint | None]:
    """Return a function that measures the memory use of this process. On systems other than Linux, the returned
    function returns None.

    Call the returned function rarely, because each call makes Linux walk all memory pages of the process."""
    node, world = find_node_communicator(state.placement.axes.world), state.placement.axes.world
    here = len(node.ranks_on_host) if node else 1 if world.size == 1 else None
    return partial(
        _read_process_memory_footprint,
        count_arena_and_window_bytes(state, 1).get("arena", ProcessBytes(0, 0)).rss,
        here,
    )


def _read_process_memory_footprint(arena: int, ranks_here: int | None) -> Footprint | None:
    try:
        status, rollup = (_parse_kilobyte_lines(Path("/proc/self", name)) for name in ("status", "smaps_rollup"))
        private_bytes, files, shared = (1024 * status[name] for name in ("RssAnon", "RssFile", "RssShmem"))
    except (OSError, KeyError):
        return None
    arena = min(arena, private_bytes)
    parts = {
        "arena": ProcessBytes(arena, arena),
        "interpreter, libraries, activations": ProcessBytes(private_bytes - arena, private_bytes - arena),
        "code of libraries": ProcessBytes(files, 1024 * rollup.get("Pss_File", files // 1024)),
        "windows and MPI's shared memory": ProcessBytes(shared, 1024 * rollup.get("Pss_Shmem", shared // 1024)),
    }
    return Footprint({name: part for name, part in parts.items() if part.rss}, ranks_here)


def get_peak_rss() -> int:
    """Return the peak resident memory of this process, in bytes."""
    try:
        # read /proc if it exists, because getrusage would include the peak of the parent process
        return 1024 * _parse_kilobyte_lines(Path("/proc/self/status"))["VmHWM"]
    except (OSError, KeyError):
        import resource

        value = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return value if sys.platform == "darwin" else 1024 * value


PROCESS_LIMITS = (("RLIMIT_AS", "VmSize", "ulimit -v"), ("RLIMIT_DATA", "VmData", "ulimit -d"))


def find_memory_budget(held: int, ranks_here: int) -> tuple[str, int | None]:
    """Return a description of the available memory, and the number of bytes that each rank may plan to use. If the
    available memory is unknown, the number is None.

    `held` is the number of planned bytes that this rank has already allocated, and `ranks_here` is the number of ranks
    on this host."""
    try:
        machine, process_status = (_parse_kilobyte_lines(Path("/proc", name)) for name in ("meminfo", "self/status"))
        total, free = 1024 * machine["MemTotal"], 1024 * machine["MemAvailable"]
        used = [1024 * process_status[name] for _, name, _ in PROCESS_LIMITS]
        groups = [*_find_control_group_limits(Path("/proc/self/cgroup").read_text())]
    except (OSError, KeyError):  # /proc exists only on Linux
        return "unknown on this system", None
    import resource

    limits = [(f"{format_bytes(free)} free of {format_bytes(total)} on this machine", free // ranks_here + held)]
    limits += [(f"{format_bytes(n)} for its control group (cgroup)", n // ranks_here) for n in groups if n < total]
    for (name, _, words), taken in zip(PROCESS_LIMITS, used, strict=True):
        limit = resource.getrlimit(getattr(resource, name))[0]
        if limit != resource.RLIM_INFINITY:
            text = f"{format_bytes(limit)} for each process ({words}), of which {format_bytes(taken)} are taken"
            limits.append((text, max(limit - taken, 0) + held))
    shared = "" if ranks_here == 1 else f"; {ranks_here} ranks share it"
    return "; ".join(text for text, _ in limits) + shared, min(most for _, most in limits)


def _find_control_group_limits(text: str, root: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """Yield the memory limits, in bytes, of the Linux control groups (cgroups, version 1 or 2) to which a process
    belongs. `text` is the content of /proc/self/cgroup."""
    for _, controllers, path in (line.split(":", 2) for line in text.splitlines()):
        if controllers and "memory" not in controllers.split(","):
            continue
        top, file = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        folder = top / path.strip("/")
        for group in (folder, *folder.parents):
            if group.is_relative_to(top) and (group / file).is_file():
                limit = (group / file).read_text().strip()
                if limit != "max":
                    yield int(limit)


def _parse_kilobyte_lines(file: Path) -> dict[str, int]:
    """Parse a file with lines such as "name: number kB", and return a dict that maps names to numbers."""
    words = (line.split() for line in file.read_text().splitlines())
    return {w[0].rstrip(":"): int(w[1]) for w in words if len(w) == 3 and w[2] == "kB"}
