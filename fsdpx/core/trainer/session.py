"""A model on one placement: from batches to programs that run. A trainer holds one; an elastic trainer holds another
one after every change of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from fsdpx.core.array.shapes import ShapeArray
from fsdpx.core.base.name_hints import patterns_of
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.mesh import alone
from fsdpx.core.engine.clock import BATCHES
from fsdpx.core.engine.engine import Direct, Engine
from fsdpx.core.engine.not_finite import demand_finite
from fsdpx.core.engine.operations import Executable
from fsdpx.core.engine.run import GradientScale, Mean
from fsdpx.core.program import KINDS, Program, Request, Slot, Stage, Sync, compile, one_by_one
from fsdpx.core.state.placement import Placement
from fsdpx.core.state.step_inputs import Feed, Microbatch
from fsdpx.core.state.train_state import TrainState
from fsdpx.core.trainer import batch as batches
from fsdpx.core.trainer.batch import Twins
from fsdpx.core.trainer.settled import Settled
from fsdpx.errors import ConfigError, FsdpxError, warn
from fsdpx.nn.cache import Cache
from fsdpx.nn.gradient_accumulation import is_index
from fsdpx.nn.linearize import Sorted, infer

__all__ = ["Session"]

Commit = Callable[[Any, Any], None]
STEP = frozenset({"step", "accumulate", "forward", "backward", "update"})
"""Calls of which replicas that train by themselves tell each other only where they meet."""


TRAINS = ("step", "accumulate")
"""Programs that run forward and backward on samples and targets."""
IDLE, CUT = "no gradient reaches some", "how samples are cut"
SHAPES = 16
"""The most shapes of small batches for which the way their layers run is kept."""
LOOKS = ("evaluate", "predict")
"""Programs that only look: their requests depend on what is in the store and on what is frozen, and on nothing else."""


class BatchAgreement(NamedTuple):
    """How ranks agree on a batch, which is decided before anybody looks at it.

    ranks: those that come together, None where no other rank comes to this program. may_be_settled: a rank asks its
    neighbors alone, as long as all bring the same as before. digests: several ranks may work on the same samples, and
    tell each other what their values add up to. doubted: ranks that should have samples of their own may have the
    same."""

    ranks: Communicator | None
    may_be_settled: bool
    digests: bool
    doubted: bool


@dataclass
class GivenBatch:
    """A batch of this rank, as far as it is good. rows: samples. features: what other ranks must have alike. batched:
    see `Feed`. error: why it is not good."""

    inputs: tuple[Any, ...] = ()
    target: Any = None
    rows: int = 0
    features: str = ""
    batched: bool = True
    error: FsdpxError | None = None

    @property
    def arrays(self) -> list[Any]:
        """Inputs and targets."""
        return [*self.inputs, *([] if self.target is None else [self.target])]


class Session:
    """model, loss: as one process has them, to check batches against. commit: see `Feed`."""

    def __init__(
        self, engine: Engine, model: Sorted, loss: Any, microbatches: int, commit: Commit | None = None
    ) -> None:
        self.engine = engine
        self.commit = commit
        self._counts = microbatches, microbatches  # that were asked for, and of the last batch that was cut
        self.model, self.loss = model, loss
        self._twins = Twins(self.place.axes)
        # beside a solver a rank waits for its neighbors alone
        together = self.place.sample_layout.has_one_group
        self._settled = Settled(self.place.axes.world, self._predict_zeros) if together else None
        # by request and what ran before; those of `LOOKS` by what their requests depend on as well
        self._executables: dict[tuple[Any, ...], Executable] = {}
        self._fits: dict[tuple[Any, ...], list[tuple[int, ...]]] = {}  # batch shapes seen -> output shapes
        self._noticed: set[str] = set()
        self._largest: Microbatch | None = None  # as large as any of any rank, where there is a budget
        self._recomputed: dict[Any, frozenset[int]] = {}  # batch sizes seen -> units that run again
        self._stages: dict[tuple[frozenset[str], frozenset[int]], Stage] = {}  # by what is frozen, and inputs wanted
        self.short: Callable[[MemoryError, Feed], Exception] | None = None  # says what to do about too little memory

    @property
    def place(self) -> Placement:
        """The fixed choices of this rank."""
        return self.engine.placement

    @property
    def state(self) -> TrainState:
        """What lasts from step to step."""
        return self.engine.state

    # -- how calls begin -----------------------------------------------------------------------------------------------

    def note(self, call: str) -> None:
        """This rank has come to `call`: others can read it in its flight record. Raises what a rank that met an error
        in `predict` has told this one."""
        for enter in self.engine.hooks.enter:
            enter(call)
        if self._settled is not None and call != "predict" and (error := self._settled.leave()) and call != "close":
            raise error

    def begin(self, call: str) -> None:
        """Return when all ranks have come to `call`; DesyncError on all of them if some call something else. Where
        replicas train by themselves, what is no part of a step waits for all that is under way."""
        self.note(call)
        self.meet()
        if call == "close" and self.place.pace.lost():
            return  # dead ranks do not come, and living ranks need nothing of each other any more
        batches.begin(self._meeting(call), call)
        if call not in STEP:
            self.state.land()

    def _meeting(self, call: str) -> Communicator:
        """The ranks that come to `call` together: those of one replica in the steps in which replicas do not meet."""
        axes = self.place.axes
        if axes.group is axes.world or call not in STEP:
            return axes.world
        return axes.world if call in ("step", "update") and self.place.pace.met(self.state.steps + 1) else axes.group

    def meet(self) -> None:
        """Return when all ranks have made their last step, where they step at their own speed: until then some may read
        and change what this rank holds, and this rank delays no other."""
        self.place.pace.meet()

    def placed(self) -> None:
        """All parameters and the number of steps have been set; returns when they are on all ranks. Collective where
        ranks step at their own speed: none may read what another has not set."""
        self.place.pace.placed(self.state.steps)
        if self.place.pace.own_speed:
            self.begin("begin to step apart")

    def common(self, *kinds: str) -> AbstractContextManager[None]:
        """Inside, each rank has what all have in common, where ranks have models of their own. kinds: of rows of the
        ledger."""
        put = self.place.pace.common(self.state, kinds)
        return nullcontext() if put is None else self.having(put, "the common model")

    @contextmanager
    def having(self, put: Callable[[], Callable[[], None]], what: str) -> Iterator[None]:
        """Inside, parameters are others: `put` puts them there, and returns what puts the own ones back."""
        self.begin(f"with {what}")
        put_back = put()
        self.state.replaced()
        try:
            yield
            self.begin(f"without {what}")
        finally:
            put_back()
            self.state.replaced()

    # -- batches -------------------------------------------------------------------------------------------------------

    def feed(self, x: Any, y: Any, kind: str, training: bool, also: str = "") -> Feed:
        """A checked and agreed batch, cut into microbatches. kind: of the program. also: what else ranks must agree on.

        Collective: all ranks raise the same error if the batch of one of them is not good."""
        begin = perf_counter()
        self.note(kind)
        meeting = self._meeting_about(kind)
        given = self._given(x, y, kind, meeting, also + ", training=False" * (kind == "forward" and not training))
        everyone = self._agree(meeting, given, kind)
        if kind in TRAINS and CUT not in self._noticed:
            self._tell_mistakes(given.inputs[0])
        microbatches = self._microbatches(given.inputs, given.target, everyone, kind)
        self.engine.outside(BATCHES, begin)
        return Feed(microbatches, training, self.commit, batched=given.batched)

    def _meeting_about(self, kind: str) -> BatchAgreement:
        """How ranks agree on a batch of this kind."""
        axes, own_speed = self.place.axes, self.place.pace.own_speed and kind == "step"
        doubted = kind in TRAINS and self._twins.doubted and self.place.sample_layout.is_whole
        if own_speed or not axes.world.has_peers:
            return BatchAgreement(None, False, digests=False, doubted=doubted)
        digests = doubted or axes.data.size < axes.world.size
        return BatchAgreement(self._meeting(kind), kind == "predict" and self._settled is not None, digests, doubted)

    def _given(self, x: Any, y: Any, kind: str, meeting: BatchAgreement, also: str) -> GivenBatch:
        """A batch as it was given here, checked by this rank alone, with what others must have alike. also: more of
        that."""
        place, given = self.place, GivenBatch()
        layout = place.sample_layout
        try:
            batches.check_places(place, x, y)
            given.inputs = batches.inputs_of(place, x)
            given.batched = layout.is_whole or layout.is_batched(batches.given_of(place, x)[0])
            given.rows = int(given.inputs[0].shape[0])
            if kind in (*TRAINS, "evaluate"):
                given.target = batches.target_of(place, y, given.rows)
            if place.axes.world.size > 1:
                given.features = ", ".join(map(layout.describe, given.arrays)) + also
            if meeting.digests:
                given.features += f"{batches.DIGEST}{batches.sum_of(given.arrays)}"
            self._validate(given.inputs, given.target)
        except FsdpxError as problem:
            given.error = batches.as_given(problem, x, y)
        return given

    def _agree(self, meeting: BatchAgreement, given: GivenBatch, kind: str) -> tuple[int, ...]:
        """The samples of all data ranks. Raises the same error on all ranks that meet, if the batch of one is not
        good."""
        place, about = self.place, (given.features, given.rows)
        if meeting.ranks is None:
            if given.error is not None:
                raise batches.name_rank(given.error, place.axes.world.rank)
            return place.accumulation.extrapolate(given.rows)
        settled = self._settled if meeting.may_be_settled else None
        if settled is not None and settled.start(about, given.error):
            return (given.rows,) * place.axes.data.size
        self.meet()
        everyone, alike = batches.agree(place.axes, kind, *about, given.error, meeting.ranks)
        if meeting.doubted and meeting.ranks is place.axes.world:
            self._twins.see(alike, given.arrays)
        place.sample_layout.demand_together(everyone)
        if settled is not None:
            settled.agree_on(about, _shapes(given.inputs))
        return everyone

    def tokens(self, tokens: Any, row: int, cache: Cache | None) -> Feed:
        """The same for tokens of texts that all ranks know to be good. row: number of the first text. cache: of keys
        and values; None: the tokens are whole texts."""
        inputs = batches.inputs_of(self.place, tokens)
        self._validate(inputs, None)
        return Feed([Microbatch(inputs, None, row)], training=False, cache=cache)

    def _microbatches(
        self, inputs: tuple[Any, ...], target: Any, rows: tuple[int, ...], kind: str
    ) -> list[Microbatch | None]:
        """Cut this rank's part; samples that are trained on are counted since the last update."""
        place, state, whole = self.place, self.state, kind in ("forward", "predict")
        if kind == "predict":
            return [Microbatch(inputs, None, sum(place.others(rows)))]
        trains = kind in ("step", "accumulate", "forward")
        before = 0 if kind in TRAINS and not state.adding else state.samples
        row = sum(place.others(rows)) + (before if trains else 0)
        part = batches.LocalBatch(inputs, target, rows, row)
        evenly = whole or (kind == "evaluate" and not place.accumulation.fits(rows))
        count = self._count_microbatches(rows)
        made = batches.cut(place, part, 1 if whole else count, evenly)
        if trains:
            state.samples = before + sum(place.sample_layout.distinct(rows))
            if place.options.recompute.budget is not None:
                self._largest = batches.largest_microbatch(place, inputs, rows, count)
        return made

    @property
    def microbatches(self) -> int:
        """How many a step was asked for."""
        return self._counts[0]

    def _count_microbatches(self, rows: Sequence[int]) -> int:
        """As many as were asked for, but no more than the samples of the rank with most, rounded up to the ranks of a
        pipe: others would be empty, and the step a longer list for nothing."""
        width = self.place.axes.pipe.size
        self._counts = self.microbatches, min(self.microbatches, max(-(-max(rows) // width), 1) * width)
        return self._counts[1]

    def _validate(self, inputs: tuple[Any, ...], target: Any) -> None:
        """The checks that need no communication: shapes through the whole model, labels, finite inputs."""
        place, key = self.place, _shapes(inputs)
        shapes = self._fits.get(key)
        if shapes is None:
            given = [ShapeArray(place.sample_layout.whole_shape(a.shape), a.dtype) for a in inputs]
            outputs = infer(self.model, given, place.formats.compute, alone())
            if place.axes.tensor.size > 1:  # what is cut must divide
                place.shapes.of(0, batches.largest_microbatch(place, inputs, (inputs[0].shape[0],), 1))
            shapes = self._fits[key] = [place.sample_layout.part_shape(o.shape) for o in outputs]
        if target is not None:
            self.loss.validate(shapes[0] if len(shapes) == 1 else tuple(shapes), target)
        if place.options.check_finite:
            for name, array in zip(place.layout.inputs, inputs, strict=True):
                demand_finite(place, array, f"input {name!r}")

    def vocab(self, tokens: Any) -> int:
        """How many tokens the model tells apart; ConfigError unless it gives one row of logits for each of `tokens`."""
        inputs = batches.inputs_of(self.place, tokens)
        self._validate(inputs, None)
        shape, *more = self._fits[_shapes(inputs)]
        if more or len(shape) != 3 or shape[:2] != inputs[0].shape:
            got = ", ".join(map(str, [shape, *more]))
            raise ConfigError(f"generate: for tokens {inputs[0].shape} the model gives {got}, not logits of each")
        return shape[2]

    def freeze(self, patterns: Sequence[str], undo: bool) -> None:
        """Change which parameters are left alone for now. Collective: ranks compare the patterns."""
        if self.state.adding:
            raise ConfigError("freeze: gradients are being added up; call update or zero_grad first")
        self.place.pace.demand_settled(self.state.steps)
        patterns_of("freeze", patterns)
        self.begin(f"freeze({', '.join(map(repr, patterns))}{', undo=True' * undo})")
        names = frozenset[str]().union(*(self.place.layout.matching(pattern, "freeze") for pattern in patterns))
        (self.state.freezing.unfreeze if undo else self.state.freezing.freeze)(names)

    # -- programs ------------------------------------------------------------------------------------------------------

    def run(self, kind: str, feed: Feed, local: bool = False) -> dict[Slot, Any]:
        """Run a program. local: gradients stay on this rank, whatever the placement says."""
        try:
            executable = self._executable(kind, feed, local)
            self.state.ran.add(kind)
            results = self.engine.run(executable, feed)
            if kind == "predict" and self._settled is not None:
                self._executable(kind, feed, local)  # all ranks are here: the next one waits for neighbors alone
        except MemoryError as error:
            if self.short is None:
                raise
            raise self.short(error, feed) from error
        if self.state.idle and IDLE not in self._noticed:
            self._tell_idle()
        return results

    def _executable(self, kind: str, feed: Feed, local: bool) -> Executable:
        if kind in LOOKS:
            state = self.state
            key = kind, len(feed.batch), state.frozen, frozenset(state.store), frozenset(state.ran)
            found = self._executables.get(key)
            if found is None:
                found = self._executables[key] = self._prepared(self.request(kind, len(feed.batch)))
            return found
        request = self.request(kind, len(feed.batch), local)
        if kind in ("forward", "backward"):
            (batch,) = feed.batch
            request = replace(request, stage=self._stage(batch))
        return self._prepared(request)

    def _prepared(self, request: Request) -> Executable:
        # memory that ranks share is made together: what they ran before is the same, what it left may not be
        key = (request, frozenset(self.state.ran))
        if key not in self._executables:
            self._executables[key] = self.engine.prepare(request)
        return self._executables[key]

    def _tell_idle(self) -> None:
        """Say once which parameters get no gradient, on the first rank that has them."""
        names, axes = list(self.state.idle), self.place.axes
        self._noticed.add(IDLE)
        if axes.data.rank == axes.tensor.rank == 0:
            more = f" and {len(names) - 6} more" if len(names) > 6 else ""
            warn(
                f"no gradient reaches {', '.join(names[:6])}{more}: the loss does not depend on them, so they are "
                "trained with a gradient of zero: weight decay and momentum still move them, where PyTorch leaves them "
                "alone; leave their layers out, or freeze them (frozen=[...])",
            )

    def _tell_mistakes(self, x: Any) -> None:
        """Look once whether samples seem to be cut wrongly, and say so. Collective where all ranks step together."""
        self._noticed.add(CUT)
        axes = self.place.axes
        if self._meeting("step") is not axes.world:
            return
        text = self.place.sample_layout.find_mistakes(x)
        if text and axes.world.rank == 0:
            warn(text)

    def updated(self, mean: Mean, scale: GradientScale) -> None:
        """An update has ended."""
        self.state.updated(scale.skip, scale.scaler, mean.shared)
        self.engine.drop_stale_views()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run without seeing or touching gradients that are being accumulated."""
        state, adding = self.state, self.state.adding
        kept = state.set_aside()
        try:
            yield
        finally:
            state.store.update(kept)
            state.adding = adding

    def request(self, kind: str, microbatches: int, local: bool = False, fresh: bool = False) -> Request:
        """The input to compilation: the placement, and what earlier programs left. fresh: as if nothing."""
        place, pace = self.place, self.place.pace
        holding = (lambda kind: frozenset[int]()) if fresh else self.state.holding
        steps = kind in ("step", "accumulate", "local")
        kind = pace.kind(kind)
        # elastic ranks must all hear of a gradient that is not finite: an error on one of them would be its death
        normed = place.options.clip_norm is not None or self.state.scaler.dynamic or self.commit is not None
        return Request(
            kind,
            self._stage(),
            microbatches,
            keep_full=place.keep_full and not pace.own_speed,
            reduce_each=place.reduce_each and not local,
            ahead=place.sharding.ahead,
            resident=holding("full"),
            grads=holding("grad"),
            parts=holding("part"),
            weighed=not fresh and Slot("weight") in self.state.store,
            order=place.pipe.order(microbatches, place.axes.pipe.rank) if steps else None,
            recompute=self._recompute(microbatches) if steps else frozenset(),
            scales=("NORM" if normed else "SCALE", *(["COMMIT"] if self.commit is not None else [])),
            sync=pace.sync(self.state.steps + 1) if KINDS[kind].updates else Sync(),
            choices=place.choices,
        )

    def _stage(self, wanted: Microbatch | None = None) -> Stage:
        """The model as this rank of the pipe sees it, with what is frozen for now. wanted: the gradients of its inputs
        are a result, except those of whole numbers."""
        place, frozen = self.place, self.state.frozen
        inputs = () if wanted is None else wanted.inputs
        key = (frozen, frozenset(v for v, x in enumerate(inputs) if not is_index(x)))
        if key not in self._stages:
            trainable, constant = place.layout.trainable(frozen), place.layout.constant(*key)
            self._stages[key] = replace(place.stage, trainable=trainable, constant=constant)
        return self._stages[key]

    @property
    def program(self) -> Program:
        """The step, begun with nothing left over; of replicas that train by themselves, that at the end of a round."""
        return self.round[-1][0]

    @property
    def round(self) -> list[tuple[Program, int]]:
        """The step, or all different steps of a round of replicas that train by themselves, and how often each runs."""
        request = self.request("step", self.place.accumulation.microbatches(self._counts[1]), fresh=True)
        return [(compile(replace(request, sync=sync)), times) for sync, times in self.place.pace.round()]

    def _recompute(self, microbatches: int) -> frozenset[int]:
        """The same for every step with batches of one size; a budget takes a forward on shapes to find them."""
        pipe, batch, wanted = self.place.pipe, self._largest, self.place.options.recompute
        if wanted.budget is None and not wanted.every:
            return frozenset()
        key = (microbatches, None if batch is None else _shapes(batch.inputs))
        if key not in self._recomputed:
            from fsdpx.core.trainer.recompute_budget import recomputed_units

            orders = [pipe.order(microbatches, r) or one_by_one(microbatches) for r in range(pipe.width)]
            self._recomputed[key] = recomputed_units(self.place, orders, batch)
        return self._recomputed[key]

    def predict(self, x: Any, feed: Feed) -> tuple[Any, ...]:
        """The outputs for a batch, which was given as `x`."""
        outputs = self.outputs(self.run("predict", feed), feed)
        if self._settled is not None:
            self._settled.finish()
        (batch,) = feed.batch
        if batch is not None and batch.inputs[0] is x and self.place.sample_layout.is_whole:
            known = self.engine.direct
            if len(known) >= SHAPES:
                known.clear()
            known[x.shape, x.dtype] = Direct.after(self.engine, self._executable("predict", feed, False), x)
        return self.leaving(outputs, feed)

    def _predict_zeros(self, shapes: tuple[Any, ...]) -> None:
        """Take part in a prediction for the sake of the other ranks. shapes: of the inputs, and their formats."""
        zeros = tuple(self.place.xp.zeros(shape, dtype=dtype) for shape, dtype in shapes)
        with self.aside():
            self.run("predict", Feed([Microbatch(zeros, None, 0)], False, self.commit))

    def leaving(self, arrays: Sequence[Any], feed: Feed) -> tuple[Any, ...]:
        """Arrays of the model as the caller of a feed has them."""
        leave = self.place.sample_layout.leave
        return tuple([None if a is None else leave(a, feed.batched) for a in arrays])

    def direct(self, x: Any) -> tuple[Any, ...] | None:
        """The same at once, if a batch of this kind has been predicted and nothing but layers has to run."""
        known = self.engine.direct.get((x.shape, x.dtype)) if type(x) is np.ndarray else None
        return None if known is None else known(x)

    def outputs(self, results: Mapping[Slot, Any], feed: Feed) -> tuple[Any, ...]:
        """The model's outputs, whole, on every rank that works on the same samples."""
        values, axes = tuple(results.values()), self.place.axes
        if axes.tensor.size == axes.pipe.size == 1:
            return values
        (batch,) = feed.batch
        assert batch is not None
        from fsdpx.core.trainer.gather_full import whole_outputs

        return whole_outputs(self.place, values, self._fits[_shapes(batch.inputs)], batch)

    def save_trace(self) -> None:
        """Write what observers have kept for it, such as a trace. Collective."""
        for write in self.engine.hooks.write:
            write()

    def close(self) -> None:
        """Free what the engine holds. Collective."""
        self.save_trace()
        self._executables.clear()
        if self._settled is not None:
            self._settled.close()
        self.engine.close()


def _shapes(inputs: Sequence[Any]) -> tuple[Any, ...]:
    return tuple([(a.shape, a.dtype) for a in inputs])
