"""search: which strategy, mesh, microbatches, schedule, recomputing and precision to ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, prod
from os import PathLike
from typing import Any

from fsdpx import nn
from fsdpx.core.base.config import PRESETS_BY_MEMORY, byte_count
from fsdpx.core.base.messages import bytes_text
from fsdpx.core.comm.mesh import Mesh
from fsdpx.core.compression import Codecs, codec
from fsdpx.core.program import SCHEDULES
from fsdpx.core.trainer.recipe import Recipe, Training, native
from fsdpx.errors import ConfigError, FsdpxError
from fsdpx.ext.offload.choice import Offload
from fsdpx.nn.linearize import keeping, once, sort
from fsdpx.plan.lower_bound import least_seconds
from fsdpx.plan.machine import Machine
from fsdpx.plan.max_depth import deeper, depth, parameters
from fsdpx.plan.peak import options_text
from fsdpx.plan.prediction import Prediction, predict_step, seldom
from fsdpx.plan.result import SHOWN, Candidate, Plan, divides
from fsdpx.plan.world_step import Batch, WorldStep, batch_of, demand_words, dims_of, step_of, whole

__all__ = ["search"]

MOST = 400
"""Configurations that are predicted."""
FINE = 3
"""Configurations, the quickest, of which other `group_bytes` and codecs are tried."""
GROUPS = 256 << 10, 4 << 20
"""Beside 1 MiB, bytes of a unit."""
OFFLOADED = ("optimizer",), ("optimizer", "parameters"), ("optimizer", "parameters", "activations")
LOOKS, DEEP = 6, 16
"""Depths of a model that are looked at, and how many times as deep it is made at most."""
FRUGAL = 4
"""Configurations with least memory, of which beside the quickest the largest batch, field and model are sought."""
DISK = "/local/disk"
"""Stands for the folder of what is offloaded."""
ANY = "any"
"""For `space`: all grids."""
GRIDS = 4
"""Grids of so many ranks that are tried, those with the smallest faces."""
CLOSE = 1.3
"""Whatever takes at most so many times as long as the quickest is predicted."""
RECOMPUTE = None, "all"
NOT_SEARCHED = "sequence='ulysses' and 'ring', stages=, orders of the mesh, and recomputing of some units"
"""What plans leave to the user."""
PIPES = tuple(name for name, known in SCHEDULES.items() if known.steady is not None)
"""Schedules of pipes; without one the first means nothing."""


def search(
    model: nn.Layer,
    *,
    batch: tuple[Any, ...],
    ranks: int | None = None,
    hosts: int | None = None,
    machine: str | PathLike[str] | Machine,
    memory: int | str | None = None,
    codecs: Sequence[Any] = (),
    most: int = MOST,
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> Plan:
    """The quickest configurations that fit, by `predict`.

    First each strategy on each mesh, with the microbatches and recomputing that fit; where nothing does, those that
    need least with state on disk. Then all microbatches, schedules and recomputing of each, and of the first three
    other `group_bytes` and codecs. What its layers alone make slower than 1.3 times the quickest is not predicted.

    Parameters
    ----------
    model : the model
    batch : ((shape, dtype), (shape, dtype)) of inputs and targets of the whole global batch, see `predict`
    ranks, hosts : one of them: how many ranks, or how many hosts full of them
    machine : a name in `Machine.names()`, the path of a machine.toml, or a `Machine`
    memory : bytes that a rank may take, "16GiB"; by default what the machine says
    codecs : those that may be tried beside the plain one, which lose bits of gradients: `("bf16", "int8")`
    most : configurations that are predicted at most
    say : called with a line now and then
    options : those of `predict`, which are not searched then: `precision="bf16"`, `mesh=...`; `space="any"` tries the
        grids over which a field of the batch can be cut

    Raises
    ------
    ConfigError : nothing fits, with the least that would; no mesh for these ranks; a layer that dry runs do not know
    """
    where = Machine.load(machine)
    demand_words(options)
    if (ranks is None) == (hosts is None):
        raise ConfigError(f"ranks={ranks}, hosts={hosts}: say one of them")
    if ranks is None and where.host == inf:
        raise ConfigError(f"hosts={hosts}: machine {where.name!r} does not say how many ranks a host has; say ranks=")
    size = whole("hosts", hosts) * int(where.host) if ranks is None else whole("ranks", ranks)
    limit = where.compute.capacity if memory is None else byte_count(memory, "memory")
    space, shapes = options.pop("space", None), batch_of(batch)
    most, codecs = whole("most", most), (codecs,) if isinstance(codecs, str) else codecs
    if space == ANY and len(shapes[0][0]) < 3:
        raise ConfigError(f"space={space!r}: inputs of shape {shapes[0][0]} are no fields: samples, channels and cells")
    if space != ANY:
        dims_of(space)
    if not isinstance(codecs, Sequence):
        raise ConfigError(f"codecs={codecs!r}: a list of codecs is needed, such as ('bf16', 'int8')")
    Recipe(Training(model)).changed({"mesh": options.get("mesh")})  # checks it
    (options.get("mesh") or Mesh()).filled(options.get("strategy", "fsdp"), size)  # checks that ranks fill it
    for choice in (options.get("codec"), *codecs):
        Codecs.of(choice, partial(codec, reduce="float32", compute="float32"))  # checks it
    model, options["loss"] = native(model, options.get("loss"))
    question = shapes, size, where, None if limit is None else int(limit), most, options, space, tuple(codecs)
    return _Search(model, *question, say).found_plan()


@dataclass
class _Search:
    model: nn.Layer
    batch: Batch
    ranks: int
    machine: Machine
    limit: int | None
    most: int
    fixed: dict[str, Any]
    space: Any
    codecs: tuple[Any, ...]
    say: Callable[[str], None] | None
    found: list[Candidate] = field(default_factory=list)
    large: list[Candidate] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    slow: dict[str, float] = field(default_factory=dict)
    seen: dict[str, bool] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        return int(self.batch[0][0][0])

    @property
    def predicted(self) -> int:
        return sum(self.seen.values())

    def found_plan(self) -> Plan:
        """Search, and say what was found."""
        with keeping(), seldom():
            self.run()
            return self.plan()

    def run(self) -> None:
        """Fill `found` and `refused`."""
        formats = self._choices("precision", "bf16" if self.machine.compute.gpu else None)
        placed = [
            {"strategy": strategy, "mesh": mesh, "space": space, "precision": precision}
            for strategy, mesh, space in self._placements()
            for precision in formats
        ]
        recomputes = self._choices("recompute", *RECOMPUTE)
        placed = [one for one in placed if any(self._may_fit(one | {"recompute": choice}) for choice in recomputes)]
        if not self.found and "offload" not in self.fixed:
            self._offload()
        for options in sorted((other for chosen in placed for other in self._others(chosen)), key=self._at_least):
            self.attempt(options, all_kinds=True)
        spread = [one for one in sorted(self.found, key=_seconds) if one.prediction.mesh.width("data") > 1]
        for one in spread[:FINE]:
            self._fine(one)

    def _others(self, chosen: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """All of a placement: recomputing, microbatches and schedules."""
        pipe, rows = self._pipe_rows(chosen)
        for recompute in self._choices("recompute", *RECOMPUTE):
            for microbatches in self._choices("microbatches", *_doubled(min(pipe, rows), rows)):
                for schedule in self._choices("schedule", *PIPES[: None if pipe > 1 else 1]):
                    more = {} if schedule == PIPES[0] or "schedule" in self.fixed else {"schedule": schedule}
                    yield chosen | {"recompute": recompute, "microbatches": microbatches, **more}

    def _at_least(self, options: dict[str, Any]) -> float:
        """Seconds that a step takes at least; 0 where it cannot run."""

        def find() -> float:
            with suppress(FsdpxError):
                return least_seconds(self._step(self.batch, self.ranks, options), self.machine)
            return 0.0

        return once(("least", _words(options)), find)

    def _offload(self) -> None:
        """What lies on disk, of those that need least memory."""
        for one in sorted(self.large, key=lambda one: one.prediction.memory)[:SHOWN]:
            for what in OFFLOADED:
                if self.attempt({**one.options, "offload": Offload(DISK, what)}) is not None:
                    break

    def _fine(self, one: Candidate) -> None:
        """Other sizes of units, and the codecs that are allowed."""
        if one.prediction.mesh.width("tensor") > 1 and "sequence" not in self.fixed:
            self.attempt({**one.options, "sequence": "parallel"})
        for choice in self._choices("codec", *self.codecs):
            self.attempt({**one.options, "codec": choice})
        for group_bytes in self._choices("group_bytes", *GROUPS):
            made = self.attempt({**one.options, "group_bytes": group_bytes})
            if made is not None and _seconds(made) == _seconds(one):  # its units are larger anyway
                self.found.remove(made)

    def _choices(self, name: str, *values: Any) -> tuple[Any, ...]:
        return (self.fixed[name],) if name in self.fixed else values

    def _placements(self) -> Iterator[tuple[str, Mesh | None, Any]]:
        """Strategies, meshes and grids of fields, the simplest first."""
        if "mesh" in self.fixed:
            mesh = self.fixed["mesh"] or Mesh()
            for space in self._spaces(self.ranks // ((mesh.pipe or 1) * (mesh.tensor or 1)), mesh.tensor or 1):
                for strategy in self._choices("strategy", *PRESETS_BY_MEMORY):
                    yield strategy, self.fixed["mesh"], space
            return
        host, strategies = int(min(self.machine.host, self.ranks)), self._choices("strategy", *PRESETS_BY_MEMORY)
        layers = len(sort(self.model).nodes)  # a stage has one at least
        for tensor in _widths(self.ranks, host):
            for pipe in _widths(self.ranks // tensor, layers):
                data = self.ranks // tensor // pipe
                spaces = self._spaces(data, tensor)
                if not spaces:
                    why = f"more data ranks than the {self.samples} samples of the batch"
                    self.refused[f"tensor={tensor}, pipe={pipe}, data={data}"] = why
                for strategy in strategies if data > 1 else strategies[:1]:
                    inner = host // tensor
                    yield from ((strategy, _mesh(data, strategy, pipe, tensor), space) for space in spaces)
                    if strategy == "fsdp" and pipe == 1 and 1 < inner < data and data % inner == 0:
                        mesh = Mesh(replica=data // inner, shard=inner, tensor=tensor)
                        yield from ((strategy, mesh, space) for space in spaces)

    def _spaces(self, data: int, tensor: int) -> list[Any]:
        """The grids over which so many data ranks cut fields, of which each has a sample at least. None: no grid."""
        space = self.space
        if space is not None and space != ANY:
            return [space] if tensor == 1 and data % prod(dims_of(space)) == 0 else []
        found: list[Any] = [None] if data <= self.samples else []
        if space is None or tensor > 1:
            return found
        cells = self.batch[0][0][2:]
        for ranks in _widths(data, data):
            if ranks > 1 and data // ranks <= self.samples:
                grids = [dims for dims in _factors(ranks, len(cells)) if divides(dims, cells)]
                found += sorted(grids, key=lambda dims: _faces(dims, cells))[:GRIDS]
        return found

    def _may_fit(self, chosen: dict[str, Any]) -> bool:
        """Try few microbatches, then more until it fits. False where each number of them takes too much memory."""
        pipe, rows = self._pipe_rows(chosen)
        first = min(4 * pipe if pipe > 1 else 1, rows)
        for microbatches in self._choices("microbatches", *_doubled(first, rows)):
            before = len(self.large)
            self.attempt(chosen | {"microbatches": microbatches})
            if len(self.large) == before:
                return True  # it fits, is too slow, or cannot run
            if _floor(self.large[-1].prediction) > (self.limit or 0):
                return False  # more microbatches would not help
        return False

    def _pipe_rows(self, chosen: dict[str, Any]) -> tuple[int, int]:
        """Ranks of the pipe, and samples of a data rank."""
        mesh, space = chosen["mesh"] or Mesh(), chosen["space"]
        pipe = mesh.pipe or 1
        data = self.ranks // pipe // (mesh.tensor or 1) // prod(dims_of(space))
        return pipe, -(-self.samples // data)

    def attempt(self, options: dict[str, Any], all_kinds: bool = False) -> Candidate | None:
        """The candidate, if it can run, fits, and may be shown. all_kinds: not only as the quickest of its own."""
        words, least = _words(options), self._at_least(options)
        if words in self.seen:
            return None
        self.seen[words] = False
        try:
            step = self._step(self.batch, self.ranks, options)
            if step.blank:
                raise ConfigError(step.blank)
            if least > self._most_seconds(None if all_kinds else _kind(step.mesh, options)):
                self.slow[words] = least
                return None
            if self.predicted >= self.most:
                raise ConfigError(f"most={self.most} others were predicted before it")
            made = predict_step(step, self.machine)
        except FsdpxError as error:
            self.refused[words] = str(error)
            return None
        self.seen[words] = True
        if self.say is not None and self.predicted % 20 == 0:
            self.say(f"{len(self.seen)} configurations, {self.predicted} predicted, {len(self.found)} fit")
        one = Candidate(_kind(made.mesh, options), _given(options), made)
        if self.limit is not None and made.memory > self.limit:
            self.refused[words] = f"more memory than {bytes_text(self.limit)} of a rank"
            self.large.append(one)
            return None
        self.found.append(one)
        return one

    def _most_seconds(self, kind: str | None) -> float:
        """A configuration of this kind, or of any, that takes longer is not shown, or far from the quickest."""
        seconds = sorted(one.prediction.seconds for one in self.found)
        own = [one.prediction.seconds for one in self.found if kind in (None, one.kind)]
        return max(CLOSE * seconds[0], seconds[SHOWN - 1], min(own)) if own and len(seconds) >= SHOWN else inf

    def plan(self) -> Plan:
        """What was found; ConfigError if that is nothing."""
        if not self.found:
            raise ConfigError(self._nothing())
        found = tuple(sorted(self.found, key=_seconds))
        grids = "grids of fields, " * (self.space == ANY)
        disk = ", offload" * any("offload" in words for words in self.seen)
        codecs = "".join(f", codec {choice!r}" for choice in self.codecs)
        what = f"strategies, meshes, {grids}microbatches, recomputing, schedules and group_bytes{codecs}{disk}"
        fixed, left = _words(self.fixed), f"; not searched: {NOT_SEARCHED}"
        given = f", with {fixed}" * bool(fixed)
        rest = len(self.seen) - self.predicted - len(self.slow)
        counts = f"{self.predicted} predicted, {len(self.slow)} ruled out by a bound, {rest} cannot run"
        searched = f"{len(self.seen)} configurations: {what}{given}; {counts}{left}"
        loss = self.fixed["loss"] or (nn.CrossEntropy() if "int" in str(self.batch[-1][1]) else nn.MSE())
        cells, best = self.batch[0][0][2:], found[0]
        about = self.machine, self.limit, self.samples, f"nn.{loss!r}", cells
        frugal = self._frugal(best)
        largest, longest, deepest = self._largest(frugal), self._longest(frugal), self._deepest(frugal, best)
        by = {"batch": largest[1], "size": longest[1], "depth": deepest[1]}
        limits = {name: options_text(options) for name, options in by.items() if options is not None}
        slow, refused, large = tuple(self.slow.items()), tuple(self.refused.items()), tuple(self.large)
        most, scaling = (deepest[0], limits), self._scaling(best)
        return Plan(found, refused, searched, largest[0], *about, longest[0], scaling, slow, *most, large)

    def _frugal(self, best: Candidate) -> list[dict[str, Any]]:
        """Options of the quickest, and of those that need least memory: with as much recomputing and as many
        microbatches as there may be."""
        placed: dict[str, Candidate] = {}
        for one in sorted([*self.found, *self.large], key=lambda one: one.prediction.memory):
            placed.setdefault(_words({name: one.options.get(name) for name in ("strategy", "mesh", "space")}), one)
        found = [dict(best.options)]
        least = [*placed.values()]
        for one in [*least[:FRUGAL], *[one for one in least[FRUGAL:] if one.kind == "fsdp"][:1]]:
            _, rows = self._pipe_rows({"mesh": None, "space": None, **one.options})
            options = {**one.options, "recompute": self._choices("recompute", "all")[0]}
            found.append(_given(options | {"microbatches": self._choices("microbatches", rows)[0]}))
        return found

    def _largest(self, frugal: Sequence[dict[str, Any]]) -> tuple[int, dict[str, Any] | None]:
        """Samples of the largest global batch, and the options at which it fits."""
        times, options = self._times(frugal, 0, 1)
        return self.samples * (times or 1), options

    def _longest(self, frugal: Sequence[dict[str, Any]]) -> tuple[tuple[int, ...], dict[str, Any] | None]:
        """Positions of the longest sequence, or cells of the largest field, and the options at which they fit."""
        shape = self.batch[0][0]
        first, last = (1, 2) if len(shape) == 2 and "int" in str(self.batch[0][1]) else (2, len(shape))
        times, options = self._times(frugal, first, last) if last > first else (None, {})
        return ((), None) if times is None else (tuple(n * times for n in shape[first:last]), options)

    def _times(self, frugal: Sequence[dict[str, Any]], first: int, last: int) -> tuple[int | None, dict[str, Any]]:
        """How many times as large dims of the batch may be, by doubling, at most 64, and the options at which they fit.
        None where the model refuses."""
        times, by, refused = 1, frugal[0], False
        for options in frugal:
            while times < 64 and self.limit is not None:
                batch = [
                    ((*shape[:first], *(2 * times * n for n in shape[first:last]), *shape[last:]), dtype)
                    for shape, dtype in self.batch
                ]
                try:
                    memory = self._predicted(batch, self.ranks, options).memory
                except FsdpxError:
                    refused = refused or options is frugal[0]
                    break
                if memory > self.limit:
                    break
                times, by = 2 * times, options
        return None if refused and times == 1 else times, by

    def _deepest(
        self, frugal: Sequence[dict[str, Any]], best: Candidate
    ) -> tuple[tuple[int, int], dict[str, Any] | None]:
        """Blocks and parameters of the deepest model that fits, and the options at which it does; (0, 0) where none are
        repeated."""
        now = depth(self.model)
        if not now or self.limit is None:
            return (0, 0), None
        fits, by = self._deeper(frugal[0], now, best.prediction.memory), frugal[0]
        for options in frugal[1:]:
            if fits >= DEEP * now:
                break
            with suppress(FsdpxError):
                memory = self._memory_of(options, fits + 1)
                if memory <= self.limit:
                    fits, by = self._deeper(options, fits + 1, memory), options
        return (fits, parameters(deeper(self.model, fits))), by

    def _memory_of(self, options: dict[str, Any], layers: int) -> int:
        """Bytes of a rank with so many blocks."""
        step = self._step(self.batch, self.ranks, options, deeper(self.model, layers))
        return predict_step(step, self.machine).memory

    def _deeper(self, options: dict[str, Any], now: int, memory: int) -> int:
        """The most blocks that fit, of a model of which `now` do with so much memory.

        Memory grows evenly with depth but for stages of a pipe, so two depths say which one to look at next."""
        assert self.limit is not None
        most = DEEP * depth(self.model)
        known, layers, fits = {now: memory}, min(2 * now, most), now
        while layers not in known and len(known) < LOOKS:
            try:
                known[layers] = self._memory_of(options, layers)
            except FsdpxError:  # options that do not take so many
                break
            fits = max(n for n, memory in known.items() if memory <= self.limit)
            other = min((n for n in known if n > fits), default=max((n for n in known if n < fits), default=fits))
            each = (known[other] - known[fits]) / (other - fits) if other != fits else inf
            layers = min(fits + int((self.limit - known[fits]) / each), most) if each > 0 else most
        return fits

    def _predicted(self, batch: Any, ranks: int, options: Mapping[str, Any]) -> Prediction:
        return predict_step(self._step(batch, ranks, options), self.machine)

    def _step(self, batch: Any, ranks: int, options: Mapping[str, Any], model: nn.Layer | None = None) -> WorldStep:
        return step_of(model or self.model, batch, ranks, self.machine.compute.gpu, {**self.fixed, **options})

    def _scaling(self, one: Candidate) -> tuple[Prediction, ...]:
        """The same on other numbers of ranks: its data axis is narrower and wider."""
        found, mesh = {self.ranks: one.prediction}, one.prediction.mesh
        beside = mesh.width("pipe") * mesh.width("tensor")
        for data in (mesh.width("data") * 2**n // 8 for n in range(7)):
            if data < 1 or data * beside in found:
                continue
            grown, other = ("replica", "shard") if mesh.width("replica") > 1 else ("shard", "replica")
            options = {**one.options, "mesh": replace(mesh, space=(), **{grown: data // mesh.width(other)})}
            with suppress(FsdpxError, ValueError):
                if mesh.space:
                    options["space"] = self._alike(mesh, data)
                elif data > self.samples:
                    break
                found[data * beside] = self._predicted(self.batch, data * beside, options)
        return tuple(found[ranks] for ranks in sorted(found))

    def _alike(self, mesh: Mesh, data: int) -> tuple[int, ...]:
        """A grid of as many members on other data ranks. ValueError where there is none."""
        members, cells = mesh.width("data") // prod(mesh.space), self.batch[0][0][2:]
        grids = [dims for dims in _factors(data // members, len(cells)) if divides(dims, cells)]
        return min(grids, key=lambda dims: _faces(dims, cells))

    def _nothing(self) -> str:
        if self.large:
            least = min(self.large, key=lambda one: one.prediction.memory)
            parts = sorted(least.prediction.worst.memory.items(), key=lambda item: -item[1])
            needs = ", ".join(f"{kind} {bytes_text(n)}" for kind, n in parts)
            limit, held = self.limit or 0, bytes_text(least.prediction.memory)
            more = (one.mesh.size for one in self._scaling(least) if one.memory <= limit)
            enough = next((f"{ranks} ranks of it would fit" for ranks in more), "take more ranks")
            return (
                f"nothing fits into {bytes_text(limit)} per rank: on {self.ranks} the least is {held} each, with "
                f"{least.words}; {enough}, or take a smaller model or batch, or offload=. It is the least of "
                f"{len(self.seen)} configurations: {needs}"
            )
        whys = list(dict.fromkeys(why.splitlines()[0] for why in self.refused.values()))
        return f"no configuration of {self.ranks} ranks can run: " + "; ".join(whys[:3])


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _words(options: Mapping[str, Any]) -> str:
    return options_text(_given(options))


def _seconds(one: Candidate) -> tuple[float, int]:
    """For sorting: of those that take as long, the one with least memory first."""
    return one.prediction.seconds, one.prediction.memory


def _floor(found: Prediction) -> int:
    """Bytes that more microbatches do not lower."""
    return min(one.nbytes - one.memory.get("activations", 0) for one in found.classes)


def _widths(ranks: int, most: int) -> list[int]:
    """Divisors of a number of ranks."""
    return [width for width in range(1, min(ranks, most) + 1) if ranks % width == 0]


def _factors(ranks: int, dims: int) -> Iterator[tuple[int, ...]]:
    """All ways of ranks along so many dims."""
    if dims == 1:
        yield (ranks,)
        return
    for first in range(1, ranks + 1):
        if ranks % first == 0:
            yield from ((first, *rest) for rest in _factors(ranks // first, dims - 1))


def _faces(dims: tuple[int, ...], cells: tuple[int, ...]) -> float:
    """What a part of a field has around it for each of its cells."""
    return sum(width / n for width, n in zip(dims, cells, strict=True) if width > 1)


def _doubled(first: int, most: int) -> list[int]:
    found = [first]
    while found[-1] * 2 <= most:
        found.append(found[-1] * 2)
    return found


def _mesh(data: int, strategy: str, pipe: int, tensor: int) -> Mesh | None:
    """None where the strategy alone says it."""
    if pipe == tensor == 1:
        return None
    return (
        Mesh(replica=data, shard=1, pipe=pipe, tensor=tensor) if strategy == "ddp" else Mesh(pipe=pipe, tensor=tensor)
    )


def _kind(mesh: Mesh, options: Mapping[str, Any]) -> str:
    name = options["strategy"] if mesh.width("data") > 1 else ""
    name = "hybrid" if name == "fsdp" and mesh.width("replica") > 1 else name
    means = [name, *(axis for axis in ("tensor", "pipe") if mesh.width(axis) > 1), "space" * (prod(mesh.space) > 1)]
    means += [str(options.get("codec") or ""), "offload" * (options.get("offload") is not None)]
    return " + ".join(filter(None, means)) or "one rank"
