"""Detect ranks that diverge: a communicator checks that all ranks call the same collectives, and a function checks that
they have the same settings.

Settings are compared when ranks first exchange data, before any setting takes effect. Functions register their
arguments with `comparing_arguments`, so that a communicator opened inside this context compares them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from fsdpx.core.comm.calls import Call, Handle, spin_until
from fsdpx.core.comm.communicator import Communicator, CommunicatorWrapper, describe_call
from fsdpx.errors import ConfigError, DesyncError

__all__ = ["CheckedCommunicator", "format_calls_by_rank", "make_desync_error", "require_same_settings_on_all_ranks"]

_FINGERPRINT_BYTES = 256
_DIGEST_CHARS = 8
_FINGERPRINT_TAG = 7


class CheckedCommunicator(CommunicatorWrapper):
    """A communicator that compares each collective between ranks before it starts, through a separate channel.

    Ranks exchange a fingerprint of the operation, `what`, the dtype, the element count, the reduction and the root.
    Values that only some ranks know are left out of the fingerprint. If fingerprints differ, all ranks raise a
    DesyncError that lists the call of each rank. If a rank does not arrive within `timeout` seconds, the other ranks
    raise a DesyncError that names the missing rank. Sends and receives are not checked. The exchange is blocking, so
    calls that would otherwise overlap run one after another. For each call, a rank sends 256 bytes to each other
    rank."""

    def __init__(self, comm: Communicator, timeout: float = 10.0) -> None:
        super().__init__(comm)
        self.timeout = timeout
        self._channel = comm.subgroup(range(comm.size))
        self._calls = 0

    def issue(self, call: Call) -> Handle:
        if self.size > 1 and call.verb not in ("send", "recv"):
            self._agree_on_call(describe_call(call))
        return self.comm.issue(call)

    def wrap_group(self, group: Communicator) -> Communicator:
        return CheckedCommunicator(group, self.timeout)

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        self._agree_on_call("split")
        return super().split(color, key)

    def subgroup(self, ranks: Sequence[int]) -> Communicator:
        self._agree_on_call("subgroup")
        return super().subgroup(ranks)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        self._agree_on_call("all_gather_value")
        return super().all_gather_bytes(data)

    def all_gather_object(self, obj: Any) -> list[Any]:
        self._agree_on_call("all_gather_object")
        return super().all_gather_object(obj)

    def close(self) -> None:
        """Close the separate communicator that is used to compare calls. The wrapped communicator stays open; its owner
        must close it."""
        self._channel.close()

    def _agree_on_call(self, call: str) -> None:
        """Wait until all ranks have reached the same call. Raise DesyncError on all ranks if their calls differ.
        Collective."""
        if self.size == 1:
            return
        calls = self._all_gather_call_descriptions(call)
        if any(other != calls[0] for other in calls):
            raise make_desync_error(self._calls, calls)

    def _all_gather_call_descriptions(self, call: str) -> list[str]:
        """Return descriptions of the calls that all ranks are about to make, in rank order. Collective."""
        self._calls += 1
        own_fingerprint = _encode_fingerprint(call)
        texts = np.zeros((self.size, _FINGERPRINT_BYTES), np.uint8)
        texts[self.rank] = own_fingerprint
        others = [other for other in range(self.size) if other != self.rank]
        description = f"the fingerprint of {call}"
        recvs = {other: self._channel.recv(texts[other], other, _FINGERPRINT_TAG, what=description) for other in others}
        sends = [self._channel.send(own_fingerprint, other, _FINGERPRINT_TAG, what=description) for other in others]

        def have_all_arrived() -> bool:
            for other in [other for other, handle in recvs.items() if handle.test()]:
                del recvs[other]
            return not recvs

        if not spin_until(have_all_arrived, self.progress, self.timeout):
            here = [rank for rank in range(self.size) if rank not in recvs]
            raise DesyncError(
                f"waited {self.timeout:g} s: ranks {sorted(recvs)} did not arrive at {call} "
                f"(call {self._calls}), which ranks {here} called: they failed, ended or wait elsewhere"
            )
        for handle in sends:
            handle.wait()
        return [bytes(text).rstrip(b"\0").decode(errors="replace") for text in texts]


def _encode_fingerprint(call: str) -> np.ndarray:
    """Encode the text `call` as an array with a fixed number of bytes. If the text is too long, its end is replaced
    with a hash of the full text."""
    data = call.encode()
    if len(data) > _FINGERPRINT_BYTES:
        data = (
            data[: _FINGERPRINT_BYTES - _DIGEST_CHARS - 3]
            + b"..."
            + blake2b(data, digest_size=_DIGEST_CHARS // 2).hexdigest().encode()
        )
    text = np.zeros(_FINGERPRINT_BYTES, np.uint8)
    text[: len(data)] = np.frombuffer(data, np.uint8)
    return text


def make_desync_error(number: int, calls: Sequence[str]) -> DesyncError:
    """Return the error to raise if call number `number` on a communicator differs between ranks. `calls[r]` is the call
    that rank r has made."""
    return DesyncError(
        f"ranks called different collectives (call {number}): {format_calls_by_rank(dict(enumerate(calls)))}"
    )


def format_calls_by_rank(calls: Mapping[int, str]) -> str:
    """Return a list of the distinct calls as text, each with the ranks that made it. `calls` maps ranks to calls."""
    ranks: dict[str, list[int]] = {}
    for rank, call in calls.items():
        ranks.setdefault(call, []).append(rank)
    return "; ".join(
        f"{'ranks' if len(who) > 1 else 'rank'} {', '.join(map(str, who))}: {call}" for call, who in ranks.items()
    )


REMEDY = (
    "Give all ranks the same (Open MPI passes no variables to other hosts: start with `python -m fsdpx run`, or say "
    "mpiexec -x NAME)"
)


def require_same_settings_on_all_ranks(
    comm: Communicator, settings: Mapping[str, str], arguments: Mapping[str, str] | None = None
) -> None:
    """Raise ConfigError on all ranks if `settings` or `arguments` differ between ranks. The error lists what differs,
    with the ranks that have each value. Collective.

    `settings` and `arguments` map names to values as text. A setting that only some ranks have also counts as a
    difference. `arguments` are the arguments of the function that this rank is executing. Only arguments that all ranks
    pass are compared."""
    everyone = comm.all_gather_value((dict(settings), dict(arguments or {})))
    every_setting, every_argument = zip(*everyone, strict=True)
    names = dict.fromkeys(name for one in every_setting for name in one)
    rows = {name: [one.get(name, "not given") for one in every_setting] for name in names}
    shared = set.intersection(*map(set, every_argument))
    rows |= {name: [one[name] for one in every_argument] for name in every_argument[0] if name in shared}
    different = {
        name: f"{name} ({format_calls_by_rank(dict(enumerate(row)))})" for name, row in rows.items() if len({*row}) > 1
    }
    if different:
        remedy = REMEDY if any(name.startswith("FSDPX_") for name in different) else "Give all ranks the same"
        raise ConfigError(f"ranks differ in {', in '.join(different.values())}. {remedy}")
