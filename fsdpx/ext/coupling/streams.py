"""Streams of messages from the ranks of one side of a `Bridge` to the ranks of the other side.

A stream has a tag for data and one for control messages. A sender rank sends each of its receiver ranks a header of
four integers: (kind, number of the snapshot, early, size of the body in bytes). The integer `early` says how many
snapshots in advance the rank knew that it would send this snapshot. A body follows if the kind is DATA. A receiver rank
sends control messages of two integers: (kind, value). Messages between two ranks arrive in the order in which they were
sent. There are three ways to send:

1. Every snapshot arrives (modes "lockstep" and "queue"). Receivers answer each snapshot with RECEIVED. In mode "queue",
   sender ranks wait while `depth` snapshots are unanswered. In lockstep, they wait for the answers to the snapshot that
   they have just sent.

2. The sender side asks its own ranks (mode "latest", trainer to solver). The sender ranks determine, in a collective
   among themselves, whether all answers to the previous snapshot have arrived. If not, they keep the new snapshot
   instead of sending it, and drop any older snapshot that they had kept. The last snapshot kept is sent when the stream
   is closed.

3. The receiver side asks (mode "latest", solver to trainer). Sender ranks must not wait for receivers or for each
   other. Each of them may be at a different step, but all must send the same snapshots. Rank 0 of the receivers, called
   the lead, decides:

   - The lead sends ASK to all sender ranks when the receivers want a snapshot.
   - A sender rank notices ASK in its next `send`, and answers AT with the number of the snapshot of that `send`.
   - The lead sends TAKE n, where n is the highest of these numbers plus a margin of at least 1.
   - A sender rank that notices TAKE at or before snapshot n sends snapshot n. A rank that notices TAKE later no longer
     has the data of snapshot n, and sends MISSED instead.
   - If any rank has sent MISSED, all receivers learn this in a collective among themselves and discard the snapshot,
     and the lead asks again with a larger margin. If all ranks noticed TAKE early, the margin shrinks.

   Until TAKE arrives, a sender rank copies nothing, so a snapshot that nobody receives costs only one check for
   incoming messages.

The last header of each sender rank is END, and the last control message of each receiver rank is CLOSED. Each rank
sends them when it closes the bridge, and then discards all incoming messages until it has received END and CLOSED from
the other side. A rank whose script ends without closing the bridge reports this in its CLOSED message, so that the
other side does not wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fsdpx.core.comm.calls import spin_until
from fsdpx.core.comm.communicator import Communicator, Handle, can_survive, make_rank_lost_error
from fsdpx.core.comm.local import LocalCommunicator
from fsdpx.errors import CommTimeout

__all__ = ["Receiver", "Sender", "wait_until"]

DATA, MISSED, END, AT = range(4)
"""Kinds of headers, as integers. If ranks receive headers of different kinds for the same snapshot, the kind with the
highest integer applies."""
RECEIVED, ASK, TAKE, CLOSED = range(4)
"""Kinds of control messages."""
POLLING_SECONDS, LONGEST_PAUSE_SECONDS = 2e-3, 1e-3
"""How long a waiting rank polls without pauses, and the maximum length of the pauses after that."""
HEADER_WORDS, CONTROL_WORDS = 4, 2

MakeBody = Callable[[int], np.ndarray]
"""A function that takes a receiver's rank and returns the bytes to send to it. These bytes must not be changed
afterwards."""


def wait_until(
    comm: Communicator, is_ready: Callable[[], bool], what: str, is_moving: Callable[[], bool] = lambda: False
) -> None:
    """Wait until `is_ready()` returns True. `what` describes, for error messages, what this rank is waiting for.

    After a few milliseconds, the rank sleeps between polls, so that ranks that compute can use its core. It does not
    sleep while `is_moving()` returns True, because libraries advance long messages only while they are being called.
    Raises RankLost if a rank of `comm` has died, and CommTimeout when the communicator's time limit is exceeded."""
    begin = time.monotonic()

    def check() -> bool:
        raise_if_rank_lost(comm, what)
        if is_ready():
            return True
        waited = time.monotonic() - begin
        if waited > POLLING_SECONDS and not is_moving():
            time.sleep(min(waited / 16, LONGEST_PAUSE_SECONDS))
        return False

    seconds = comm.get_timeout_seconds() if isinstance(comm, LocalCommunicator) else comm.timeout  # type: ignore[attr-defined]
    if not spin_until(check, comm.progress, seconds):
        raise CommTimeout(f"rank {comm.rank} waited {seconds:g} s for {what}")


def raise_if_rank_lost(comm: Communicator, what: str) -> None:
    """Raise RankLost if a rank has died. Do nothing if `comm` cannot detect and survive the death of a rank."""
    if can_survive(comm):
        lost = comm.get_failed_ranks()  # type: ignore[attr-defined]
        if lost:
            raise make_rank_lost_error(f"{what} on rank {comm.rank}", lost)


class Incoming:
    """Receives small messages from one rank, one after another. All messages consist of the same number of integers."""

    def __init__(self, comm: Communicator, rank: int, tag: int, words: int) -> None:
        self._comm, self._rank, self._tag = comm, rank, tag
        self._buffer = np.empty(words, np.int64)
        self._handle: Handle | None = None

    def try_receive(self) -> tuple[int, ...] | None:
        """Return the next message, or None if it has not arrived yet."""
        if self._handle is None:
            self._handle = self._comm.recv(self._buffer, self._rank, self._tag, what="the bridge")
        if not self._handle.test():
            return None
        self._handle = None
        return tuple(self._buffer.tolist())


class Outgoing:
    """Sends messages to other ranks, and keeps track of the messages in transit."""

    def __init__(self, comm: Communicator, tag: int) -> None:
        self._comm, self._tag = comm, tag
        self._under_way: list[Handle] = []

    def send(self, rank: int, *words: int, body: np.ndarray | None = None) -> None:
        """Start sending the integers `words` to rank `rank`, followed by `body` if given."""
        for array in (np.array(words, np.int64), body):
            if array is not None:
                self._under_way.append(self._comm.send(array, rank, self._tag, what="the bridge"))

    def is_complete(self) -> bool:
        """Advance the messages in transit, and return whether all of them are complete."""
        self._under_way = [handle for handle in self._under_way if not handle.test()]
        return not self._under_way


class Sender:
    """The sending end of a stream on one rank.

    Parameters
    ----------
    comm : communicator of both sides
    tag : tag of the data; control messages have the next higher tag
    receivers : ranks that receive messages from this rank; the first one is the lead
    depth : maximum number of snapshots that are unanswered when `send` returns. If there are more, `send` waits for
        answers. 0 means lockstep. `depth` is not used with `agree` or `on_request`, because snapshots may then be
        dropped
    agree : a collective that returns whether all ranks of this side pass True. If given, the sender ranks agree on
        whether to send a snapshot or keep it for later. Default None
    on_request : whether a snapshot is sent only after the receivers have asked for one
    """

    def __init__(
        self, comm: Communicator, tag: int, receivers: Sequence[int], *, depth: int = 0,
        agree: Callable[[bool], bool] | None = None, on_request: bool = False,
    ) -> None:  # fmt: skip
        self._comm, self._receivers, self._depth = comm, tuple(receivers), depth
        self._agree, self._on_request = agree, on_request
        self._control = {rank: Incoming(comm, rank, tag + 1, CONTROL_WORDS) for rank in receivers}
        self._received = dict.fromkeys(receivers, 0)
        self._out = Outgoing(comm, tag)
        self._number = self._shipped = 0
        self._kept: tuple[int, dict[int, np.ndarray]] | None = None
        self._is_asked, self._taken, self._noticed_at = False, -1, 0
        self._has_ended_receiver = False

    def send(self, make_body: MakeBody) -> None:
        """Send a snapshot. If receivers are not ready, wait for them by default; with `agree`, keep the snapshot for
        later instead, and if `on_request`, drop it. Does nothing once a receiver has closed the stream."""
        raise_if_rank_lost(self._comm, "send to the other side of the bridge")
        number, self._number = self._number, self._number + 1
        is_closed = self.has_closed_receiver()
        if self._agree is not None:
            self._ship_or_keep(number, make_body, is_closed)
        elif self._on_request and not is_closed:
            self._answer_request(number, make_body)
        elif not is_closed:
            self._wait_for_answers(max(self._depth - 1, 0))
            if not self.has_closed_receiver():
                self._send_snapshot(number, make_body)
            if self._depth == 0:
                self._wait_for_answers(0)

    def has_closed_receiver(self) -> bool:
        """Process incoming messages, and return whether a receiver has closed the stream."""
        for rank in self._receivers:
            while rank in self._control and (message := self._control[rank].try_receive()):
                self._note_control_message(rank, *message)
        self._out.is_complete()
        return len(self._control) < len(self._receivers)

    def start_closing(self) -> None:
        """Send the snapshot that was kept, if any, and then the end-of-stream message."""
        if self._kept is not None:
            self._wait_for_answers(0)
            self._ship_kept()
        self.send_end()

    def send_end(self) -> None:
        """Send the end-of-stream message to all receivers."""
        for rank in self._receivers:
            self._out.send(rank, END, self._number, 0, 0)

    def is_closed(self) -> bool:
        """Process incoming messages. Return whether all receivers have closed the stream and no message is in transit.
        Messages to ranks whose script has ended do not count."""
        self.has_closed_receiver()
        return not self._control and (self._out.is_complete() or self._has_ended_receiver)

    def _note_control_message(self, rank: int, kind: int, value: int) -> None:
        if kind == RECEIVED:
            self._received[rank] = value
        elif kind == ASK:
            self._is_asked = True
        elif kind == TAKE:
            self._taken, self._noticed_at = value, self._number - 1
        else:
            del self._control[rank]
            self._has_ended_receiver |= bool(value)

    def _answer_request(self, number: int, make_body: MakeBody) -> None:
        """Answer the requests that have arrived from the receivers, without blocking."""
        if self._is_asked:
            self._is_asked = False
            self._out.send(self._receivers[0], AT, number, 0, 0)
        if self._taken == number:
            self._send_snapshot(number, make_body, number - self._noticed_at)
        elif 0 <= self._taken < number:
            for rank in self._receivers:
                self._out.send(rank, MISSED, number, 0, 0)
        if self._taken <= number:
            self._taken = -1

    def _ship_or_keep(self, number: int, make_body: MakeBody, is_closed: bool) -> None:
        """Send a snapshot if all receivers have answered the previous one; otherwise keep it. Collective over this
        side."""
        assert self._agree is not None
        self._kept = None if is_closed else (number, {rank: make_body(rank) for rank in self._receivers})
        if self._agree(is_closed or self._count_unanswered() == 0):
            self._ship_kept()

    def _ship_kept(self) -> None:
        if self._kept is not None and not self.has_closed_receiver():
            number, bodies = self._kept
            self._send_snapshot(number, bodies.__getitem__)
        self._kept = None

    def _send_snapshot(self, number: int, make_body: MakeBody, early: int = 0) -> None:
        for rank in self._receivers:
            body = make_body(rank)
            self._out.send(rank, DATA, number, early, body.size, body=body)
        self._shipped += 1

    def _count_unanswered(self) -> int:
        return self._shipped - min(self._received.values(), default=self._shipped)

    def _wait_for_answers(self, limit: int) -> None:
        """Wait until at most `limit` snapshots are unanswered, or a receiver has closed the stream."""
        wait_until(
            self._comm, lambda: self.has_closed_receiver() or self._count_unanswered() <= limit,
            "the other side of the bridge to receive", lambda: not self._out.is_complete(),
        )  # fmt: skip


class ReceivedBodies(NamedTuple):
    """The data that a receiver rank received for one snapshot: the number of the snapshot, and the body from each
    sender rank."""

    number: int
    bodies: dict[int, np.ndarray]


class Header(NamedTuple):
    """The header of a message. The fields are integers, and are sent in this order."""

    kind: int
    number: int
    early: int
    nbytes: int


class StreamSnapshotSelector:
    """Chooses the snapshot that all sender ranks send. It is used by the lead, the rank that asks for snapshots.

    Attributes
    ----------
    wanted : number of the last snapshot that was chosen
    """

    def __init__(self) -> None:
        self.wanted = 0
        self._margin = 1
        self._positions: dict[int, int] | None = None

    def start(self) -> None:
        """Start to collect, for each sender rank, the number of the snapshot that it has reached."""
        self._positions = {}

    def cancel(self) -> None:
        """Stop choosing a snapshot, because the stream is ending."""
        self._positions = None

    def add_position(self, rank: int, number: int) -> None:
        """Record that sender rank `rank` has reached snapshot `number`."""
        if self._positions is not None:
            self._positions[rank] = number

    def try_choose(self, senders: int) -> bool:
        """If the snapshot numbers of all sender ranks are known, set `wanted` and return True; otherwise return
        False."""
        if self._positions is None or len(self._positions) < senders:
            return False
        self.wanted, self._positions = max(self._positions.values()) + self._margin, None
        return True

    def adjust_snapshot_margin(self, headers: Sequence[Header]) -> None:
        """Adjust the margin between the newest snapshot and the wanted snapshot. Increase the margin if a sender rank
        learned too late which snapshot was wanted. Reduce the margin if all sender ranks learned it earlier
        than necessary."""
        late = max((header.number - self.wanted for header in headers if header.kind == MISSED), default=0)
        early = min(header.early for header in headers)
        self._margin = self._margin + 2 * late if late else max(1, self._margin - early // 2)


class Receiver:
    """The receiving end of a stream on one rank.

    Parameters
    ----------
    comm : communicator of both sides
    side : communicator of this side
    tag : tag of the data; control messages have the next higher tag
    senders : ranks that send to this rank. If `on_request`, the first rank of this side is the lead, which asks for
        snapshots. On the lead, `senders` must contain all ranks of the other side
    on_request : whether this side asks for snapshots

    Attributes
    ----------
    has_ended : whether the other side has closed the stream
    """

    def __init__(
        self, comm: Communicator, side: Communicator, tag: int, senders: Sequence[int], *, on_request: bool
    ) -> None:
        self._comm, self._side, self._senders, self._on_request = comm, side, tuple(senders), on_request
        self._headers = {rank: Incoming(comm, rank, tag, HEADER_WORDS) for rank in senders}
        self._tag, self._out = tag, Outgoing(comm, tag + 1)
        self._arriving: dict[int, tuple[Header, np.ndarray, Handle]] = {}
        self._found: dict[int, tuple[Header, np.ndarray | None]] = {}
        self._ended: set[int] = set()
        self._choice = StreamSnapshotSelector() if on_request and side.rank == 0 else None
        self._has_asked = self.has_ended = False
        self._count = 0

    def receive(self, wait: bool) -> ReceivedBodies | None:
        """Return the next snapshot, or None if the stream has ended. If `wait` is False, do not wait for a snapshot:
        return None unless every rank of this side has received the entire snapshot. Collective over this side if the
        stream is `on_request`, or if `wait` is False."""
        while not self.has_ended:
            self._ask_for_snapshot()
            if wait:
                wait_until(
                    self._comm, self._receive_parts, "a snapshot from the other side of the bridge", self._is_receiving
                )
            raise_if_rank_lost(self._comm, "receive from the other side of the bridge")
            is_complete = self._receive_parts()
            outcome = END if self._ended else max((header.kind for header, _ in self._found.values()), default=DATA)
            if self._on_request or not wait:
                everyone = self._side.all_gather_value((is_complete, outcome))
                if not all(complete for complete, _ in everyone):
                    return None
                outcome = max(kind for _, kind in everyone)
            if outcome == END:
                wait_until(self._comm, self._discard_until_end, "the other side of the bridge to close it")
                self.has_ended = True
                return None
            found, self._found, self._has_asked = self._found, {}, False
            if self._choice is not None:
                self._choice.adjust_snapshot_margin([header for header, _ in found.values()])
            if outcome == DATA:
                self._count += 1
                if not self._on_request:
                    self._send_control(RECEIVED, self._count)
                number = next(iter(found.values()))[0].number
                bodies = {rank: found[rank][1] for rank in self._senders}
                return ReceivedBodies(number, {rank: body for rank, body in bodies.items() if body is not None})
        return None

    def start_closing(self, is_ending: bool = False) -> None:
        """Tell the senders that this rank accepts no more snapshots. If `is_ending` is true, also tell the senders that
        this rank's script is ending. The rank then does not even receive messages that are already in transit."""
        if self._choice is not None:
            self._choice.cancel()
        self._send_control(CLOSED, int(is_ending))

    def is_closed(self) -> bool:
        """Discard incoming messages, and return whether all senders have closed the stream and all messages of this
        rank have been sent."""
        return self._discard_until_end() and self._out.is_complete()

    def _send_control(self, kind: int, value: int) -> None:
        for rank in self._senders:
            self._out.send(rank, kind, value)

    def _ask_for_snapshot(self) -> None:
        """If this rank is the lead (the rank that asks for snapshots) and has no pending request, ask the senders for a
        snapshot."""
        if self._choice is not None and not self._has_asked:
            self._has_asked = True
            self._choice.start()
            self._send_control(ASK, 0)

    def _receive_parts(self) -> bool:
        """Process incoming messages, and return whether every sender rank's part of this snapshot has arrived."""
        self._out.is_complete()
        for rank in self._senders:
            while rank not in self._found and rank not in self._ended and self._try_advance_rank(rank):
                pass
        if self._choice is not None and self._choice.try_choose(len(self._senders)):
            self._send_control(TAKE, self._choice.wanted)
        return len(self._found.keys() | self._ended) == len(self._senders)

    def _try_advance_rank(self, rank: int) -> bool:
        """Process the next message from `rank`, and return whether there was one."""
        if rank in self._arriving:
            header, body, handle = self._arriving[rank]
            if not handle.test():
                return False
            del self._arriving[rank]
            self._found[rank] = header, body
            return True
        words = self._headers[rank].try_receive()
        if words is None:
            return False
        header = Header(*words)
        if header.kind == DATA:
            body = np.empty(header.nbytes, np.uint8)
            self._arriving[rank] = header, body, self._comm.recv(body, rank, self._tag, what="the bridge")
        elif header.kind == END:
            self._ended.add(rank)
        elif header.kind == MISSED:
            self._found[rank] = header, None
        elif self._choice is not None:
            self._choice.add_position(rank, header.number)
        return True

    def _is_receiving(self) -> bool:
        return bool(self._arriving)

    def _discard_until_end(self) -> bool:
        """Discard incoming messages, and return whether all senders have closed the stream."""
        self._receive_parts()
        self._found.clear()
        return len(self._ended) == len(self._senders)
