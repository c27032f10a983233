"""OptimizerContract: tests of what every optimiser must do, to be inherited."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.init import spawn
from fsdpx.optim import Optimizer, Segment, Segments, rate
from fsdpx.optim.optimizer import inside, update_parameters, zeros
from fsdpx.optim.segments import Exchange, Peers
from fsdpx.testing.threads import interleaved

__all__ = ["OptimizerContract"]

SIZES = {"a.weight": 2500, "a.bias": 7, "norm.weight": 1024, "b.weight": 4100, "b.bias": 1}
SHAPES = {"a.weight": (25, 100), "b.weight": (41, 10, 10)}
TOTAL = sum(SIZES.values())


class OptimizerContract:
    """Inherit, define `make`, and run it with pytest:

        class TestMine(OptimizerContract):
            grouped = False  # Mine takes no `groups`, or no `weight_decay`
            def make(self, **options): return Mine(**options)

    `make` must take `lr`, a number or a schedule from 1-based step to number; with `grouped`, which is the default, it
    must take `weight_decay` and `groups` as well. Each shard is updated in a
    thread of its own, so that optimisers can add norms of full parameters."""

    grain: int = 1
    """1 if shards may be cut anywhere without a change of bits, 1024 if only at multiples of it in each parameter."""
    grouped: bool = True
    """`make` takes `groups` with "lr_scale" and "weight_decay", and `weight_decay` itself."""

    def make(self, **options: Any) -> Optimizer:
        """A new optimiser to be tested; options has at least `lr`."""
        raise AssertionError("inherit OptimizerContract and define make(self, **options)")

    def test_names_its_slots(self) -> None:
        slots = self.make(lr=0.01).slots
        assert isinstance(slots, tuple)
        assert all(isinstance(name, str) for name in slots)
        assert len(set(slots)) == len(slots)

    def test_shards_give_the_bits_of_the_whole(self) -> None:
        for dtype in ("float64", "float32"):
            whole = self._train(dtype, [])
            for cuts in ([1024], [2048, 2500, 2507], [0, 2507 + 1024 + 2048, TOTAL - 1, TOTAL]):
                self._same(whole, self._train(dtype, cuts))
            if self.grain == 1:
                self._same(whole, self._train(dtype, [1, 1, 3, 2499, 4097, TOTAL - 2]))

    def test_works_in_place_and_leaves_the_gradient_alone(self) -> None:
        p, g, slots = self._state("float32", slice(None))
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
        p, g, slots = self._state("float64", slice(None))
        q, h, others = self._state("float64", slice(None))
        h *= 8.0
        for step in (1, 2):
            self._update(p, g, slots, step=step)
            self._update(q, h, others, step=step, scale=0.125)
        self._same({"p": p, **slots}, {"p": q, **others})

    def test_the_schedule_is_the_rate(self) -> None:
        scheduled = self.make(lr=lambda step: 0.5 / step)
        assert [rate(scheduled, step) for step in (1, 2, 4)] == [0.5, 0.25, 0.125]
        p, g, slots = self._state("float64", slice(None))
        q, _, others = self._state("float64", slice(None))
        self._update(p, g, slots, optimizer=scheduled, lr=rate(scheduled, 50))
        self._update(q, g, others, lr=0.01)
        self._same({"p": p, **slots}, {"p": q, **others})

    def test_a_rate_of_zero_changes_no_parameter(self) -> None:
        p, g, slots = self._state("float64", slice(None))
        before = p.copy()
        self._update(p, g, slots, lr=0.0)
        assert np.array_equal(p, before)

    def test_ranks_that_are_threads_may_share_it(self) -> None:
        """The state of an optimiser is the same whichever thread asks for it first."""

        def train(optimizer: Optimizer) -> dict[str, Any]:
            p, g, slots = self._state("float32", slice(None), optimizer)
            for step in (1, 2, 3):
                self._update(p, g, slots, optimizer=optimizer, lr=rate(optimizer, step), step=step)
            return {"p": p, **slots}

        def make() -> Optimizer:
            return self.make(lr=lambda step: 0.01 / step)

        whole, shared = train(make()), make()
        for found in interleaved(*[lambda: train(shared)] * 2):
            self._same(whole, found)

    def test_an_empty_shard_is_fine(self) -> None:
        optimizer = self.make(lr=0.01)
        p, g = np.empty(0), np.empty(0)
        slots = zeros(np, optimizer, Segments(()), p.dtype)
        optimizer.update(np, p, g, slots, lr=0.01, step=1, segments=Segments(()))
        assert p.size == 0

    def test_each_parameter_has_a_count_of_its_own(self) -> None:
        """One that has missed two updates is updated for the first time where the others have their third update."""
        late, optimizer = ("a.bias", "b.weight"), inside(self.make(lr=0.01))  # averages go by the trainer's step
        p, g, slots = self._state("float64", slice(None), optimizer)
        alone = {n: self._state("float64", at, optimizer) for n, at in _places().items()}
        for step in (1, 2, 3):
            before = [(a, a.copy()) for a in (p, *slots.values())]
            segments = _segments(0, TOTAL).count_missed(dict.fromkeys(late, 2 if step == 3 else 0))
            update_parameters(optimizer, np, p, g, slots, lr=0.01, step=step, segments=segments)
            for name, at in _places().items():
                if name in late and step < 3:  # frozen
                    for a, old in before:
                        a[at] = old[at]
                    continue
                q, h, others = alone[name]
                count = 1 if name in late else step
                optimizer.update(np, q, h, others, lr=0.01, step=count, segments=_segments(at.start, at.stop))
                self._same({"p": p[at], **{n: a[at] for n, a in slots.items()}}, {"p": q, **others})

    def test_groups_go_by_name(self) -> None:
        if not self.grouped:
            return
        groups = {"a.*": {"lr_scale": 0.0}, "*bias": {"lr_scale": 100.0}, "norm*": {"weight_decay": 0.0}}
        grouped = self.make(lr=0.01, weight_decay=0.5, groups=groups)
        parts = {  # weight decay and learning rate
            "a.weight": (0.5, 0.0), "a.bias": (0.5, 0.0), "norm.weight": (0.0, 0.01), "b.weight": (0.5, 0.01),
            "b.bias": (0.5, 1.0),
        }  # fmt: skip
        p, g, slots = self._state("float64", slice(None), grouped)
        self._update(p, g, slots, optimizer=grouped)
        for name, at in _places().items():
            decay, lr = parts[name]
            optimizer = self.make(lr=0.01, weight_decay=decay)
            q, h, others = self._state("float64", at, optimizer)
            optimizer.update(np, q, h, others, lr=lr, step=1, segments=_segments(at.start, at.stop))
            assert np.array_equal(p[at], q), name

    def _state(self, dtype: str, at: slice, optimizer: Optimizer | None = None) -> tuple[Any, Any, dict[str, Any]]:
        """The part `at` of fixed parameters and gradients, with empty slots."""
        random = np.random.default_rng(5)
        p, g = (random.standard_normal(TOTAL).astype(dtype)[at].copy() for _ in range(2))
        low, high, _ = at.indices(TOTAL)
        return p, g, zeros(np, optimizer or self.make(lr=0.01), _segments(low, high), p.dtype)

    def _update(self, p: Any, g: Any, slots: dict[str, Any], optimizer: Optimizer | None = None, **other: Any) -> None:
        """Update the whole array; lr 0.01 and step 1 unless others are given."""
        options = {"lr": 0.01, "step": 1, "segments": _segments(0, TOTAL), **other}
        (optimizer or self.make(lr=0.01)).update(np, p, g, slots, **options)

    def _train(self, dtype: str, cuts: Sequence[int]) -> dict[str, Any]:
        """Three steps on the shards between `cuts`, each shard on a thread of its own."""
        bounds = [0, *cuts, TOTAL]
        optimizer = self.make(lr=0.01)

        def train(comm: Communicator) -> dict[str, Any]:
            low, high = bounds[comm.rank : comm.rank + 2]
            p, g, slots = self._state(dtype, slice(low, high))
            segments = _segments(low, high, _exchange(comm), _peers(comm, bounds))
            for step in (1, 2, 3):
                optimizer.update(np, p, g, slots, lr=0.01, step=step, segments=segments, scale=0.7 / step)
            return {"p": p, **slots}

        shards = spawn(train, len(bounds) - 1, timeout=30)
        return {name: np.concatenate([shard[name] for shard in shards]) for name in shards[0]}

    def _same(self, a: dict[str, Any], b: dict[str, Any]) -> None:
        for name in a:
            assert np.array_equal(a[name], b[name]), name


def _places() -> dict[str, slice]:
    places, at = {}, 0
    for name, size in SIZES.items():
        places[name] = slice(at, at + size)
        at += size
    return places


def _segments(low: int, high: int, exchange: Exchange | None = None, peers: Peers | None = None) -> Segments:
    """The segments of a shard [low, high) of all parameters."""
    items = []
    for name, place in _places().items():
        start, stop = max(low, place.start), min(high, place.stop)
        if start < stop:
            items.append(Segment(name, start - low, stop - low, start - place.start, SIZES[name], SHAPES.get(name, ())))
    return Segments(tuple(items), exchange, peers)


def _exchange(comm: Communicator) -> Exchange:
    def tell(mine: Mapping[str, Sequence[float]], width: int) -> dict[str, list[Sequence[float]]]:
        assert all(len(row) == width for row in mine.values())
        rows = comm.all_gather_object(mine)
        return {name: [row[name] for row in rows if name in row] for name in SIZES}

    return tell


def _peers(comm: Communicator, bounds: Sequence[int]) -> Peers | None:
    rank = comm.rank

    def all_to_all(send: Any, recv: Any, outgoing: Sequence[int], incoming: Sequence[int]) -> None:
        rows = comm.all_gather_object((send, outgoing))
        pieces = [sent[sum(counts[:rank]) : sum(counts[: rank + 1])] for sent, counts in rows]
        assert [piece.size for piece in pieces] == list(incoming)
        recv[...] = np.concatenate(pieces)

    held = [_segments(low, high).items for low, high in pairwise(bounds)]
    return Peers(lambda: held, rank, all_to_all) if comm.size > 1 else None
