"""`OptimizerContract`, a base class with tests that every optimizer must pass."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.init import spawn
from fsdpx.optim import Optimizer, ShardSegment, ShardSegments, get_learning_rate
from fsdpx.optim.optimizer import make_zero_slots, unwrap_optimizer, update_parameters
from fsdpx.optim.segments import Exchange, ShardPeers
from fsdpx.testing.threads import run_interleaved

__all__ = ["OptimizerContract"]

PARAMETER_SIZES = {"a.weight": 2500, "a.bias": 7, "norm.weight": 1024, "b.weight": 4100, "b.bias": 1}
PARAMETER_SHAPES = {"a.weight": (25, 100), "b.weight": (41, 10, 10)}
TOTAL_SIZE = sum(PARAMETER_SIZES.values())


class OptimizerContract:
    """Tests for an optimizer. Inherit from this class, define `make`, and run the tests with pytest:

        class TestMine(OptimizerContract):
            takes_groups = False  # Mine takes no `groups`, or no `weight_decay`
            def make(self, **options): return Mine(**options)

    `make` must take the option `lr`, a number or a function that maps the step (counted from 1) to a number. If
    `takes_groups` is True (the default), `make` must also take the options `weight_decay` and `groups`. Each shard is
    updated in its own thread, so that an optimizer can exchange numbers between shards, for example to compute the norm
    of a full parameter."""

    shard_alignment: int = 1
    """Alignment of shards that makes results independent of the sharding. Use 1 if results never depend on where shards
    begin. Use 1024 if results are the same only for shards that begin at a multiple of 1024 elements in a parameter."""
    takes_groups: bool = True
    """Whether `make` accepts the options `weight_decay` and `groups`, where a group may set "lr_scale" and
    "weight_decay"."""

    def make(self, **options: Any) -> Optimizer:
        """Return a new optimizer to test. Must be overridden.

        Parameters
        ----------
        options : keyword arguments of the optimizer: always `lr`; if `takes_groups` is True, some tests also pass
            `weight_decay` and `groups`
        """
        raise AssertionError("inherit OptimizerContract and define make(self, **options)")

    def test_names_its_slots(self) -> None:
        slots = self.make(lr=0.01).slots
        assert isinstance(slots, tuple)
        assert all(isinstance(name, str) for name in slots)
        assert len(set(slots)) == len(slots)

    def test_sharded_update_equals_unsharded(self) -> None:
        for dtype in ("float64", "float32"):
            whole = self._train_shards(dtype, [])
            for cuts in ([1024], [2048, 2500, 2507], [0, 2507 + 1024 + 2048, TOTAL_SIZE - 1, TOTAL_SIZE]):
                self._assert_same_arrays(whole, self._train_shards(dtype, cuts))
            if self.shard_alignment == 1:
                self._assert_same_arrays(whole, self._train_shards(dtype, [1, 1, 3, 2499, 4097, TOTAL_SIZE - 2]))

    def test_update_is_in_place_and_keeps_gradient(self) -> None:
        p, g, slots = self._make_parameters_gradients_and_slots("float32", slice(None))
        before = {"p": p.copy(), "g": g.copy()}
        padded = np.pad(p, 8, constant_values=7.0)
        view = padded[8:-8]
        self._update(view, g, slots)
        assert not np.array_equal(view, before["p"])
        assert np.array_equal(g, before["g"])
        assert (padded[:8] == 7.0).all()
        assert (padded[-8:] == 7.0).all()
        assert view.dtype == p.dtype

    def test_scale_multiplies_the_gradient(self) -> None:
        p, g, slots = self._make_parameters_gradients_and_slots("float64", slice(None))
        q, h, others = self._make_parameters_gradients_and_slots("float64", slice(None))
        h *= 8.0
        for step in (1, 2):
            self._update(p, g, slots, step=step)
            self._update(q, h, others, step=step, scale=0.125)
        self._assert_same_arrays({"p": p, **slots}, {"p": q, **others})

    def test_lr_function_gives_learning_rate(self) -> None:
        scheduled = self.make(lr=lambda step: 0.5 / step)
        assert [get_learning_rate(scheduled, step) for step in (1, 2, 4)] == [0.5, 0.25, 0.125]
        p, g, slots = self._make_parameters_gradients_and_slots("float64", slice(None))
        q, _, others = self._make_parameters_gradients_and_slots("float64", slice(None))
        self._update(p, g, slots, optimizer=scheduled, lr=get_learning_rate(scheduled, 50))
        self._update(q, g, others, lr=0.01)
        self._assert_same_arrays({"p": p, **slots}, {"p": q, **others})

    def test_zero_learning_rate_changes_no_parameter(self) -> None:
        p, g, slots = self._make_parameters_gradients_and_slots("float64", slice(None))
        before = p.copy()
        self._update(p, g, slots, lr=0.0)
        assert np.array_equal(p, before)

    def test_thread_ranks_may_share_one_instance(self) -> None:
        """Check that two threads can share one optimizer: each thread must get the same bits as with its own
        optimizer."""

        def train(optimizer: Optimizer) -> dict[str, Any]:
            p, g, slots = self._make_parameters_gradients_and_slots("float32", slice(None), optimizer)
            for step in (1, 2, 3):
                self._update(p, g, slots, optimizer=optimizer, lr=get_learning_rate(optimizer, step), step=step)
            return {"p": p, **slots}

        def make() -> Optimizer:
            return self.make(lr=lambda step: 0.01 / step)

        whole, shared = train(make()), make()
        for found in run_interleaved(*[lambda: train(shared)] * 2):
            self._assert_same_arrays(whole, found)

    def test_empty_shard_can_be_updated(self) -> None:
        optimizer = self.make(lr=0.01)
        p, g = np.empty(0), np.empty(0)
        slots = make_zero_slots(np, optimizer, ShardSegments(()), p.dtype)
        optimizer.update(np, p, g, slots, lr=0.01, step=1, segments=ShardSegments(()))
        assert p.size == 0

    def test_each_parameter_counts_its_own_updates(self) -> None:
        """Freeze some parameters for two steps. Check that step 3 counts as the first update of these parameters, and
        as the third update of all other parameters."""
        # test the inner optimizer, because `AveragedOptimizer` counts the trainer's steps, not the updates of each
        # parameter
        late, optimizer = ("a.bias", "b.weight"), unwrap_optimizer(self.make(lr=0.01))
        p, g, slots = self._make_parameters_gradients_and_slots("float64", slice(None), optimizer)
        alone = {
            n: self._make_parameters_gradients_and_slots("float64", at, optimizer)
            for n, at in _compute_parameter_ranges().items()
        }
        for step in (1, 2, 3):
            before = [(a, a.copy()) for a in (p, *slots.values())]
            segments = _make_segments(0, TOTAL_SIZE).with_missed_update_counts(
                dict.fromkeys(late, 2 if step == 3 else 0)
            )
            update_parameters(optimizer, np, p, g, slots, lr=0.01, step=step, segments=segments)
            for name, at in _compute_parameter_ranges().items():
                if name in late and step < 3:  # undo the update, since frozen parameters must not change
                    for a, old in before:
                        a[at] = old[at]
                    continue
                q, h, others = alone[name]
                count = 1 if name in late else step
                optimizer.update(np, q, h, others, lr=0.01, step=count, segments=_make_segments(at.start, at.stop))
                self._assert_same_arrays({"p": p[at], **{n: a[at] for n, a in slots.items()}}, {"p": q, **others})

    def test_groups_go_by_name(self) -> None:
        if not self.takes_groups:
            return
        groups = {"a.*": {"lr_scale": 0.0}, "*bias": {"lr_scale": 100.0}, "norm*": {"weight_decay": 0.0}}
        optimizer = self.make(lr=0.01, weight_decay=0.5, groups=groups)
        parts = {  # expected (weight decay, learning rate) by parameter name
            "a.weight": (0.5, 0.0), "a.bias": (0.5, 0.0), "norm.weight": (0.0, 0.01), "b.weight": (0.5, 0.01),
            "b.bias": (0.5, 1.0),
        }  # fmt: skip
        p, g, slots = self._make_parameters_gradients_and_slots("float64", slice(None), optimizer)
        self._update(p, g, slots, optimizer=optimizer)
        for name, at in _compute_parameter_ranges().items():
            decay, lr = parts[name]
            optimizer = self.make(lr=0.01, weight_decay=decay)
            q, h, others = self._make_parameters_gradients_and_slots("float64", at, optimizer)
            optimizer.update(np, q, h, others, lr=lr, step=1, segments=_make_segments(at.start, at.stop))
            assert np.array_equal(p[at], q), name

    def _make_parameters_gradients_and_slots(
        self, dtype: str, part: slice, optimizer: Optimizer | None = None
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Return the slice `part` of the test parameters, the same slice of the test gradients, and zeroed state arrays
        of equal size. Test parameters and gradients are the same in every run."""
        random = np.random.default_rng(5)
        p, g = (random.standard_normal(TOTAL_SIZE).astype(dtype)[part].copy() for _ in range(2))
        low, high, _ = part.indices(TOTAL_SIZE)
        return p, g, make_zero_slots(np, optimizer or self.make(lr=0.01), _make_segments(low, high), p.dtype)

    def _update(self, p: Any, g: Any, slots: dict[str, Any], optimizer: Optimizer | None = None, **other: Any) -> None:
        """Update all parameters in place. Options that are not passed have defaults, such as lr=0.01 and step=1."""
        options = {"lr": 0.01, "step": 1, "segments": _make_segments(0, TOTAL_SIZE), **other}
        (optimizer or self.make(lr=0.01)).update(np, p, g, slots, **options)

    def _train_shards(self, dtype: str, cuts: Sequence[int]) -> dict[str, Any]:
        """Split the parameters into shards at the element indices `cuts`, and perform three steps on each shard, in a
        separate thread. Return the full parameters and state arrays."""
        bounds = [0, *cuts, TOTAL_SIZE]
        optimizer = self.make(lr=0.01)

        def train(comm: Communicator) -> dict[str, Any]:
            low, high = bounds[comm.rank : comm.rank + 2]
            p, g, slots = self._make_parameters_gradients_and_slots(dtype, slice(low, high))
            segments = _make_segments(low, high, _make_all_gather_rows_function(comm), _make_shard_peers(comm, bounds))
            for step in (1, 2, 3):
                optimizer.update(np, p, g, slots, lr=0.01, step=step, segments=segments, scale=0.7 / step)
            return {"p": p, **slots}

        shards = spawn(train, len(bounds) - 1, timeout=30)
        return {name: np.concatenate([shard[name] for shard in shards]) for name in shards[0]}

    def _assert_same_arrays(self, a: dict[str, Any], b: dict[str, Any]) -> None:
        for name in a:
            assert np.array_equal(a[name], b[name]), name


def _compute_parameter_ranges() -> dict[str, slice]:
    places, at = {}, 0
    for name, size in PARAMETER_SIZES.items():
        places[name] = slice(at, at + size)
        at += size
    return places


def _make_segments(
    low: int, high: int, exchange: Exchange | None = None, peers: ShardPeers | None = None
) -> ShardSegments:
    """Return the segments (parameters, or parts of them) in the shard [low, high) of the concatenated test
    parameters."""
    items = []
    for name, place in _compute_parameter_ranges().items():
        start, stop = max(low, place.start), min(high, place.stop)
        if start < stop:
            items.append(
                ShardSegment(
                    name,
                    start - low,
                    stop - low,
                    start - place.start,
                    PARAMETER_SIZES[name],
                    PARAMETER_SHAPES.get(name, ()),
                )
            )
    return ShardSegments(tuple(items), exchange, peers)


def _make_all_gather_rows_function(comm: Communicator) -> Exchange:
    def exchange_rows(mine: Mapping[str, Sequence[float]], width: int) -> dict[str, list[Sequence[float]]]:
        assert all(len(row) == width for row in mine.values())
        rows = comm.all_gather_object(mine)
        return {name: [row[name] for row in rows if name in row] for name in PARAMETER_SIZES}

    return exchange_rows


def _make_shard_peers(comm: Communicator, bounds: Sequence[int]) -> ShardPeers | None:
    rank = comm.rank

    def all_to_all(send: Any, recv: Any, outgoing: Sequence[int], incoming: Sequence[int]) -> None:
        rows = comm.all_gather_object((send, outgoing))
        pieces = [sent[sum(counts[:rank]) : sum(counts[: rank + 1])] for sent, counts in rows]
        assert [piece.size for piece in pieces] == list(incoming)
        recv[...] = np.concatenate(pieces)

    held = [_make_segments(low, high).items for low, high in pairwise(bounds)]
    return ShardPeers(lambda: held, rank, all_to_all) if comm.size > 1 else None
