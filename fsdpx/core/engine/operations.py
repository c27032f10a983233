"""Operations: the functions that perform each verb (kind of action) on one rank. The table of verbs lists the slots
(named values) of each verb. An operation receives the values of the slots that it takes, reads or adds to, in the order
of this table. It returns the new values of the slots that it fills, followed by the values of the slots that it adds
to.

SEND and RECV transfer messages between pipeline stages: activations go forward to the next stage that reads them, and
gradients go backward. UPDATE runs the optimizer on parameters. An `Executable` is a compiled program with its memory on
one rank; it can run any number of times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, NoReturn

from fsdpx.core.array.kernels import square_sum, store
from fsdpx.core.array.sums import compute_padded_sum_expansion, sum_block_squares, sum_exactly
from fsdpx.core.comm.calls import HandleWithCallback, TimedTransfer
from fsdpx.core.comm.communicator import COMPLETED, Communicator
from fsdpx.core.compression import BoundCodec
from fsdpx.core.engine import compute_verbs
from fsdpx.core.engine.not_finite import describe_not_finite
from fsdpx.core.engine.run import (
    GradientScale,
    LossMean,
    Operation,
    ProgramRun,
    Values,
    Workspace,
    format_action_label,
    get_action_target,
    require_same_scheduled_values,
)
from fsdpx.core.program import VERBS, Action, ProgramRequest, Slot, check, compile
from fsdpx.core.state.flat_parameters import ElementRange
from fsdpx.core.state.gradients import Reduction
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.train_state import TieGroup, TrainState
from fsdpx.errors import DataError, NumericsError, ShapeError
from fsdpx.optim import ShardSegments, get_learning_rate
from fsdpx.optim.optimizer import UNSCHEDULED, get_scheduled_lr_and_average_weight, update_parameters

__all__ = [
    "OPERATIONS",
    "TARGET_TEXTS",
    "Executable",
    "ExecutableAction",
    "compute_local_loss_and_gradient_scale",
    "preserving_frozen_parameters",
    "release_slots",
    "require_finite_loss",
    "run_optimizer_on_page",
    "start_receive_value",
    "start_send_value",
    "update_page",
]  # fmt: skip


def update_page(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    p, scale, (master, slots) = get_action_target(action), read[0], added
    own = run.placement.segments_of_own_shard_by_page[p]
    if not scale.skip and not run_optimizer_on_page(
        run, master, taken[0], slots, own, run.step + 1, scale.rate, scale.factor
    ):
        # a dry run does not update or send anything, so count what the optimizer would send
        for axis, call, nbytes in run.placement.list_optimizer_collectives(p):
            run.placement.axes.counters.add_calls(axis, call, nbytes)
    return (master, slots)


def run_optimizer_on_page(
    run: ProgramRun,
    master: Any,
    gradient: Any,
    slots: Any,
    segments: ShardSegments,
    step: int,
    lr: float,
    factor: float,
) -> bool:
    """Update a range of elements of a page (flat parameter buffer) with the optimizer. Return False if there was
    nothing to update. `step` is the number of the training step, counted from 1."""
    place, counted = run.placement, segments.with_missed_update_counts(run.missed)
    with preserving_frozen_parameters(run, segments, master, slots) if run.views.frozen else nullcontext():
        return update_parameters(
            place.optimizer, place.xp, master, gradient, slots, lr=lr, step=step, segments=counted, scale=factor
        )


@contextmanager
def preserving_frozen_parameters(
    run: ProgramRun, segments: ShardSegments, master: Any, slots: Mapping[str, Any]
) -> Iterator[None]:
    """Return a context manager that restores frozen parameters and their optimizer state on exit, because weight decay
    and momentum would change them even without a gradient."""
    still = [slice(s.start, s.stop) for s in segments.items if s.name in run.views.frozen]
    kept = [(array[at], array[at].copy()) for array in (master, *slots.values()) for at in still]
    yield
    for now, before in kept:
        now[...] = before


def start_send_value(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """Start sending an activation or a gradient to another pipeline stage. No action waits for the send to complete;
    the program waits for it at the end."""
    message = run.workspace.stage_messages.get_message(action, run.get_microbatch(action))
    if message is None:
        return ()
    xp, (value,) = run.placement.xp, (*taken, *read)
    if value is None:  # the loss does not depend on this activation, so send zeros as its gradient
        value = xp.zeros(message.shape, dtype=message.dtype)
    if tuple(value.shape) != message.shape or value.dtype != message.dtype:
        raise ShapeError(
            f"{action}: value {message.edge.value} is {value.dtype}{list(value.shape)}, rank {message.peer} of the "
            f"pipe expects {message.dtype}{list(message.shape)}: the shapes of values must depend only on shapes"
        )
    flat = xp.ascontiguousarray(value).reshape(-1)
    handle = run.placement.axes.pipe.send(flat, message.peer, message.tag, what=message.what)
    # the lambda keeps the array alive until it has been sent
    run.track_transfer(action, TimedTransfer(handle, lambda: flat))
    return ()


def start_receive_value(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """Start receiving an activation or a gradient from another pipeline stage. Return the transfer, or None if the
    other stage sends nothing."""
    message = run.workspace.stage_messages.get_message(action, run.get_microbatch(action))
    if message is None:
        return (None,)
    flat = run.placement.xp.empty((message.size,), dtype=message.dtype)
    handle = run.placement.axes.pipe.recv(flat, message.peer, message.tag, what=message.what)
    return (TimedTransfer(handle, lambda: flat.reshape(message.shape)),)


def start_all_reduce_loss(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """Start averaging the loss over all ranks. The transfer runs during the backward pass. The first action that needs
    the mean loss waits for it."""
    return (
        run.placement.start_all_gather_numbers(
            _pack_values_for_step_all_reduce(run, taken, read),
            "MEAN (loss)",
            partial(_compute_mean_loss_from_gathered_rows, run),
            run.sync_group,
        ),
    )


def _pack_values_for_step_all_reduce(run: ProgramRun, pairs: Values, weight: Values) -> list[float]:
    """Return the numbers that this rank contributes to the all-reduce at the end of a step.

    They are the weight of this rank's gradients, the summed loss and weight of each microbatch, and the scheduled
    values (such as the learning rate), which must be the same on all ranks."""
    rates = (
        get_scheduled_lr_and_average_weight(run.placement.optimizer, run.step + 1) if run.has_update else UNSCHEDULED
    )
    # return zeros, because another pipeline or tensor rank counts the loss of these samples
    if not run.placement.counts_loss or not weight:
        return [0.0] * (1 + 2 * len(run.feed.batch)) + [*rates]
    return [weight[0], *(number for pair in pairs for number in pair), *rates]


def _compute_mean_loss_from_gathered_rows(run: ProgramRun, rows: list[list[float]]) -> LossMean:
    """Return the mean loss. `rows` holds one list for each rank, with the numbers that the rank sent. Raise DataError
    if the total loss weight of the global batch is zero. If replicas train independently, raise no error, because the
    weight of a single replica's samples may be zero."""
    require_same_scheduled_values(run, run.sync_group, rows, {-2: "learning rate", -1: "share that an average keeps"})
    # the modulo is needed in asynchronous training, where `rows` has only one row, from this rank
    lr = rows[run.sync_group.rank % len(rows)][-2]
    if math.isnan(lr):
        # NaN means that the learning rate is invalid; computing it again raises the error on every rank
        get_learning_rate(run.placement.optimizer, run.step + 1)
    shared = sum_exactly([row[0] for row in rows])
    if len(rows[0]) == 3:
        return LossMean(math.nan, 1.0, shared, lr)
    total = sum_exactly([number for row in rows for number in row[1:-2:2]])
    weight = sum_exactly([number for row in rows for number in row[2:-2:2]])
    if run.placement.device.is_zero(weight) and run.sync_group.size == run.placement.axes.world.size:
        raise DataError("no target of the global batch counts for the loss: it is empty, or every label is ignored")
    return LossMean(total, weight, shared, lr)


def start_all_gather_page(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """Start the all-gather of the shards of a page (flat parameter buffer) into its full parameters. With N ranks and a
    page of n elements, each rank sends n - n/N elements."""
    p, place, (master,) = get_action_target(action), run.placement, read
    page, comm, description = place.pages[p], place.axes.shard, format_action_label(run, action)
    full = run.workspace.get_full_parameter_buffer(p)
    views = run.views.view_parameters(page.page, full)
    if (sent := place.formats.wire) is not None:
        wire = run.workspace.take_next_temporary_buffer("wire", p, page.size, sent)
        own_part = wire[page.own_range.start : page.own_range.stop]
        store(place.xp, master, own_part)
        handle = comm.all_gather(own_part, wire, page.counts, what=description)
        return (TimedTransfer(HandleWithCallback(handle, partial(store, place.xp, wire, full)), lambda: views),)
    # in asynchronous training, the shard is in an MPI window, from which it cannot be sent directly
    if place.formats.compute != place.formats.master or place.sync_policy.own_speed:
        own_part = full[page.own_range.start : page.own_range.stop]
        store(place.xp, master, own_part)
        master = own_part
    if comm.size == 1 and place.keeps_full_parameters:  # the shard is the full page, so nothing is sent
        return (TimedTransfer(COMPLETED, lambda: views),)
    return (TimedTransfer(comm.all_gather(master, full, page.counts, what=description), lambda: views),)


def release_slots(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """Free the values that the action takes out of its slots (named values). These values are gathered parameters, or
    arrays loaded from storage."""
    return ()


def start_reduce_scatter_page(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    p, (gradient,), part, memory = get_action_target(action), taken, added[0], added[1:]
    kept, place = run.workspace.get_shard_gradient(p), run.placement
    if place.axes.shard.size == 1 and not memory and not place.accumulation.bitwise:
        return (gradient.use_as_only_shard(kept, part is None), kept if part is None else part)
    reduction = _make_gradient_reduction(run, action, "shard", part is None, memory)
    return (gradient.start_reduce_scatter(reduction), kept if part is None else part, *memory)


def add_reduced_gradient(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    return (run.placement.accumulation.add_reduced_sum(taken[0], added[0]),)


def start_all_reduce_over_replicas(
    run: ProgramRun, action: Action, taken: Values, read: Values, added: Values
) -> Values:
    return (
        run.placement.accumulation.start_all_reduce_over_replicas(
            taken[0], _make_gradient_reduction(run, action, "replica", False, added)
        ),
        *added,
    )


def _make_gradient_reduction(run: ProgramRun, action: Action, axis: str, first: bool, memory: Values) -> Reduction:
    p, place, work = get_action_target(action), run.placement, run.workspace
    comm: Communicator = getattr(place.axes, axis)
    over_shards, kept = axis == "shard", memory[0] if memory else {}
    kept = {name.partition("/")[2]: array for name, array in kept.items() if name.startswith(axis)}
    sizes = work.state.ledger.codec_error_norms.setdefault((axis, p), [math.nan, math.nan])
    scratch = work.take_next_scratch_buffer("carry" if over_shards else "join", p)
    carrier = BoundCodec(
        getattr(place.get_codec_route(p), axis), comm, kept, scratch, sizes, format_action_label(run, action)
    )
    trade = work.take_next_scratch_buffer("trade", p) if over_shards else None
    return Reduction(carrier, place.pages[p], work.get_shard_gradient(p), first, trade)


def all_reduce_tied_gradients(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    """Sum the gradients of tied parameters, and store the sum in all copies on this rank. Let n be the number of
    elements per copy on this rank, T the number of tensor ranks, k the total number of copies, and c the number of
    copies on this rank. Then the rank sends 2 n (T - 1)/T elements over the tensor axis, and n (k - c) elements to
    other ranks that have copies."""
    p, description = get_action_target(action), format_action_label(run, action)
    tie_group = run.ties[p]
    if tie_group.partial:
        for total in taken:
            run.placement.axes.tensor.all_reduce(total, what=description).wait()
    scratch = run.workspace.take_next_scratch_buffer("tie", p)
    gathered = (
        list(taken)
        if tie_group.comm is None
        else _all_gather_tied_gradients(tie_group, tie_group.comm, taken, scratch, description)
    )
    total = gathered[-1]
    # add the last copy first, because the backward pass of a single process reaches later layers first
    for other in reversed(gathered[:-1]):
        total += other
    for own_array in taken:
        if own_array is not total:
            own_array[...] = total
    return taken


def _all_gather_tied_gradients(tie: TieGroup, comm: Communicator, totals: Values, every: Any, what: str) -> list[Any]:
    """All-gather the gradients of all copies of a tied parameter, and return them in the order of `tie.pages`. `totals`
    holds the gradients of this rank's copies, `every` is memory for the gradients of all copies, and `what` names the
    transfer in error messages."""
    n, held = totals[0].size, tie.page_counts_by_rank
    first = n * sum(held[: comm.rank])
    own_part = every[first : first + n * held[comm.rank]]
    for i, total in enumerate(totals):
        own_part[i * n : (i + 1) * n] = total
    comm.all_gather(own_part, every, [n * k for k in held], what=what).wait()
    place = {page: i for i, page in enumerate(tie.gather_order)}
    return [every[place[i] * n : (place[i] + 1) * n] for i in range(len(tie.pages))]


def all_reduce_loss_and_gradient_norm(
    run: ProgramRun, action: Action, taken: Values, read: Values, added: Values
) -> Values:
    """Compute the mean loss, the gradient norm and the factor for all gradients in a single collective. The factor is
    `1 / (weight * loss_scale)`. If the norm exceeds `max_norm` (option `clip_norm`), the factor is also multiplied by
    `max_norm / norm`."""
    place, scaler, clip = run.placement, run.scaler, run.placement.options.clip_norm
    here = _compute_own_norm_squares(run, read)
    n = len(here)
    losses = _pack_values_for_step_all_reduce(run, taken[:-1], taken[-1:])
    rows = place.all_gather_numbers([*here, *losses], "NORM (squares, loss)", run.sync_group)
    squares = sum_exactly([number for row in rows for number in row[:n]])
    mean = _compute_mean_loss_from_gathered_rows(run, [row[n:] for row in rows])
    factor = 1.0 / (mean.gradient_divisor * scaler.value)
    size = math.sqrt(squares) * factor
    finite = math.isfinite(squares)
    if not scaler.dynamic:
        require_finite_loss(run, mean, run.sync_group)
        if not finite:
            _raise_numerics_error(
                run, f"the norm of the gradient is {size}", _describe_nonfinite_gradient(run, read), run.sync_group
            )
    if clip is not None and finite:
        factor *= _compute_clip_factor(size, clip)
    return mean, GradientScale(
        factor, size, not finite and scaler.dynamic, mean.rate, scaler.make_scaler_for_next_step(finite)
    )


def _compute_clip_factor(norm: float, max_norm: float) -> float:
    return min(1.0, max_norm / (norm + 1e-6))


def compute_gradient_factor_without_norm(
    run: ProgramRun, action: Action, taken: Values, read: Values, added: Values
) -> Values:
    """Compute the factor for all gradients without communication, for steps that do not need the gradient norm. Each
    rank checks only its own gradient shards for NaN and Inf. Because this action reads all gradients, all their
    reductions are complete before the first update."""
    require_finite_loss(run, read[0], run.sync_group)
    _require_finite_gradients(run, read[1:])
    factor = 1.0 / (read[0].gradient_divisor * run.scaler.value)
    return (GradientScale(factor, math.nan, False, read[0].rate, run.scaler),)


def _compute_own_norm_squares(run: ProgramRun, totals: Values) -> list[float]:
    """Return numbers whose sum over all ranks is the squared gradient norm. With reproducible chunks, fixed blocks of
    each parameter are summed exactly, so that the result does not depend on sharding. `totals` holds this rank's
    gradient shards."""
    xp, parts = run.placement.xp, [totals[n][at] for n, at in _list_gradient_slices_counted_once(run)]
    if not run.placement.accumulation.bitwise:
        return [sum_exactly([square_sum(xp, part) for part in parts])]
    return compute_padded_sum_expansion([square for part in parts for square in sum_block_squares(xp, part)])


def _list_gradient_slices_counted_once(run: ProgramRun) -> list[tuple[int, slice]]:
    """Return the gradient elements that this rank contributes to sums over all ranks, as (index into the list of
    trained pages, slice of the page's gradient shard).

    Each element of the model counts only once, although several ranks may hold it. Replicas after the first, duplicates
    on tensor ranks, and copies of tied parameters do not count. With reproducible chunks, there is one slice per
    parameter; otherwise, adjacent slices are merged."""
    place = run.placement
    if place.axes.replica.rank > 0 and place.sync_policy.is_synchronous:
        return []
    counted_slices: list[tuple[int, slice]] = []
    for n, p in enumerate(run.stage.trained_pages):
        if p in place.layout.tied_copy_pages:
            continue
        if not place.accumulation.bitwise and place.axes.tensor.size == 1:
            counted_slices.append((n, slice(None)))
            continue
        page = place.pages[p]
        for piece in page.page.find_field_overlaps(page.own_range):
            spec = place.layout.specs[page.page.fields[piece.have].source]
            if place.axes.tensor.rank == 0 or spec.cut is not None:
                local_slice = slice(piece.start - page.own_range.start, piece.stop - page.own_range.start)
                if (
                    not place.accumulation.bitwise
                    and counted_slices
                    and counted_slices[-1] == (n, slice(counted_slices[-1][1].start, local_slice.start))
                ):
                    local_slice = slice(counted_slices.pop()[1].start, local_slice.stop)
                counted_slices.append((n, local_slice))
    return counted_slices


def call_commit_callback(run: ProgramRun, action: Action, taken: Values, read: Values, added: Values) -> Values:
    assert run.feed.commit is not None
    run.feed.commit(*read)
    return (True,)


def compute_local_loss_and_gradient_scale(
    run: ProgramRun, action: Action, taken: Values, read: Values, added: Values
) -> Values:
    """Compute the mean loss and the gradient factor from this rank's batch alone, without communication."""
    place, clip = run.placement, run.placement.options.clip_norm
    mean = _compute_mean_loss_from_gathered_rows(run, [_pack_values_for_step_all_reduce(run, taken[:-1], taken[-1:])])
    require_finite_loss(run, mean)
    factor, norm = 1.0 / (mean.shared * run.scaler.value), math.nan
    totals = tuple([gradient.get_microbatch_buffer(0) for gradient in read])
    _require_finite_gradients(run, totals)
    if clip is not None:
        norm = math.sqrt(sum_exactly([square_sum(place.xp, total) for total in totals])) * factor
        factor *= _compute_clip_factor(norm, clip)
    return mean, GradientScale(factor, norm, False, mean.rate, run.scaler)


def require_finite_loss(run: ProgramRun, mean: LossMean, comm: Communicator | None = None) -> None:
    """Raise NumericsError if the mean loss is NaN or Inf, before anything is updated. `comm` is the communicator of the
    ranks that averaged this loss. All of these ranks raise the same error, which names a rank with NaN or Inf in its
    batch. If `comm` is None, only this rank raises an error."""
    if run.feed.batch and not math.isfinite(mean.total):
        _raise_numerics_error(run, f"the loss is {mean.value}", _describe_first_non_finite_value(run), comm)


def _require_finite_gradients(run: ProgramRun, totals: Values) -> None:
    """Raise NumericsError if one of this rank's gradient shards has a NaN or Inf. Other ranks are not notified.
    `totals` holds this rank's gradient shards."""
    if run.placement.device.are_finite(totals):
        return
    # if every gradient is finite and only the squares overflowed, `problem` is empty and nothing is raised
    problem = _describe_nonfinite_gradient(run, totals)
    if problem and run.sync_group.size > 1:
        problem += (
            ". Ranks that update other parameters may have updated them: resume from a checkpoint. With clip_norm=... "
            "all ranks raise before any of them updates"
        )
    if problem:
        _raise_numerics_error(run, "a gradient is not finite", problem)


def _raise_numerics_error(run: ProgramRun, what: str, origin: str, comm: Communicator | None = None) -> NoReturn:
    """Raise NumericsError about `what`. `origin` describes where this rank found NaN or Inf. If `comm` is given, all
    ranks of `comm` must call this function, and they exchange these descriptions. Otherwise, only this rank calls
    it."""
    origins = [origin] if comm is None else comm.all_gather_value(origin)
    told = next(filter(None, origins), "distribute(..., check_finite=True) names its origin")
    raise NumericsError(f"step {run.step + 1}: {what}, and nothing is updated with it: {told}")


def _describe_first_non_finite_value(run: ProgramRun) -> str:
    """Return a phrase that names the first NaN or Inf in the inputs and target of this rank's batch, or "" if all
    values are finite."""
    place = run.placement
    for batch in filter(None, run.feed.batch):
        arrays = {f"input {name!r}": array for name, array in zip(place.layout.inputs, batch.inputs, strict=True)}
        if not getattr(place.loss, "skipna", False):
            names = ["the target"] if len(batch.targets) == 1 else [f"target {i}" for i in range(len(batch.targets))]
            arrays |= dict(zip(names, batch.targets, strict=True))
        for array_name, array in arrays.items():
            if problem := describe_not_finite(place, array, array_name):
                return problem
    return ""


def _describe_nonfinite_gradient(run: ProgramRun, totals: Values) -> str:
    """Return a phrase that names the first parameter with a NaN or Inf in its gradient on this rank, or "" if there is
    none. `totals` holds this rank's gradient shards."""
    for p, total in zip(run.stage.trained_pages, totals, strict=True):
        page = run.placement.pages[p]
        first = (
            page.own_range.start if total.size == page.own_range.size else 0
        # the shard starts at 0 in asynchronous training, where each rank has the full gradient
        )
        for piece in page.page.find_field_overlaps(ElementRange(first, first + total.size)):
            name = page.page.fields[piece.have].source
            part = total[piece.start - first : piece.stop - first]
            if problem := describe_not_finite(run.placement, part, f"the gradient of {name!r}"):
                return problem
    return ""


OPERATIONS: dict[str, Operation] = {
    "LOAD": compute_verbs.load_microbatch_inputs,
    "SEND": start_send_value,
    "RECV": start_receive_value,
    "F": compute_verbs.forward_unit,
    "E": compute_verbs.forward_unit_without_saving,
    "C": compute_verbs.forward_unit_checkpointed,
    "R": compute_verbs.recompute_unit,
    "B": compute_verbs.backward_unit,
    "I": compute_verbs.backward_unit_input,
    "W": compute_verbs.backward_unit_params,
    "LOSS": compute_verbs.compute_loss_and_output_gradients,
    "SCORE": compute_verbs.compute_loss_only,
    "SEED": compute_verbs.start_backward_from_caller_gradients,
    "MEAN": start_all_reduce_loss,
    "GATHER": start_all_gather_page,
    "FREE": release_slots,
    "REDUCE": start_reduce_scatter_page,
    "SETTLE": add_reduced_gradient,
    "JOIN": start_all_reduce_over_replicas,
    "TIE": all_reduce_tied_gradients,
    "SCALE": compute_gradient_factor_without_norm,
    "NORM": all_reduce_loss_and_gradient_norm,
    "COMMIT": call_commit_callback,
    "UPDATE": update_page,
}
"""Operations by verb. A new verb needs an entry in this table and a row in `fsdpx.core.program.VERBS`. Extensions add
entries."""


class ExecutableAction(NamedTuple):
    """An action with everything needed to run it.

    Attributes
    ----------
    words : the action as text, for error messages and observers
    gives : the slots (named values) that the action fills, followed by the slots to which it adds
    """

    operation: Operation
    action: Action
    words: str
    takes: tuple[Slot, ...]
    reads: tuple[Slot, ...]
    adds: tuple[Slot, ...]
    gives: tuple[Slot, ...]
    lane: str


class Executable:
    """A program that has been compiled and verified, with its memory on this rank.

    Attributes
    ----------
    producers : for each slot (named value), the name of the action that fills it
    """

    def __init__(self, state: TrainState, request: ProgramRequest) -> None:
        place, program = state.placement, compile(request)
        check(program)
        place.pipe.require_no_deadlock(request, place.stages)
        self.program = program
        self.workspace = Workspace(state, program)
        self.steps = [
            ExecutableAction(
                OPERATIONS[a.op], a, f"{a} ({describe_action_target(place, a, program.kind)})", s.takes, s.reads,
                s.adds, (*s.gives, *s.adds), VERBS[a.op].lane,
            )
            for a, s in zip(program.actions, program.slots, strict=True)
        ]  # fmt: skip
        self.producers = {slot: step.words for step in self.steps for slot in step.gives}


def describe_action_target(placement: Placement, action: Action, kind: str) -> str:
    """Return a phrase that names the target of an action: a unit (group of layers), a page (flat parameter buffer) or a
    message. If the action has no target, name the program by its `kind`, such as "step"."""
    description, number = VERBS[action.op].about, action.unit
    if number is None or not description:
        return f"the {kind} program"
    return TARGET_TEXTS[description](placement, number)


def _describe_edge(placement: Placement, number: int) -> str:
    edge = placement.stage.edges[number]
    return f"from rank {edge.sender} to rank {edge.receiver} of the pipe"


TARGET_TEXTS: dict[str, Callable[[Placement, int], str]] = {
    "edge": _describe_edge,
    "unit": lambda placement, number: f"unit {placement.layout.units[number].name!r}",
    "page": lambda placement, number: f"page {placement.format_page_name(number)!r}",
}
"""For each kind of target of an action ("unit", "page" or "edge"), a function that takes (placement, ID of the target)
and returns a phrase that names the target. Extensions add functions."""
