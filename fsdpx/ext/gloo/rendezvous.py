"""The rendezvous of ranks without MPI: a torch.distributed store in which each rank records when it arrives and when it
ends."""

from __future__ import annotations

import errno
import hmac
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from hmac import compare_digest
from ipaddress import ip_address
from typing import Any, NamedTuple

import numpy as np

from fsdpx.core.base import environment
from fsdpx.core.base.environment import Environment, RendezvousStore
from fsdpx.core.base.messages import format_ranks
from fsdpx.core.comm.mpi.mpi_init_watchdog import get_process_start_time
from fsdpx.errors import CommError, ConfigError, LaunchError, RankLost, install_hint

__all__ = ["CHALLENGE_BYTES", "SEAL_BYTES", "Rendezvous", "compute_hmac", "opened_rendezvous"]

CHALLENGE_BYTES = 32
"""Number of random bytes in the challenge that each rank sends to the others."""
SEAL_BYTES = 32
"""Number of bytes in the result of `compute_hmac`."""
_MAX_ARRIVAL_BYTES = 4096
"""Maximum size of an arrival record, in bytes."""

_POLL_SECONDS = 0.02
_SECONDS_TO_DIE = 1.0
"""Maximum time that this rank waits, after a connection breaks, to find out whether another rank has ended."""

opened_rendezvous: list[Rendezvous] = []
"""The rendezvous of this process. The list is empty until all ranks have arrived."""


class RankArrival(NamedTuple):
    """The record that a rank writes into the store when it arrives. `once` is random text that identifies the
    process."""

    rank: int
    size: int
    process: int
    host: str
    local_rank: int | None
    once: str

    def to_signed_text(self, secret: bytes) -> str:
        text = json.dumps(list(self))
        return f"{compute_hmac(secret, text).tobytes().hex() if secret else ''} {text}"

    @classmethod
    def parse_signed(cls, data: bytes, secret: bytes) -> RankArrival | None:
        """Return the arrival record in `data`, or None if it is invalid or not signed with the secret."""
        try:
            seal, _, text = data[:_MAX_ARRIVAL_BYTES].decode().partition(" ")
            if secret and not compare_digest(compute_hmac(secret, text).tobytes(), bytes.fromhex(seal)):
                return None
            rank, size, process, host, local_rank, once = json.loads(text)
            numbers = [rank, size, process, *([] if local_rank is None else [local_rank])]
            if not all(type(n) is int for n in numbers) or not (isinstance(host, str) and isinstance(once, str)):
                return None
            return cls(rank, size, process, host, local_rank, once)
        except (ValueError, TypeError, RecursionError):
            return None


def compute_hmac(secret: bytes, text: str, challenges: bytes = b"") -> np.ndarray:
    """Return the HMAC-SHA256 of `text` and `challenges` as a uint8 array. Only a process that knows the secret can
    compute this code. `challenges` are random bytes that ranks exchange to prevent replay of a code."""
    return np.frombuffer(hmac.digest(secret, f"fsdpx {text} ".encode() + challenges, "sha256"), np.uint8)


class Rendezvous:
    """The ranks of a job, after they have all registered in a common store.

    Attributes
    ----------
    store : the torch.distributed store
    worlds : number of communicators opened on the store
    loopback : the loopback address if all ranks are on this host, else ""
    """

    def __init__(
        self, store: Any, rank: int, size: int, timeout: float, location: RendezvousStore, secret: bytes = b"",
        local_rank: int | None = None, since: float | None = None,
    ) -> None:  # fmt: skip
        """Announce this rank, and wait at most `timeout` seconds until all other ranks have arrived. Collective.

        A process that does not know `secret` cannot join the job. The `timeout` seconds are counted from the time
        `since`."""
        self.store, self.rank, self.size, self.timeout, self.where = store, rank, size, timeout, location
        self.secret, self.worlds = secret, 0
        self._deadline = (time.monotonic() if since is None else since) + timeout
        self._refused: set[int] = set()
        self._arrivals: dict[int, RankArrival] = {}
        self._announce_rank(RankArrival(rank, size, os.getpid(), platform.node(), local_rank, os.urandom(8).hex()))
        self._wait_for_ranks()
        self._local_processes = {
            r: one.process for r, one in self._arrivals.items() if one.host == platform.node() and r != rank
        }
        self.loopback = _find_loopback_if_all_ranks_local(location, {one.host for one in self._arrivals.values()})
        self._arrival_text = json.dumps([one.once for _, one in sorted(self._arrivals.items())])
        opened_rendezvous[:] = [self]

    def compute_authentication_code(self, key: str, value: bytes) -> bytes:
        """Return the authentication code that precedes the value of `key` in the store. The secret is required to
        compute the code."""
        return compute_hmac(self.secret, f"{self._arrival_text} {key}", value).tobytes()

    def compute_seconds_left(self) -> float:
        """Return the number of seconds that remain for the other ranks to arrive, at least 1."""
        return max(self._deadline - time.monotonic(), 1.0)

    def _announce_rank(self, mine: RankArrival) -> None:
        """Record that this rank has arrived. Raises LaunchError if another process has already arrived with the same
        rank."""
        key = f"came/{mine.rank}"
        with self._translating_store_errors():
            first = self.store.compare_set(key, "", mine.to_signed_text(self.secret))
            there = RankArrival.parse_signed(first, self.secret)
            if there is None or there.rank != mine.rank:  # the value was not written by a rank of this job
                self.store.set(key, mine.to_signed_text(self.secret))
                return
        if there == mine:
            return
        same = there.host == mine.host and there.local_rank != mine.local_rank
        first_of_node = f"RANK={mine.rank} is that of the first rank of a node, and each needs its own: set RANK to "
        raise LaunchError(
            f"rank {mine.rank} of {mine.size} (LOCAL_RANK={mine.local_rank}) meets another rank {mine.rank} at "
            f"{self.where}: process {there.process} of {there.host} (LOCAL_RANK={there.local_rank}). "
            + (
                f"{first_of_node}$((RANK + LOCAL_RANK))"
                if same
                else "Two ranks have the same RANK, or another job meets there: give each job a port or file of its own"
            )
        )

    def _wait_for_ranks(self) -> None:
        missing = list(range(self.size))
        while missing := [other for other in missing if not self._record_rank_if_arrived(other)]:
            if time.monotonic() > self._deadline:
                refused = self._refused.intersection(missing)
                why = (
                    f"who came as {format_ranks(sorted(refused))} does not know the FSDPX_SECRET of this job: "
                    "FSDPX_SECRET differs between ranks, or it is another job's rank or a stranger, and is refused"
                    if refused
                    else "a rank that is missing has not begun, has ended, meets elsewhere or is busy. Check RANK and "
                    "WORLD_SIZE of all, or set FSDPX_START_TIMEOUT to more seconds"
                )
                raise LaunchError(
                    f"rank {self.rank} of {self.size} waited {self.timeout:g} s for {format_ranks(missing)} at "
                    f"{self.where}: {why}"
                )
            time.sleep(_POLL_SECONDS)

    def _record_rank_if_arrived(self, other: int) -> bool:
        with self._translating_store_errors():
            if not self.store.check([f"came/{other}"]):
                return False
            found = RankArrival.parse_signed(self.store.get(f"came/{other}"), self.secret)
        if found is None or found.rank != other:
            self._refused.add(other)
            return False
        if found.size != self.size:
            raise LaunchError(
                f"rank {self.rank} has WORLD_SIZE={self.size}, but rank {other} (process {found.process} of "
                f"{found.host}), which meets at {self.where} too, has WORLD_SIZE={found.size}: set the same on all "
                "ranks, and give each job a port or file of its own"
            )
        self._arrivals[other] = found
        return True

    @contextmanager
    def _translating_store_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise LaunchError(
                f"rank {self.rank} of {self.size} has lost the store at {self.where} while ranks met: rank 0, which "
                f"keeps it, has ended ({reason})"
            ) from error

    def record_first_ended_rank(self, rank: int) -> int:
        """Record in the store that `rank` has ended or is about to end. If a rank is already recorded, leave this
        record unchanged. Return the recorded rank."""
        return int(self.store.compare_set("ended", "", str(rank)))

    @contextmanager
    def translating_torch_errors(self, action: str) -> Iterator[None]:
        """Context manager that turns torch errors into RankLost, which names the rank that has ended. If no rank is
        known to have ended, the errors become CommError.

        `action` describes what failed, for the error message."""
        try:
            yield
        except (CommError, ConfigError):
            raise
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            dead = self._find_first_ended_rank()
            if dead is not None:
                raise RankLost(f"{action}: rank {dead} has ended ({reason})", [dead]) from error
            far = (
                ""
                if len(self._local_processes) == self.size - 1
                else "a rank of another host has ended or is out of reach: "
            )
            raise CommError(f"{action}: {far}{reason}") from error

    def _find_first_ended_rank(self) -> int | None:
        """Return the rank that ended first, according to the store or the processes on this host. Return None if no
        rank is known to have ended."""
        end = time.monotonic() + _SECONDS_TO_DIE
        while time.monotonic() < end:
            here = [rank for rank, process in self._local_processes.items() if not get_process_start_time(process)]
            try:
                if here:
                    return self.record_first_ended_rank(here[0])
                if self.store.check(["ended"]):
                    return int(self.store.get("ended"))
            except RuntimeError:  # rank 0, which hosts the store, has ended
                return here[0] if here else 0
            except ValueError:  # the value was not written by a rank of this job
                return None
            time.sleep(_POLL_SECONDS)
        return None


def join_rendezvous(settings: Environment) -> Rendezvous:
    """Return the rendezvous of all ranks that the launcher has started. Environment variables say where to find the
    rendezvous. Collective.

    The rendezvous is made once per process. Raises LaunchError if the environment does not describe a rendezvous, or if
    a rank does not arrive."""
    if opened_rendezvous:
        return opened_rendezvous[0]
    dist = _import_torch_distributed()
    launcher = settings.launcher
    if launcher is None or launcher.rank is None or settings.expected_size is None:
        raise LaunchError(
            "backend='gloo': RANK and WORLD_SIZE do not say which of how many ranks this is; start the script with "
            "fsdpx run --backend gloo -n N or torchrun"
        )
    location = launcher.store
    if location is None:
        raise LaunchError(
            "backend='gloo': MASTER_ADDR and MASTER_PORT, or FSDPX_STORE, do not say where ranks meet; start the "
            "script with fsdpx run --backend gloo -n N or torchrun"
        )
    rank, size = launcher.rank, settings.expected_size
    if rank >= size:
        raise LaunchError(f"RANK={rank} is not below WORLD_SIZE={size}: ranks are numbered from 0")
    secret, since, timeout = environment.read_secret(), time.monotonic(), settings.start_timeout
    if not secret and rank == 0:
        print(f"fsdpx: {_format_missing_secret_warning(location)}", file=sys.stderr, flush=True)
    store = _open_store(dist, location, rank, size, timeout, bool(secret))
    return Rendezvous(store, rank, size, timeout, location, secret, launcher.local_rank, since)


def _format_missing_secret_warning(location: RendezvousStore) -> str:
    """Return a warning that the job has no secret. The warning explains what an attacker could do and how to set a
    secret."""
    who = "whoever reaches that address, other users of this host too,"
    who = "whoever can write that file" if location.file else who
    alone = "" if location.file or location.served else "Rank 0 answers on the address of MASTER_ADDR alone. "
    return (
        f"no FSDPX_SECRET is set, so {who} can pose as a rank of this job at {location}. {alone}Set FSDPX_SECRET to "
        "the same secret on all ranks (openssl rand -hex 32), then ranks prove that they belong together"
    )


def _find_loopback_if_all_ranks_local(location: RendezvousStore, hosts: set[str]) -> str:
    """Return the loopback address if all ranks are on this host and connect through loopback, else ""."""
    if len(hosts) > 1:
        return ""
    if location.file:
        return "127.0.0.1"
    try:
        address = _resolve_address(location)[4][0]
        return str(address) if ip_address(str(address)).is_loopback else ""
    except (OSError, ValueError):
        return ""


def _resolve_address(location: RendezvousStore) -> Any:
    """Return the family and address of MASTER_ADDR, preferring IPv4."""
    found = socket.getaddrinfo(location.address, location.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return min(found, key=lambda one: one[0] != socket.AF_INET)


def _wait_until_store_listens(location: RendezvousStore, timeout: float) -> float:
    """Wait until the store accepts connections, and return the number of seconds left of `timeout`.

    The store's own wait function is not used, because it could take up to twice its timeout."""
    end = time.monotonic() + timeout
    while True:
        left = max(end - time.monotonic(), 1.0)
        try:
            socket.create_connection((location.address, location.port), left).close()
            return left
        except OSError as error:
            if time.monotonic() > end:
                raise OSError(f"no process has answered within {timeout:g} s: {error}") from error
        time.sleep(_POLL_SECONDS)


def _open_listening_socket(location: RendezvousStore, any_address: bool) -> socket.socket:
    """Return the socket on which rank 0 serves the store.

    The socket is bound to the address of MASTER_ADDR. If `any_address` is true and MASTER_ADDR is not an address of
    this host, the socket is bound to all addresses."""
    family, _, _, _, address = _resolve_address(location)
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
    except OSError as error:
        if not any_address or error.errno != errno.EADDRNOTAVAIL:
            made.close()
            raise
        made.bind(("", location.port))
    made.listen(1024)
    return made


def _import_torch_distributed() -> Any:
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise ConfigError(
            f"backend='gloo' needs PyTorch, which cannot be imported ({error}): {install_hint('gloo')}"
        ) from error
    if not dist.is_available() or not dist.is_gloo_available():
        raise ConfigError(f"backend='gloo': this PyTorch was built without Gloo; {install_hint('gloo')}")
    return dist


def _open_store(dist: Any, location: RendezvousStore, rank: int, size: int, timeout: float, has_secret: bool) -> Any:
    """Open the job's store, which is a file or a server. If the store is a server, rank 0 runs it unless torchrun
    already does.

    `has_secret` states whether the ranks of the job share a secret."""
    try:
        if location.file:
            return dist.PrefixStore("fsdpx", dist.FileStore(location.file, size))
        keeps = rank == 0 and not location.served
        listening = _open_listening_socket(location, has_secret).detach() if keeps else None
        left = timeout if keeps else _wait_until_store_listens(location, timeout)
        made = dist.TCPStore(
            location.address, location.port, None, keeps, timedelta(seconds=left),
            wait_for_workers=False, multi_tenant=True, master_listen_fd=listening,
        )  # fmt: skip
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise LaunchError(
            f"rank {rank} of {size} cannot meet the others at {location} ({reason}): both name the host of rank 0 and "
            "a port that is free there, the same on all ranks"
        ) from error
    return dist.PrefixStore(f"fsdpx{location.start}", made)
