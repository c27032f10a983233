"""`spawn`: run a function on thread ranks of this process and return what each of them returned."""

from __future__ import annotations

import random
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from fsdpx import environment
from fsdpx.comm import default
from fsdpx.comm.carrier import TIMEOUT
from fsdpx.comm.communicator import Communicator
from fsdpx.comm.local import LocalCommunicator
from fsdpx.comm.rendezvous import Died, ThreadGroup, ThreadWorld
from fsdpx.errors import Aborted, ConfigError

__all__ = ["spawn"]

_GRACE = 2.0


def spawn(
    fn: Callable[..., Any], size: int, *args: Any,
    timeout: float | None = None, delays: int | None = None, survive: bool = False,
) -> list[Any]:  # fmt: skip
    """Run `fn(comm, *args)` on ranks that are threads of this process; what each of them returned, by rank.

    The first exception of any rank ends the others and is raised again here, with a note that names the rank.
    A rank that returns while others wait for it in a call is such an exception, at once: DesyncError names both.
    `fsdpx.all_reduce` and its kind use the rank's own communicator inside `fn`.

    Parameters
    ----------
    size : number of ranks.
    timeout : seconds that a rank may wait for others; then CommTimeout names the ranks that have not come, and a note
        says where they stand. None: FSDPX_TIMEOUT, else half an hour. There is no limit on the whole.
    delays : seed of random sleeps of up to 2 ms before each communication, for tests.
    survive : a rank that raises `Died` dies alone: the others, whose communicators are survivors, live on, and its
        result is None. If all die, the first death is raised here.
    """
    if size < 1:
        raise ConfigError(f"spawn needs at least 1 rank, not {size}")
    world = ThreadWorld(environment.read().timeout or TIMEOUT if timeout is None else timeout, survive)
    group = ThreadGroup(world, range(size))
    results: list[Any] = [None] * size
    failures: list[tuple[int, BaseException]] = []
    deaths: list[tuple[int, Died]] = []

    def run(rank: int) -> None:
        jitter = None if delays is None else random.Random(delays * 1_000_003 + rank)
        comm: Communicator = LocalCommunicator(group, rank, delays=jitter)
        try:
            with default.use(comm):
                results[rank] = fn(comm, *args)
        except BaseException as error:
            if survive and isinstance(error, Died):
                deaths.append((rank, error))
                world.bury(rank)
                return
            failures.append((rank, error))
            world.fail(error)
        world.end(rank)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    late = _join(threads, world)
    if failures:
        rank, error = next((f for f in failures if not isinstance(f[1], Aborted)), failures[0])
        error.add_note(f"[rank {rank}] of {size} thread ranks")
        if late:
            error.add_note(_where(late))
        raise error
    if len(deaths) == size:
        rank, death = deaths[0]
        death.add_note(f"[rank {rank}] the first of {size} thread ranks, all of which died")
        raise death
    return results


def _join(threads: list[threading.Thread], world: ThreadWorld) -> list[threading.Thread]:
    """Wait for all ranks; when one has failed, the others have a short grace to notice. Returns those that have not."""

    def over() -> bool:
        return len(world.dead | world.returned) == len(threads)

    with world.condition:
        world.condition.wait_for(lambda: world.failure is not None or over())
        world.condition.wait_for(over, _GRACE)
        done = world.dead | world.returned
    for rank in done:
        threads[rank].join()
    return [thread for rank, thread in enumerate(threads) if rank not in done]


def _where(threads: list[threading.Thread]) -> str:
    frames = sys._current_frames()
    stands = []
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        lines = traceback.format_stack(frame)[-1].strip() if frame else "gone"
        stands.append(f"{thread.name} at {lines}")
    return "\n".join(stands)
