"""Which rows a rank's ledger has: the one place that says what is held, in which format, for how long and by whom."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import numpy as np

from fsdpx.codecs import Codec, Recut, Route
from fsdpx.comm.mesh import Axes
from fsdpx.errors import ConfigError
from fsdpx.layout.ranges import Range
from fsdpx.layout.shards import ShardedPage
from fsdpx.nn.layer import Spec
from fsdpx.optim.average import AVERAGE
from fsdpx.optim.kept import Kept
from fsdpx.program import Rounds
from fsdpx.state.ledger import KINDS, Key, LedgerRow, Level, Lifetime
from fsdpx.state.placement import Placement

__all__ = [
    "local_gradient", "memories", "recut_of", "rows_of", "saved_format", "saved_name", "saved_tensors", "tensor_name",
]  # fmt: skip


def rows_of(placement: Placement, windows: bool, sharers: int) -> Iterator[LedgerRow]:
    """All rows of this rank. windows: ranks of a machine share memory. sharers: how many ranks have their full
    parameters in common there, 0 if none do."""
    formats = placement.formats
    for page in placement.pages.values():
        yield from _parameters(placement, page, sharers)
        if page.page.trainable:
            yield from _gradients(placement, page, windows)
            for name in placement.optimizer.slots:
                kind = "average" if name == AVERAGE else "slot"
                p, level = page.page.index, _level(placement, "optimizer")
                span = placement.slot_span(name, p)
                yield LedgerRow(Key(kind, p, name), placement.slot_format(name), span, placement.owner, level=level)
            if placement.rounds is not None:
                yield from _outer(placement, placement.rounds, page)
            yield from _memory(placement, page)
    for name, spec in placement.layout.state.items():
        yield LedgerRow(Key("statistic", None, name), formats.statistics, Range(0, spec.size), "all")


def _level(placement: Placement, what: str) -> Level:
    return "disk" if placement.offloads(what) else "device"


def _parameters(placement: Placement, page: ShardedPage, sharers: int) -> Iterator[LedgerRow]:
    """The shard is a part of the full parameters where these are kept in the same format."""
    p = page.page.index
    dtype, gathered = placement.formats.master, placement.formats.compute
    kept = placement.keep_full or sharers > 0
    full = LedgerRow(
        Key("full", p),
        gathered,
        Range(0, page.size),
        "all",
        "step" if kept else "use",
        sharers=max(sharers, 1),
    )
    yield full
    as_stored = placement.formats.wire is None and gathered == dtype
    inside = full.key if kept and placement.apart is None and as_stored else None
    owner, level = placement.owner if page.page.trainable else "shard", _level(placement, "parameters")
    at = page.mine.start if inside else 0
    yield LedgerRow(Key("master", p), dtype, page.mine, owner, level=level, inside=inside, at=at)


def _outer(placement: Placement, rounds: Rounds, page: ShardedPage) -> Iterator[LedgerRow]:
    """Of replicas that train by themselves. An outer gradient lies where the part of a gradient did, unless it is under
    way for longer than a step."""
    p, dtype, replicas = page.page.index, placement.formats.gradients, placement.axes.replica.size
    part, codec = placement.replica_part(p), placement.route(p).replica
    yield LedgerRow(Key("outer", p), dtype, page.mine)
    for name in placement.outer.slots:
        yield LedgerRow(Key("velocity", p, name), dtype, part, "data")
    inside = Key("part", p) if rounds.half == 0 else None
    yield (delta := LedgerRow(Key("delta", p), dtype, page.mine, "private", "step", inside=inside))
    if inside is None:
        yield LedgerRow(Key("sum", p), dtype, part, "data", inside=delta.key)
        if replicas > 1 and (nbytes := codec.scratch(page.mine.size, replicas)):
            yield LedgerRow(Key("parcel", p), np.dtype(np.uint8), Range(0, nbytes), "private", "step")


def _gradients(placement: Placement, page: ShardedPage, windows: bool) -> Iterator[LedgerRow]:
    """The reduced part lies in the full gradient where that is kept: at its own place in windows, which other ranks may
    be reading elsewhere, else in front."""
    p, dtype, kept = page.page.index, placement.formats.gradients, placement.keep_grads
    lifetime: Lifetime = "step" if kept else "use"
    level: Level = "map" if placement.offloads("gradients") else "device"
    times = placement.accumulation.times
    full = LedgerRow(
        Key("grad", p), dtype, Range(0, page.size), "private", lifetime, level if kept else "device", times
    )
    yield full
    inside, at = (full.key, page.mine.start * windows) if kept else (None, 0)
    alone = inside is None and level == "device" and placement.rounds is None
    yield LedgerRow(
        Key("part", p), dtype, page.mine, lifetime="pass" if alone else "step", level=level, inside=inside, at=at
    )


def _memory(placement: Placement, page: ShardedPage) -> Iterator[LedgerRow]:
    """What codecs keep, "axis/name"; of a chunk, "chunk5/name"."""
    p, mine, apart = page.page.index, page.mine, placement.accumulation.apart
    for axis, name, elements, recut in memories(placement.route(p), placement.axes, page.size, mine.size, apart):
        span = mine if axis == "replica" else Range(0, page.size)
        key = Key("trace" if recut == "reset" else "memory", p, f"{axis}/{name}")
        held = span if recut == "sum" else Range(0, elements)
        if held.size != elements:
            raise ConfigError(
                f"codec memory {name!r} has {elements} elements for a gradient of {span.size}: its recut is 'sum', so "
                "there must be as many"
            )
        yield LedgerRow(key, placement.formats.gradients, held, "private")


def memories(
    route: Route, axes: Axes, size: int, own: int, apart: range | None
) -> Iterator[tuple[str, str, int, Recut]]:
    """Axis, name, elements and recut of all that codecs keep of a gradient of `size` elements, `own` of them in this
    rank's shard. A rank alone keeps what comes from others or goes to them one day. apart: chunks of this rank, of each
    of which they keep all but what is the same for all of them."""
    for axis in axes.summing:
        codec: Codec = getattr(route, axis)
        for name, elements in codec.memory(size if axis == "shard" else own).items():
            recut = _recut(codec, name)
            if apart is not None and recut != "same":
                yield from ((f"chunk{c}", name, elements, recut) for c in apart)
            elif recut != "reset" or axes.data.size > 1:
                yield axis, name, elements, recut


def recut_of(placement: Placement, key: Key) -> str:
    """How a codec's memory reaches other ranks."""
    assert key.page is not None
    axis, _, name = key.name.partition("/")
    route = placement.route(key.page)
    codec = route.replica if axis == "replica" else route.shard
    return _recut(codec, name)


def _recut(codec: Codec, name: str) -> Recut:
    found = codec.recut.get(name, "reset")
    if found not in get_args(Recut):
        raise ConfigError(f"{type(codec).__name__}: recut of {name!r} is {found!r}: choose 'sum', 'same' or 'reset'")
    return found


def local_gradient(placement: Placement, page: int) -> LedgerRow:
    """A whole gradient that is kept on this rank until the update, where gradients live for a use otherwise."""
    span, times = Range(0, placement.pages[page].size), placement.accumulation.times
    return LedgerRow(Key("grad", page, "local"), placement.formats.gradients, span, "private", "step", times=times)


def tensor_name(row: str, parameter: str) -> str:
    """The name of a tensor of the train state: "m/0.weight" of slot m, "0.weight" of the parameter itself."""
    return f"{row}/{parameter}" if row else parameter


def saved_name(row: LedgerRow, replica: int) -> str:
    """The first half of such a name: "m", or "replica1/m" of what each replica has of its own."""
    name = KINDS[row.key.kind].prefix + row.key.name
    return _of_replica(name, replica) if row.owner == "replica" else name


def _of_replica(name: str, replica: int) -> str:
    return f"replica{replica}/{name}" if name else f"replica{replica}"


def saved_tensors(placement: Placement, replicas: int | None = None) -> dict[str, Spec]:
    """Every tensor of the train state of the whole model, the same on every rank: parameters and running statistics,
    then what the optimiser keeps of each trained parameter. replicas: how many of them have a state of their own, where
    they train by themselves; None: those of the mesh."""
    specs = placement.layout.specs
    trained = {name: spec for name, spec in specs.items() if spec.trainable}
    found = {
        tensor_name(slot, name): spec if form.plain else Spec(form.of(name, spec.shape))
        for slot, form in _slots(placement, replicas).items()
        for name, spec in trained.items()
    }
    return specs | {name: spec for name, spec in found.items() if spec.size}


def _slots(placement: Placement, replicas: int | None) -> dict[str, Kept]:
    """What is kept of each trained parameter, by the first half of its name."""
    if (rounds := placement.rounds) is None:
        return placement.kept
    width = placement.axes.replica.size if replicas is None else replicas
    found = {_of_replica(slot, r): form for r in range(width) for slot, form in {"": Kept(), **placement.kept}.items()}
    found |= {KINDS["velocity"].prefix + name: Kept() for name in placement.outer.slots}
    return found | ({KINDS["sum"].prefix: Kept()} if rounds.half else {})


def saved_format(placement: Placement, name: str) -> np.dtype:
    """The format in which ranks hold a tensor of the train state."""
    formats, (slot, _, rest) = placement.formats, name.partition("/")
    if rest and name not in placement.layout.specs:
        if placement.rounds is not None and slot not in placement.kept:
            slot = rest.partition("/")[0] if slot.startswith("replica") else slot
        return placement.slot_format(slot) if slot in placement.kept else formats.master
    return formats.statistics if name in placement.layout.state else formats.master
