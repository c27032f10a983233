"""What each verb does on one rank. An operation gets the values of its slots in the order of the table and returns
those that it gives and adds into, in the order of the table: first `gives`, then `adds`."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fsdpx.array.kernels import square_sum, store
from fsdpx.array.sums import block_squares, exact_sum, expansion
from fsdpx.comm.communicator import DONE
from fsdpx.comm.steps import Finish
from fsdpx.engine import compute
from fsdpx.engine.engine import Engine, Microbatch
from fsdpx.engine.finite import demand_finite
from fsdpx.engine.gradients import Gradient, Pending, Plainly, Subtrees
from fsdpx.engine.gradients import join as start_join
from fsdpx.engine.gradients import reduce as start_reduce
from fsdpx.engine.memory import Room
from fsdpx.engine.messages import receive as start_receive
from fsdpx.engine.messages import send as start_send
from fsdpx.errors import DataError
from fsdpx.nn.gradients import Entry
from fsdpx.nn.layer import Env
from fsdpx.optim import rate
from fsdpx.program import Action, StageUnit
from fsdpx.state.ties import add_together

__all__ = ["OPERATIONS", "Mean", "Scale"]

Values = tuple[Any, ...]
Operation = Callable[[Engine, Room, Action, Values, Values, Values], Values]


@dataclass(frozen=True)
class Mean:
    """The loss of the global batch: total / weight."""

    total: float
    weight: float

    @property
    def value(self) -> float:
        return self.total / self.weight


@dataclass(frozen=True)
class Scale:
    """What every gradient is multiplied with in the update. norm: global gradient norm before clipping, nan if it was
    not asked for. skip: gradients overflowed, nothing is updated. rate: this step's learning rate."""

    factor: float
    norm: float
    skip: bool
    rate: float


def _env(engine: Engine, batch: Microbatch) -> Env:
    """The world as the loss sees it, at this microbatch."""
    engine.moment.step, engine.moment.row = engine.steps, batch.row
    return engine.env


def _envs(engine: Engine, unit: int, batch: Microbatch, again: bool = False) -> list[Env]:
    """The world as each node of a unit sees it."""
    _env(engine, batch)
    return engine.envs(unit, again)


def load(engine: Engine, room: Room, action: Action, taken: Values, read: Values, added: Values) -> Values:
    batch = engine.batch[_mb(action)]
    if batch is None:
        return (None,) * len(engine.stage.used)
    return tuple(batch.inputs[v] for v in engine.stage.used)


def forward(engine: Engine, room: Room, action: Action, taken: Values, read: Values, added: Values) -> Values:
    outputs, saved = _forward(engine, room, action, taken, read, keep=True)
    return (*outputs, saved)


def evaluate(engine: Engine, room: Room, action: Action, taken: Values, read: Values, added: Values) -> Values:
    outputs, _ = _forward(engine, room, action, taken, read, keep=False)
    return tuple(outputs)


def _forward(
    engine: Engine, room: Room, action: Action, taken: Values, read: Values, keep: bool
) -> tuple[list[Any], Any]:
    u, batch = _unit(action), engine.batch[_mb(action)]
    unit = engine.stage.units[u]
    if batch is None:
        return [None] * len(unit.gives), None
    pages, kept = read[: len(unit.pages)], read[len(unit.pages) :]
    values = dict(zip((*unit.takes, *unit.reads), (*taken, *kept), strict=True))
    params = room.views.params(u, pages)
    envs, stacks = _envs(engine, u, batch), room.views.stacks
    saved = compute.forward(engine.layout.units[u], envs, params, values, keep, stacks)
    outputs = [values[v] for v in unit.gives]
    if engine.options.check_finite:
        for output in outputs:
            demand_finite(engine, output, f"the output of {engine.layout.units[u].name!r}", action)
    return outputs, saved


def checkpoint(engine: Engine, room: Room, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """A forward that keeps what it read: (value, array) pairs."""
    outputs, _ = _forward(engine, room, action, taken, read, keep=False)
    if engine.batch[_mb(action)] is None:
        return (*outputs, None)
    unit = engine.stage.units[_unit(action)]
    return (*outputs, dict(zip((*unit.takes, *unit.reads), (*taken, *read[len(unit.pages) :]), strict=True)))


def again(engine: Engine, room: Room, action: Action, taken: Values, read: Values, added: Values) -> Values:
    u, batch = _unit(action), engine.batch[_mb(action)]
    if batch is None:
        return (None,)
    envs, params = _envs(engine, u, batch, again=True), room.views.params(u, read)
    return (compute.forward(engine.layout.units[u], envs, params, dict(taken[0]), True, room.views.stacks),)


def send(engine: Engine, room: Room, action: Action, taken: Values, read: Values, added: Values) -> Values:
    (value,) = (*taken, *read)
    start_send(engine, engine.stage.edges[_unit(action)], _mb(action), value, str(action))
    return ()


def receive(engine: Engine, room: Room, action: Action, taken: Values, read: Values, added: Values) -> Values:
    return (start_receive(engine, engine.stage.edges[_unit(action)], _mb(action), str(action)),)


def backward(engine: Engine, room: Room, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """Both halves at once: node by node, so that what the second half needs lives shortest."""
    u, batch = _unit(action), engine.batch[_mb(action)]
    unit, pages = engine.stage.units[u], _trained(engine, u)
    gradients, have = _gradients(room, pages, added), added[len(pages) :]
    if batch is None:
        _blanks_to_zero(gradients)
        return (*gradients, *have)
    inner, dvalues = _dvalues(engine, unit, taken, have)
    entries = _open(engine, room, action, pages, gradients)
    params, grads = room.views.params(u, read), room.views.grads(u, entries)
    saved, envs, stacks = taken[len(unit.gives)], _envs(engine, u, batch), room.views.stacks
    compute.backward(engine.layout.units[u], envs, params, grads, saved, dvalues, stacks, engine.stage.inputs)
    _close(engine, action, entries)
    return (*gradients, *(dvalues.get(v) for v in inner))


def backward_input(engine: Engine, room: Room, action: Action, taken: Values, read: Values, added: Values) -> Values:
    u, batch = _unit(action), engine.batch[_mb(action)]
    unit = engine.stage.units[u]
    if batch is None:
        return (None, *added)
    inner, dvalues = _dvalues(engine, unit, taken, added)
    saved, params = taken[len(unit.gives)], room.views.params(u, read)
    kept = compute.backward_input(engine.layout.units[u], _envs(engine, u, batch), params, saved, dvalues)
    return (kept, *(dvalues.get(v) for v in inner))


def backward_params(engine: Engine, room: Room, action: Action, taken: Values, read: Values, added: Values) -> Values:
    u, batch = _unit(action), engine.batch[_mb(action)]
    pages = _trained(engine, u)
    gradients = _gradients(room, pages, added)
    if batch is None:
        _blanks_to_zero(gradients)
        return tuple(gradients)
    entries = _open(engine, room, action, pages, gradients)
    compute.backward_params(engine.layout.units[u], _envs(engine, u, batch), room.views.grads(u, entries), taken[0])
    _close(engine, action, entries)
    return tuple(gradients)


def _trained(engine: Engine, unit: int) -> list[int]:
    return [p for p in engine.stage.units[unit].pages if engine.stage.trainable[p]]


def _dvalues(engine: Engine, unit: StageUnit, taken: Values, have: Values) -> tuple[list[int], dict[int, Any]]:
    """The unit's inner inputs, and the gradients known so far by value: of its outputs, and from other readers."""
    inner = [v for v in (*unit.takes, *unit.reads) if v not in engine.stage.inputs]
    known = dict(zip((*unit.gives, *inner), (*taken[: len(unit.gives)], *have), strict=True))
    return inner, {v: d for v, d in known.items() if d is not None}


def _gradients(room: Room, pages: list[int], added: Values) -> list[Gradient]:
    return [room.gradient(p) if g is None else g for p, g in zip(pages, added, strict=False)]


def _open(
    engine: Engine, room: Room, action: Action, pages: list[int], gradients: list[Gradient]
) -> list[dict[str, Entry]]:
    """The gradients of each page by name; those of a buffer that is used for the first time are blank."""
    opened = []
    for page, gradient in zip(pages, gradients, strict=True):
        entries = room.views.entries(engine.layout.pages[page], gradient.at(_mb(action)))
        if gradient.blank:
            gradient.blank = False
            for entry in entries.values():
                entry.blank = True
        opened.append(entries)
    return opened


def _close(engine: Engine, action: Action, opened: list[dict[str, Entry]]) -> None:
    """What no layer wrote is zero. Looks for NaN and Inf, but not with a dynamic loss scale: it provokes overflow."""
    for page in opened:
        for entry in page.values():
            if entry.blank:
                entry.open()
    if engine.options.check_finite and not engine.scaler.dynamic:
        unit = engine.layout.units[_unit(action)].name
        for page in opened:
            for name, entry in page.items():
                demand_finite(engine, entry.array, f"the gradient of {name!r} in unit {unit!r}", action)


def _blanks_to_zero(gradients: list[Gradient]) -> None:
    """A rank without samples gives zeros, if no microbatch before gave more."""
    for gradient in gradients:
        if isinstance(gradient, Plainly) and gradient.blank:
            gradient.buffer[...] = 0
            gradient.blank = False


def loss(engine: Engine, room: Room, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """gives (total, weight) of the microbatch; adds the gradients of the outputs and the weight."""
    batch = engine.batch[_mb(action)]
    *have, weight = added
    if batch is None:
        return ((0.0, 0.0), *have, weight or 0.0)
    env = _env(engine, batch)
    y = taken[0] if len(taken) == 1 else taken
    total, share, saved = engine.loss.forward(env, y, batch.target)
    dy = engine.loss.backward(env, saved, engine.scaler.value)
    dys = _inner(engine, (dy,) if len(taken) == 1 else tuple(dy))
    return ((float(total), float(share)), *_sums(have, dys), (weight or 0.0) + float(share))


def _inner(engine: Engine, dys: Values) -> list[Any]:
    """Gradients of the outputs that are not inputs handed through."""
    return [d for v, d in zip(engine.stage.outputs, dys, strict=True) if v not in engine.stage.inputs]


def _sums(have: Iterable[Any], dys: Iterable[Any]) -> list[Any]:
    return [h if d is None else d if h is None else h + d for h, d in zip(have, dys, strict=True)]


def score(engine: Engine, room: Room, action: Action, taken: Values, read: Values, added: Values) -> Values:
    batch = engine.batch[_mb(action)]
    if batch is None:
        return ((0.0, 0.0), added[0] or 0.0)
    y = taken[0] if len(taken) == 1 else taken
    total, share, _ = engine.loss.forward(_env(engine, batch), y, batch.target)
    return ((float(total), float(share)), (added[0] or 0.0) + float(share))


def seed(engine: Engine, room: Room, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """The caller's gradients are those of a mean already: their weight is 1 in all."""
    *have, weight = added
    dys = [d * engine.scaler.value if engine.scaler.value != 1.0 else d for d in _inner(engine, taken[0])]
    one = 1.0 if engine.axes.data.rank == 0 and engine.axes.tensor.rank == 0 else 0.0
    return (*_sums(have, dys), one if weight is None else weight)


def mean(engine: Engine, room: Room, action: Action, taken: Values, read: Values, added: Values) -> Values:
    pairs = taken or ((0.0, 0.0),) * len(engine.batch)  # the loss is somebody else's
    flat = [number if engine.counts_loss else 0.0 for pair in pairs for number in pair]
    rows = engine.everyone(flat, "MEAN (loss)")
    total = exact_sum([number for row in rows for number in row[0::2]])
    weight = exact_sum([number for row in rows for number in row[1::2]])
    if weight == 0 and flat and not getattr(engine.xp, "holds_no_data", False):
        raise DataError("no target of the global batch counts for the loss: it is empty, or every label is ignored")
    return (Mean(total, weight or 1.0),)


def gather(engine: Engine, room: Room, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """full parameters = all-gather of the shards: n - n/N elements per rank."""
    page = _page(action)
    state, comm, what = engine.pages[page], engine.axes.shard, f"{action} {engine.name(page)}"
    full = state.full if state.full is not None else room.buffer(f"full{page}", state.page.size, engine.dtype)
    views = room.views.page(state.page, full)
    if engine.wire is not None:
        wire = room.buffer(f"wire{page}", state.page.size, engine.wire)
        own = wire[state.mine.start : state.mine.stop]
        store(engine.xp, state.master, own)
        handle = comm.all_gather(own, wire, state.counts, what=what)

        return (Pending(Finish(handle, partial(store, engine.xp, wire, full)), lambda: views),)
    if comm.size == 1:
        return (Pending(DONE, lambda: views),)
    return (Pending(comm.all_gather(state.master, full, state.counts, what=what), lambda: views),)


def free(engine: Engine, room: Room, action: Action, taken: Values, read: Values, added: Values) -> Values:
    return ()


def reduce(engine: Engine, room: Room, action: Action, taken: Values, read: Values, added: Values) -> Values:
    page = _page(action)
    state, first = engine.pages[page], f"part{page}" not in engine.store
    what = f"{action} {engine.name(page)}"
    return (start_reduce(engine, state, taken[0], first, room.scratch(page, 0), what),)


def settle(engine: Engine, room: Room, action: Action, taken: Values, read: Values, added: Values) -> Values:
    total, part = taken[0], added[0]
    if isinstance(total, Subtrees):
        return (total,)
    if part is None:
        part = engine.pages[_page(action)].part
        if total is not part and not _same(total, part):
            part[...] = total
    else:
        part += total
    return (part,)


def join(engine: Engine, room: Room, action: Action, taken: Values, read: Values, added: Values) -> Values:
    page = _page(action)
    what = f"{action} {engine.name(page)}"
    return (start_join(engine, engine.pages[page], taken[0], room.scratch(page, 1), what),)


def tie(engine: Engine, room: Room, action: Action, taken: Values, read: Values, added: Values) -> Values:
    page = _page(action)
    add_together(engine, engine.ties[page], taken, partial(room.tie, page), f"{action} {engine.name(page)}")
    return taken


def norm(engine: Engine, room: Room, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """One scale for all updates: 1 / (weight x loss scale), times clip / norm where the norm is larger.

    Each logical element counts once: in one replica, on the rank of the tensor axis that has it, not in copies.
    """
    wanted = engine.options.clip_norm is not None or engine.scaler.dynamic
    blocks = wanted and engine.options.chunks is not None
    mine = _once(engine, read) if wanted else []
    local = exact_sum([square_sum(engine.xp, part) for part in mine]) if not blocks else 0.0
    weight_here = taken[0] if taken and engine.counts_loss else 0.0
    rows = engine.everyone([weight_here, local], "NORM (weight, squares)")
    weight = exact_sum([row[0] for row in rows]) or 1.0
    squares = exact_sum([row[1] for row in rows])
    if blocks:
        squares = _block_squares(engine, mine)
    factor = 1.0 / (weight * engine.scaler.value)
    size = math.sqrt(squares) * factor if wanted else math.nan
    finite = math.isfinite(squares)
    engine.scaler.saw(finite)
    clip = engine.options.clip_norm
    if clip is not None and finite:
        factor *= min(1.0, clip / (size + 1e-6))
    learning_rate = rate(engine.optimizer, engine.steps + 1)
    return (Scale(factor, size, not finite and engine.scaler.dynamic, learning_rate),)


def _once(engine: Engine, totals: Values) -> list[Any]:
    """What of this rank's gradients counts for the norm, parameter by parameter where ranks hold the same."""
    if engine.axes.replica.rank > 0:
        return []
    found: list[Any] = []
    for page, total in zip(engine.stage.trained, totals, strict=True):
        if page in engine.layout.copies:
            continue
        if engine.options.chunks is None and engine.axes.tensor.size == 1:
            found.append(total)
            continue
        state = engine.pages[page]
        for piece in state.page.pieces(state.mine):
            spec = engine.layout.specs[state.page.fields[piece.have].source]
            if engine.axes.tensor.rank == 0 or spec.cut is not None:
                found.append(total[piece.start - state.mine.start : piece.stop - state.mine.start])
    return found


def _block_squares(engine: Engine, parts: list[Any]) -> float:
    """Sum of squares over fixed blocks of each parameter, all blocks of all ranks added exactly: no layout is seen."""
    local = [square for part in parts for square in block_squares(engine.xp, part)]
    return exact_sum([v for row in engine.axes.world.all_gather_object(expansion(local)) for v in row])


def commit(engine: Engine, room: Room, action: Action, taken: Values, read: Values, added: Values) -> Values:
    assert engine.commit is not None
    engine.commit(*read)
    return ()


def update(engine: Engine, room: Room, action: Action, taken: Values, read: Values, added: Values) -> Values:
    page, scale = _page(action), read[0]
    state, step = engine.pages[page], engine.steps + 1
    if not scale.skip:
        segments = engine.segments[page]
        engine.optimizer.update(
            engine.xp,
            state.master,
            taken[0],
            state.slots,
            lr=scale.rate,
            step=step,
            segments=segments,
            scale=scale.factor,
        )
    return (state,)


def _mb(action: Action) -> int:
    assert action.mb is not None
    return action.mb


def _unit(action: Action) -> int:
    assert action.unit is not None
    return action.unit


_page = _unit  # for verbs that count pages


def _same(a: Any, b: Any) -> bool:
    """Whether two flat views start at the same byte."""
    return hasattr(a, "__array_interface__") and a.__array_interface__["data"] == b.__array_interface__["data"]


OPERATIONS: dict[str, Operation] = {
    "LOAD": load,
    "SEND": send,
    "RECV": receive,
    "F": forward,
    "E": evaluate,
    "C": checkpoint,
    "R": again,
    "B": backward,
    "I": backward_input,
    "W": backward_params,
    "LOSS": loss,
    "SCORE": score,
    "SEED": seed,
    "MEAN": mean,
    "GATHER": gather,
    "FREE": free,
    "REDUCE": reduce,
    "SETTLE": settle,
    "JOIN": join,
    "TIE": tie,
    "NORM": norm,
    "COMMIT": commit,
    "UPDATE": update,
}
