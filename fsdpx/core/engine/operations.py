"""The operation of each verb on one rank. An operation gets the values of its slots in the order of the table and
returns those that it gives and adds into, in the order of the table: first `gives`, then `adds`.

SEND and RECV are messages between stages: values on their way to the next reader, gradients on their way back. UPDATE
changes parameters by the optimiser.
An `Executable` is a program with its memory on one rank, ready to run any number of times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn

from fsdpx.core.array.kernels import square_sum, store
from fsdpx.core.array.sums import block_squares, exact_sum, padded
from fsdpx.core.comm.calls import Finish, Transfer
from fsdpx.core.comm.communicator import DONE, Communicator
from fsdpx.core.compression import BoundCodec
from fsdpx.core.engine import compute_verbs
from fsdpx.core.engine.not_finite import find_not_finite
from fsdpx.core.engine.run import (
    GradientScale,
    Mean,
    Operation,
    ProgramRun,
    Values,
    Workspace,
    demand_alike,
    number_of,
    words,
)
from fsdpx.core.program import VERBS, Action, Request, Slot, check, compile
from fsdpx.core.state.flat_parameters import Range
from fsdpx.core.state.gradients import Reduction
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.train_state import Tie, TrainState
from fsdpx.errors import DataError, NumericsError, ShapeError
from fsdpx.optim import Segments, rate
from fsdpx.optim.optimizer import UNSCHEDULED, scheduled, update_parameters

__all__ = [
    "ABOUT", "OPERATIONS", "Executable", "ExecutableAction", "alone", "demand_finite_loss", "left_alone", "move",
    "receive", "release", "send", "update",
]  # fmt: skip


def update(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    p, scale, (master, slots) = number_of(action), read[0], added
    own = run.place.segments[p]
    if not scale.skip and not move(run, master, taken[0], slots, own, run.step + 1, scale.rate, scale.factor):
        for axis, call, nbytes in run.place.parts_moved(p):  # what the optimiser would have sent
            run.place.axes.counters.add(axis, call, nbytes)
    return (master, slots)


def move(
    run: ProgramRun, master: Any, gradient: Any, slots: Any, segments: Segments, step: int, lr: float, factor: float
) -> bool:
    """Run the optimiser on elements of a page; False: see `update_parameters`. step: of the trainer."""
    place, counted = run.place, segments.count_missed(run.missed)
    with left_alone(run, segments, master, slots):
        return update_parameters(
            place.optimizer, place.xp, master, gradient, slots, lr=lr, step=step, segments=counted, scale=factor
        )


@contextmanager
def left_alone(run: ProgramRun, segments: Segments, master: Any, slots: Mapping[str, Any]) -> Iterator[None]:
    """Keep temporarily frozen parameters as they are: weight decay and momentum need no gradient."""
    still = [slice(s.start, s.stop) for s in segments.items if s.name in run.views.frozen]
    kept = [(array[at], array[at].copy()) for array in (master, *slots.values()) for at in still]
    yield
    for now, before in kept:
        now[...] = before


def send(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """Start to send a value; the run waits for the end of the message at its own end."""
    message = run.workspace.messages.of(action, run.batch(action))
    if message is None:
        return ()
    xp, (value,) = run.place.xp, (*taken, *read)
    if value is None:  # a gradient: nothing that counts depends on the value
        value = xp.zeros(message.shape, dtype=message.dtype)
    if tuple(value.shape) != message.shape or value.dtype != message.dtype:
        raise ShapeError(
            f"{action}: value {message.edge.value} is {value.dtype}{list(value.shape)}, rank {message.peer} of the "
            f"pipe expects {message.dtype}{list(message.shape)}: shapes of values may depend on shapes only"
        )
    flat = xp.ascontiguousarray(value).reshape(-1)
    handle = run.place.axes.pipe.send(flat, message.peer, message.tag, what=message.what)
    run.issue(action, Transfer(handle, lambda: flat))  # which keeps the array until it is sent
    return ()


def receive(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """The value, on its way; None where nothing travels."""
    message = run.workspace.messages.of(action, run.batch(action))
    if message is None:
        return (None,)
    flat = run.place.xp.empty((message.size,), dtype=message.dtype)
    handle = run.place.axes.pipe.recv(flat, message.peer, message.tag, what=message.what)
    return (Transfer(handle, lambda: flat.reshape(message.shape)),)


def mean(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """On its way while backward runs: the first action that needs it waits."""
    return (run.place.telling(_losses(run, taken, read), "MEAN (loss)", partial(_mean, run), run.together),)


def _losses(run: ProgramRun, pairs: Values, weight: Values) -> list[float]:
    """This rank's contribution to the weight of all gradients, and to total and weight of each microbatch's loss; then
    what schedules say of an update, see `scheduled`, which all ranks must find alike."""
    rates = scheduled(run.place.optimizer, run.step + 1) if run.updates else UNSCHEDULED
    if not run.place.counts_loss or not weight:  # the loss is computed on another rank of the pipe
        return [0.0] * (1 + 2 * len(run.feed.batch)) + [*rates]
    return [weight[0], *(number for pair in pairs for number in pair), *rates]


def _mean(run: ProgramRun, rows: list[list[float]]) -> Mean:
    """A replica that trains by itself may have no samples."""
    demand_alike(run, run.together, rows, {-2: "learning rate", -1: "share that an average keeps"})
    lr = rows[run.together.rank % len(rows)][-2]  # one row: of a rank at its own speed
    if math.isnan(lr):
        rate(run.place.optimizer, run.step + 1)  # the same error on all ranks
    shared = exact_sum([row[0] for row in rows])
    if len(rows[0]) == 3:
        return Mean(math.nan, 1.0, shared, lr)
    total = exact_sum([number for row in rows for number in row[1:-2:2]])
    weight = exact_sum([number for row in rows for number in row[2:-2:2]])
    if run.place.device.is_zero(weight) and run.together.size == run.place.axes.world.size:
        raise DataError("no target of the global batch counts for the loss: it is empty, or every label is ignored")
    return Mean(total, weight, shared, lr)


def gather(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """full parameters = all-gather of the shards: n - n/N elements per rank."""
    p, place, (master,) = number_of(action), run.place, read
    page, comm, what = place.pages[p], place.axes.shard, words(run, action)
    full = run.workspace.full(p)
    views = run.views.page(page.page, full)
    if (sent := place.formats.wire) is not None:
        wire = run.workspace.buffer("wire", p, page.size, sent)
        own = wire[page.mine.start : page.mine.stop]
        store(place.xp, master, own)
        handle = comm.all_gather(own, wire, page.counts, what=what)
        return (Transfer(Finish(handle, partial(store, place.xp, wire, full)), lambda: views),)
    if place.formats.compute != place.formats.master or place.pace.own_speed:  # then the shard lies in a window
        own = full[page.mine.start : page.mine.stop]
        store(place.xp, master, own)
        master = own
    if comm.size == 1 and place.keep_full:  # the shard lies there
        return (Transfer(DONE, lambda: views),)
    return (Transfer(comm.all_gather(master, full, page.counts, what=what), lambda: views),)


def release(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """What was taken is let go of: the memory of a page that was gathered, or of what lies elsewhere."""
    return ()


def reduce(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    p, (gradient,), part, memory = number_of(action), taken, added[0], added[1:]
    kept = run.workspace.part(p)
    reduction = _reduction(run, action, "shard", part is None, memory)
    return (gradient.reduce(reduction), kept if part is None else part, *memory)


def settle(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    return (run.place.accumulation.settle(taken[0], added[0]),)


def join(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    return (run.place.accumulation.join(taken[0], _reduction(run, action, "replica", False, added)), *added)


def _reduction(run: ProgramRun, action: Action, axis: str, first: bool, memory: Values) -> Reduction:
    p, place, work = number_of(action), run.place, run.workspace
    comm: Communicator = getattr(place.axes, axis)
    over_shards, kept = axis == "shard", memory[0] if memory else {}
    kept = {name.partition("/")[2]: array for name, array in kept.items() if name.startswith(axis)}
    sizes = work.state.ledger.sizes.setdefault((axis, p), [math.nan, math.nan])
    scratch = work.scratch("carry" if over_shards else "join", p)
    carrier = BoundCodec(getattr(place.route(p), axis), comm, kept, scratch, sizes, words(run, action))
    trade = work.scratch("trade", p) if over_shards else None
    return Reduction(carrier, place.pages[p], work.part(p), first, trade)


def tie(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """Sum in place, into all of this rank's gradients. Bytes per page of n elements here, T tensor ranks, k copies of
    which this rank has some: 2 n (T - 1)/T over the tensor axis, n (k - own) among the ranks that have copies."""
    p, what = number_of(action), words(run, action)
    one = run.ties[p]
    if one.partial:
        for total in taken:
            run.place.axes.tensor.all_reduce(total, what=what).wait()
    scratch = run.workspace.scratch("tie", p)
    found = list(taken) if one.comm is None else _gathered(one, one.comm, taken, scratch, what)
    total = found[-1]
    for other in reversed(found[:-1]):  # as in one process, where backward comes to later layers first
        total += other
    for mine in taken:
        if mine is not total:
            mine[...] = total
    return taken


def _gathered(tie: Tie, comm: Communicator, totals: Values, every: Any, what: str) -> list[Any]:
    """The gradients of all copies, in the order of `tie.pages`."""
    n, held = totals[0].size, tie.held
    first = n * sum(held[: comm.rank])
    own = every[first : first + n * held[comm.rank]]
    for i, total in enumerate(totals):
        own[i * n : (i + 1) * n] = total
    comm.all_gather(own, every, [n * k for k in held], what=what).wait()
    place = {page: i for i, page in enumerate(tie.order)}
    return [every[place[i] * n : (place[i] + 1) * n] for i in range(len(tie.pages))]


def norm(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """One scale for all updates: 1 / (weight x loss scale), times clip / norm where the norm is larger. In one message
    with the loss."""
    place, scaler, clip = run.place, run.scaler, run.place.options.clip_norm
    here = _squares(run, read)
    n = len(here)
    losses = _losses(run, taken[:-1], taken[-1:])
    rows = place.everyone([*here, *losses], "NORM (squares, loss)", run.together)
    squares = exact_sum([number for row in rows for number in row[:n]])
    mean = _mean(run, [row[n:] for row in rows])
    factor = 1.0 / (mean.each * scaler.value)
    size = math.sqrt(squares) * factor
    finite = math.isfinite(squares)
    if not scaler.dynamic:
        demand_finite_loss(run, mean, run.together)
        if not finite:
            _refuse(run, f"the norm of the gradient is {size}", _bad_gradient(run, read), run.together)
    if clip is not None and finite:
        factor *= _clipped(size, clip)
    return mean, GradientScale(factor, size, not finite and scaler.dynamic, mean.rate, scaler.after(finite))


def _clipped(norm: float, most: float) -> float:
    return min(1.0, most / (norm + 1e-6))


def scale(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """The same where the norm is not needed: nothing is left to exchange. The gradients are read so that all that needs
    other ranks has arrived before anything is updated. Each rank looks at those that it updates with."""
    demand_finite_loss(run, read[0], run.together)
    _demand_finite_gradients(run, read[1:])
    factor = 1.0 / (read[0].each * run.scaler.value)
    return (GradientScale(factor, math.nan, False, read[0].rate, run.scaler),)


def _squares(run: ProgramRun, totals: Values) -> list[float]:
    """Numbers whose sum over all ranks is the square of the norm; with chunks, fixed blocks of each parameter are added
    exactly, so no layout is seen."""
    xp, parts = run.place.xp, [totals[n][at] for n, at in _counted(run)]
    if not run.place.accumulation.bitwise:
        return [exact_sum([square_sum(xp, part) for part in parts])]
    return padded([square for part in parts for square in block_squares(xp, part)])


def _counted(run: ProgramRun) -> list[tuple[int, slice]]:
    """The part of this rank's elements that counts in sums over all: page of those trained, and where; with chunks
    parameter by parameter, else neighbours together. Each element counts once: in one replica, on the rank of the
    tensor axis that has it, not in copies."""
    place = run.place
    if place.axes.replica.rank > 0 and place.pace.together:
        return []
    found: list[tuple[int, slice]] = []
    for n, p in enumerate(run.stage.trained):
        if p in place.layout.copies:
            continue
        if not place.accumulation.bitwise and place.axes.tensor.size == 1:
            found.append((n, slice(None)))
            continue
        page = place.pages[p]
        for piece in page.page.pieces(page.mine):
            spec = place.layout.specs[page.page.fields[piece.have].source]
            if place.axes.tensor.rank == 0 or spec.cut is not None:
                at = slice(piece.start - page.mine.start, piece.stop - page.mine.start)
                if not place.accumulation.bitwise and found and found[-1] == (n, slice(found[-1][1].start, at.start)):
                    at = slice(found.pop()[1].start, at.stop)
                found.append((n, at))
    return found


def commit(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    assert run.feed.commit is not None
    run.feed.commit(*read)
    return (True,)


def alone(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """Loss and scale of this rank's own batch."""
    place, clip = run.place, run.place.options.clip_norm
    mean = _mean(run, [_losses(run, taken[:-1], taken[-1:])])
    demand_finite_loss(run, mean)
    factor, norm = 1.0 / (mean.shared * run.scaler.value), math.nan
    totals = tuple([gradient.at(0) for gradient in read])
    _demand_finite_gradients(run, totals)
    if clip is not None:
        norm = math.sqrt(exact_sum([square_sum(place.xp, total) for total in totals])) * factor
        factor *= _clipped(norm, clip)
    return mean, GradientScale(factor, norm, False, mean.rate, run.scaler)


def demand_finite_loss(run: ProgramRun, mean: Mean, comm: Communicator | None = None) -> None:
    """NumericsError if the loss of a step is NaN or Inf, before anything is updated. comm: the ranks whose loss it is;
    they raise the same error, which names a rank whose batch is not finite. None: no other rank knows."""
    if run.feed.batch and not math.isfinite(mean.total):
        _refuse(run, f"the loss is {mean.value}", _bad_batch(run), comm)


def _demand_finite_gradients(run: ProgramRun, totals: Values) -> None:
    """The same of the gradients that this rank updates with; other ranks do not know."""
    if run.place.device.are_finite(totals):
        return
    found = _bad_gradient(run, totals)  # squares can overflow where nothing else does
    if found and run.together.size > 1:
        found += (
            ". Ranks that update other parameters may have done so: go on from a checkpoint. With clip_norm=... all "
            "ranks know of it before any of them updates"
        )
    if found:
        _refuse(run, "a gradient is not finite", found)


def _refuse(run: ProgramRun, what: str, origin: str, comm: Communicator | None = None) -> NoReturn:
    """Raise NumericsError. origin: where this rank sees one. comm: ranks that all come here, to tell each other."""
    origins = [origin] if comm is None else comm.all_gather_plain(origin)
    told = next(filter(None, origins), "distribute(..., check_finite=True) names its origin")
    raise NumericsError(f"step {run.step + 1}: {what}, and nothing is updated with it: {told}")


def _bad_batch(run: ProgramRun) -> str:
    """Name what is NaN or Inf in this rank's batch; "" if nothing is."""
    place = run.place
    for batch in filter(None, run.feed.batch):
        arrays = {f"input {name!r}": array for name, array in zip(place.layout.inputs, batch.inputs, strict=True)}
        if batch.target is not None and not getattr(place.loss, "skipna", False):
            arrays["the target"] = batch.target
        for what, array in arrays.items():
            if found := find_not_finite(place, array, what):
                return found
    return ""


def _bad_gradient(run: ProgramRun, totals: Values) -> str:
    """Name the first parameter whose gradient is NaN or Inf on this rank; "" if none is."""
    for p, total in zip(run.stage.trained, totals, strict=True):
        page = run.place.pages[p]
        first = page.mine.start if total.size == page.mine.size else 0  # a rank at its own speed has all of it
        for piece in page.page.pieces(Range(first, first + total.size)):
            name = page.page.fields[piece.have].source
            part = total[piece.start - first : piece.stop - first]
            if found := find_not_finite(run.place, part, f"the gradient of {name!r}"):
                return found
    return ""


OPERATIONS: dict[str, Operation] = {
    "LOAD": compute_verbs.load,
    "SEND": send,
    "RECV": receive,
    "F": compute_verbs.forward,
    "E": compute_verbs.evaluate,
    "C": compute_verbs.checkpoint,
    "R": compute_verbs.recompute,
    "B": compute_verbs.backward,
    "I": compute_verbs.backward_input,
    "W": compute_verbs.backward_params,
    "LOSS": compute_verbs.loss,
    "SCORE": compute_verbs.score,
    "SEED": compute_verbs.seed,
    "MEAN": mean,
    "GATHER": gather,
    "FREE": release,
    "REDUCE": reduce,
    "SETTLE": settle,
    "JOIN": join,
    "TIE": tie,
    "SCALE": scale,
    "NORM": norm,
    "COMMIT": commit,
    "UPDATE": update,
}
"""By verb; a new verb is a row here and a row in `fsdpx.core.program.VERBS`. Extensions add theirs."""


class ExecutableAction(NamedTuple):
    """One action with all that running it needs. words: it as text. gives: slots given, then those added
    into."""

    operation: Operation
    action: Action
    words: str
    takes: tuple[Slot, ...]
    reads: tuple[Slot, ...]
    adds: tuple[Slot, ...]
    gives: tuple[Slot, ...]
    lane: str


class Executable:
    """Proved and planned when it is made. givers: slot -> the action that fills it, as text."""

    def __init__(self, state: TrainState, request: Request) -> None:
        place, program = state.placement, compile(request)
        check(program)
        place.pipe.prove(request, place.stages)
        self.program = program
        self.workspace = Workspace(state, program)
        self.steps = [
            ExecutableAction(
                OPERATIONS[a.op], a, f"{a} ({about(place, a, program.kind)})", s.takes, s.reads, s.adds,
                (*s.gives, *s.adds), VERBS[a.op].lane,
            )
            for a, s in zip(program.actions, program.slots, strict=True)
        ]  # fmt: skip
        self.givers = {slot: step.words for step in self.steps for slot in step.gives}


def about(placement: Placement, action: Action, kind: str) -> str:
    """The unit, page or message that an action is about, as text."""
    what, number = VERBS[action.op].about, action.unit
    if number is None or not what:
        return f"the {kind} program"
    return ABOUT[what](placement, number)


def _about_edge(placement: Placement, number: int) -> str:
    edge = placement.stage.edges[number]
    return f"from rank {edge.sender} to rank {edge.receiver} of the pipe"


ABOUT: dict[str, Callable[[Placement, int], str]] = {
    "edge": _about_edge,
    "unit": lambda placement, number: f"unit {placement.layout.units[number].name!r}",
    "page": lambda placement, number: f"page {placement.name(number)!r}",
}
"""What a verb is about -> the one of a number, as text; extensions add theirs."""
