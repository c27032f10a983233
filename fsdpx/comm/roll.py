"""Where ranks without MPI meet: a store of torch.distributed, in which each says that it has come, and that it ends."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from fsdpx.comm.clock import ranks_text
from fsdpx.environment import Environment, Store
from fsdpx.errors import CommError, ConfigError, LaunchError, RankLost

__all__ = ["Roll", "opened"]

_LOOK = 0.02
_SECONDS_TO_DIE = 1.0
"""How long after its connections broke a process of this host may take to be seen to have ended."""

opened: list[Roll] = []
"""The roll of this process, once all have come."""


class Roll:
    """All ranks of the job; all have come within `timeout` seconds. store: of torch.distributed. worlds: those opened
    on it."""

    def __init__(self, store: Any, rank: int, size: int, timeout: float, where: Store) -> None:
        self.store, self.rank, self.size, self.timeout, self.where = store, rank, size, timeout, where
        self.worlds = 0
        store.set(f"came/{rank}", f"{os.getpid()} {platform.node()}")
        self._wait()
        entries = [store.get(f"came/{other}").decode().split(" ", 1) for other in range(size)]
        self._here = {r: int(process) for r, (process, host) in enumerate(entries) if host == platform.node()}
        self._here.pop(rank, None)
        opened[:] = [self]

    def _wait(self) -> None:
        end = time.monotonic() + self.timeout
        missing = list(range(self.size))
        while missing := [other for other in missing if not self.store.check([f"came/{other}"])]:
            if time.monotonic() > end:
                raise LaunchError(
                    f"rank {self.rank} of {self.size} waited {self.timeout:g} s for {ranks_text(missing)} at "
                    f"{self.where}: a rank that is missing has not begun, has ended, meets elsewhere or is busy. Check "
                    "RANK and WORLD_SIZE of all, or set FSDPX_START_TIMEOUT to more seconds"
                )
            time.sleep(_LOOK)

    def ended(self, rank: int) -> int:
        """Write that a rank has ended or is about to, unless another is known to have ended before; returns the
        recorded rank."""
        return int(self.store.compare_set("ended", "", str(rank)))

    @contextmanager
    def naming(self, where: str) -> Iterator[None]:
        """An error of torch inside becomes one of ours, with the rank that has ended. where: what failed."""
        try:
            yield
        except (CommError, ConfigError):
            raise
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            dead = self._first()
            if dead is not None:
                raise RankLost(f"{where}: rank {dead} has ended ({reason})", [dead]) from error
            far = "" if len(self._here) == self.size - 1 else "a rank of another host has ended or is out of reach: "
            raise CommError(f"{where}: {far}{reason}") from error

    def _first(self) -> int | None:
        """The rank that ended first, as far as is known on any rank."""
        end = time.monotonic() + _SECONDS_TO_DIE
        while time.monotonic() < end:
            here = [rank for rank, process in self._here.items() if _has_ended(process)]
            try:
                if here:
                    return self.ended(here[0])
                if self.store.check(["ended"]):
                    return int(self.store.get("ended"))
            except RuntimeError:  # the store has ended with the rank that kept it
                return here[0] if here else 0
            time.sleep(_LOOK)
        return None


def _has_ended(process: int) -> bool:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return Path("/proc/self/stat").exists()
    return stat.rpartition(")")[2].split()[0] in "ZX"


def call(settings: Environment) -> Roll:
    """Meet all ranks that the launcher has started, where the environment says: once in a process. LaunchError with
    what it does not say, and with the ranks that do not come."""
    if opened:
        return opened[0]
    dist = _torch()
    launcher = settings.launcher
    if launcher is None or launcher.rank is None or settings.expected_size is None:
        raise LaunchError(
            "backend='gloo': RANK and WORLD_SIZE do not say which of how many ranks this is; start the script with "
            "fsdpx run --backend gloo -n N or torchrun"
        )
    where = launcher.store
    if where is None:
        raise LaunchError(
            "backend='gloo': MASTER_ADDR and MASTER_PORT, or FSDPX_STORE, do not say where ranks meet; start the "
            "script with fsdpx run --backend gloo -n N or torchrun"
        )
    rank, size = launcher.rank, settings.expected_size
    if rank >= size:
        raise LaunchError(f"RANK={rank} is not below WORLD_SIZE={size}: ranks are numbered from 0")
    return Roll(_store(dist, where, rank, size, settings.start_timeout), rank, size, settings.start_timeout, where)


def _torch() -> Any:
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise ConfigError(
            f"backend='gloo' needs PyTorch, which cannot be imported ({error}): pip install 'fsdpx[gloo]'"
        ) from error
    if not dist.is_available() or not dist.is_gloo_available():
        raise ConfigError("backend='gloo': this PyTorch was built without Gloo; pip install 'fsdpx[gloo]'")
    return dist


def _store(dist: Any, where: Store, rank: int, size: int, timeout: float) -> Any:
    """The store of the job, kept by rank 0 unless it is a file or served by torchrun."""
    try:
        if where.file:
            return dist.FileStore(where.file, size)
        made = dist.TCPStore(
            where.address, where.port, None, rank == 0 and not where.served, timedelta(seconds=timeout),
            wait_for_workers=False, multi_tenant=True,
        )  # fmt: skip
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise LaunchError(
            f"rank {rank} of {size} cannot meet the others at {where} ({reason}): both name the host of rank 0 and a "
            "port that is free there, the same on all ranks"
        ) from error
    return dist.PrefixStore("fsdpx", made)
