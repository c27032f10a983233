"""Plan: what a search has found, as tables, as the line of Python that asks for the quickest, and for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdpx.comm.mesh import Mesh
from fsdpx.layout.grid import LETTERS
from fsdpx.plan.machine import Machine
from fsdpx.plan.peak import mesh_args, options_text, text_of
from fsdpx.plan.prediction import Prediction
from fsdpx.state.tuning import bytes_text, table

__all__ = ["SHOWN", "Candidate", "Plan", "divides"]

SHOWN = 5


@dataclass(frozen=True)
class Candidate:
    """A configuration. options: of `distribute`. kind: which means it combines, "fsdp + tensor"."""

    kind: str
    options: Mapping[str, Any]
    prediction: Prediction

    @property
    def words(self) -> str:
        """The options as they are written in Python."""
        return options_text(self.options)

    def row(self) -> tuple[str, ...]:
        """For a table: kind, time, samples per second, bubble, memory, bytes, options."""
        found, sent = self.prediction, sum(self.prediction.bytes.values())
        return (
            self.kind, f"{found.seconds:.4g} s", f"{found.bubble:.0%}", bytes_text(found.memory), bytes_text(sent),
            self.words,
        )  # fmt: skip


HEAD = ("kind", "step", "bubble", "memory of a rank", "it sends", "options")


@dataclass(frozen=True)
class Plan:
    """What a search has found.

    Parameters
    ----------
    found : configurations that fit, the quickest first
    refused : options of those that do not, and why
    searched : what was tried, in words
    largest : samples of the largest global batch that fits, found by doubling, with the options of the quickest or of
        those that need least memory
    cells : of a field, where the batch consists of fields
    longest : positions of the longest sequences, or cells of the largest fields, that fit in the same way; () where the
        model takes no others
    scaling : the quickest one on other numbers of ranks, with the same global batch, fewest first
    deepest : blocks and parameters of the deepest model of the same width that fits, at most 16 times as deep; (0, 0)
        where the model repeats no block
    limits : "batch", "size", "depth" -> the options at which the largest, longest and deepest fit
    slow : options that were ruled out because their layers alone take longer than configurations that are shown take
        in all, and the seconds that a step takes at least
    """

    found: tuple[Candidate, ...]
    refused: tuple[tuple[str, str], ...]
    searched: str
    largest: int
    machine: Machine
    memory: int | None
    ranks: int
    samples: int
    loss: str = "nn.CrossEntropy()"
    cells: tuple[int, ...] = ()
    longest: tuple[int, ...] = ()
    scaling: tuple[Prediction, ...] = ()
    slow: tuple[tuple[str, float], ...] = ()
    deepest: tuple[int, int] = (0, 0)
    limits: Mapping[str, str] = field(default_factory=dict)

    @property
    def best(self) -> Candidate:
        """The quickest."""
        return self.found[0]

    @property
    def kinds(self) -> dict[str, Candidate]:
        """Kind -> the quickest of it: what each means buys."""
        return {one.kind: one for one in reversed(self.found)}

    @property
    def line(self) -> str:
        """The line of Python that asks for the quickest."""
        words, space = self.best.words, self.best.options.get("space")
        if isinstance(space, tuple):
            even = f"fsdpx.Grid.even({self.cells}, {space}, fsdpx.rank()).own"
            own = tuple(n // width for n, width in zip(self.cells, space, strict=True))
            part = own if divides(space, self.cells) else even
            layout = "c" + LETTERS[3 - len(space) :]
            grid = f"fsdpx.Grid(fsdpx.init(), {part}, dims={space}, layout={layout!r})"
            words = words.replace(f"space={space}", f"space={grid}")
        return f"trainer = model.as_distributed(loss={self.loss}, optimizer=optim.AdamW(), {words})"

    @property
    def toml(self) -> str:
        """The same for a run file, with a comment for what only Python can say."""
        lines = ["[distribute]"]
        for name, value in self.best.options.items():
            plain = mesh_args(value).replace(", ", ",") if isinstance(value, Mesh) else value
            lines.append(f"{name} = {json.dumps(plain)}" if isinstance(plain, str | int) else f"# {name}={value!r}")
        return "\n".join(lines)

    def __str__(self) -> str:
        limit = "" if self.memory is None else f", {bytes_text(self.memory)} of memory per rank"
        head = f"{self.ranks} ranks of {self.machine.name}, batch {self.samples}{limit}\nsearched {self.searched}"
        kinds = sorted(self.kinds.values(), key=lambda one: one.prediction.seconds)
        reasons: dict[str, list[str]] = {}
        for words, why in self.refused:
            reasons.setdefault(why.splitlines()[0], []).append(words)
        refused = [f"  {len(words)}: {why}; such as {words[0]}" for why, words in reasons.items()]
        slow = [f"  {words}: at least {seconds:.4g} s" for words, seconds in sorted(self.slow, key=lambda one: one[1])]
        parts = [
            head,
            "the quickest\n" + table([HEAD, *(one.row() for one in self.found[:SHOWN])]),
            "the quickest of each kind\n" + table([HEAD, *(one.row() for one in kinds)]),
            *(["refused\n" + "\n".join(refused[:SHOWN])] if refused else []),
            *([f"ruled out, since their layers alone take longer: {len(slow)}, such as\n{slow[0]}"] if slow else []),
            f"where the time goes: {self.best.prediction}{self._process()}",
            self._limits(),
            f"on other numbers of ranks, with the same global batch\n{self._scaling()}",
            self.line,
            self.toml,
        ]
        return "\n\n".join(parts)

    def _process(self) -> str:
        """What the process of a rank takes that is no GPU."""
        nbytes = self.best.prediction.process
        more = f", more than the {bytes_text(self.memory or 0)} there are" * (nbytes > (self.memory or nbytes))
        words = f"\nwith interpreter, libraries and MPI a process takes {bytes_text(nbytes)}{more}"
        return "" if self.machine.compute.gpu else words

    def _limits(self) -> str:
        what = "sequences" if len(self.longest) == 1 else "fields"
        layers, count = self.deepest
        most = {
            "batch": f"a global batch of {self.largest} samples",
            "size": f"{what} of {' x '.join(map(str, self.longest))}" * bool(self.longest),
            "depth": f"{layers} blocks of this width, {count:,} parameters in all," * (layers > 0),
        }
        lines = [(words, self.limits.get(name, self.best.words)) for name, words in most.items() if words]
        same = [words.rstrip(",") for words, by in lines if by == self.best.words]
        others = [f"  {words} with {by}" for words, by in lines if by != self.best.words]
        parts = [f"with these options {', or '.join(same)} still fits"] if same else []
        return "\n".join([*parts, *(["the largest that fit with others", *others] if others else [])])

    def _scaling(self) -> str:
        rows: list[tuple[str, ...]] = [("ranks", "step", "samples/s", "efficiency", "memory of a rank", "it sends")]
        first = self.scaling[0]
        for one in self.scaling:
            sent, share = sum(one.bytes.values()), first.seconds * first.mesh.size / one.seconds / one.mesh.size
            rate = f"{one.seconds:.4g} s", f"{self.samples / one.seconds:,.4g}", f"{share:.0%}"
            rows.append((str(one.mesh.size), *rate, bytes_text(one.memory), bytes_text(sent)))
        return table(rows)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "machine": self.machine.name,
            "ranks": self.ranks,
            "samples": self.samples,
            "memory": self.memory,
            "searched": self.searched,
            "largest_batch": self.largest,
            "limits": dict(self.limits),
            "longest": list(self.longest),
            "deepest": dict(zip(("blocks", "parameters"), self.deepest, strict=True)) if self.deepest[0] else None,
            "scaling": [
                {"ranks": one.mesh.size, "seconds": one.seconds, "memory": one.memory, "bytes": one.bytes}
                for one in self.scaling
            ],
            "line": self.line,
            "toml": self.toml,
            "found": [_row(one) for one in self.found],
            "refused": [list(one) for one in self.refused],
            "slow": [list(one) for one in self.slow],
        }


def _row(one: Candidate) -> dict[str, Any]:
    found = one.prediction
    return {
        "kind": one.kind, "options": {name: text_of(value) for name, value in one.options.items()},
        "seconds": found.seconds, "parts": dict(found.parts), "memory": found.memory, "process": found.process,
        "bytes": found.bytes, "bubble": found.bubble,
    }  # fmt: skip


def divides(dims: tuple[int, ...], cells: tuple[int, ...]) -> bool:
    """Whether all parts of a field have as many cells."""
    return all(n % width == 0 for n, width in zip(cells, dims, strict=True))
