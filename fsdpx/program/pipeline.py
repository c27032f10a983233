"""The model cut over the ranks of a pipe: which stage each unit is in, and what travels between stages."""

from collections.abc import Iterable, Sequence
from itertools import compress, count, groupby, pairwise

from fsdpx.program.stage import Edge, Row, Stage, constants, readers
from fsdpx.program.verbs import Slot

__all__ = ["pipeline"]


def pipeline(
    units: Sequence[Row],
    trainable: Sequence[bool],
    inputs: Sequence[int],
    outputs: Sequence[int],
    stages: Sequence[int],
    home: Sequence[int],
    twins: tuple[tuple[int, ...], ...] = (),
    partial: Iterable[int] = (),
    moving: Iterable[int] = (),
    coded: Iterable[int] = (),
    constant: frozenset[int] | None = None,
    records: tuple[Slot, ...] = (),
) -> tuple[Stage, ...]:
    """What each rank of the pipe sees.

    units: (pages, values read, values given) each. stages: the stage of each unit, ascending. home: the rank of each
    stage. twins, partial, moving, coded, constant, records: see `Stage`; constant is found from units if it is None.
    The loss reads the outputs in the last stage; every rank has the inputs."""
    if constant is None:
        constant = constants(units, set(compress(count(), trainable)), inputs)
    shared = (tuple(trainable), tuple(inputs), tuple(outputs))
    edges = _edges(units, inputs, outputs, stages, home)
    partly, moves, keeps = (frozenset(some) for some in (partial, moving, coded))
    cut = [(stage, tuple(u for u, of in enumerate(stages) if of == stage)) for stage in range(len(home))]
    seen = []
    for rank in range(max(home) + 1):
        parts = tuple(part for part in cut if home[part[0]] == rank)
        here, scores = [u for _, part in parts for u in part], home[-1] == rank
        made = readers(units, here, outputs if scores else ())
        seen.append(Stage(made, *shared, parts, edges, twins, partly, rank, scores, moves, keeps, constant, records))
    return tuple(seen)


def _edges(
    units: Sequence[Row], inputs: Sequence[int], outputs: Sequence[int], stages: Sequence[int], home: Sequence[int]
) -> tuple[Edge, ...]:
    """A value goes from reader to reader, stage by stage, and its gradient back the same way: each stage adds to what
    the later ones found, which is the order of addition in one process. No rank gets a value twice."""
    made: list[Edge] = []
    if len(set(home)) == 1:  # there is no other rank to send to
        return ()

    def add(value: int, source: int, target: int, gradient: bool) -> None:
        made.append(Edge(len(made), value, source, target, home[source], home[target], gradient))

    for value in sorted({v for _, _, given in units for v in given} - set(inputs)):
        chain = _chain(value, units, outputs, stages, len(home) - 1)
        first = [stage for i, stage in enumerate(chain) if home[stage] not in {home[s] for s in chain[:i]}]
        for source, target in pairwise(first):
            add(value, source, target, gradient=False)
        for source, target in pairwise(reversed(chain)):
            if home[source] != home[target]:
                add(value, source, target, gradient=True)
    return tuple(made)


def _chain(value: int, units: Sequence[Row], outputs: Sequence[int], stages: Sequence[int], last: int) -> list[int]:
    """The stages that give or read a value, each once."""
    there = [stages[u] for u, (_, read, given) in enumerate(units) if value in read or value in given]
    there += [last] if value in outputs else []
    return [stage for stage, _ in groupby(sorted(there))]
