"""Plan: what a search has found, as tables, as the line of Python that asks for the quickest, and for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdpx.core.base.messages import bytes_text
from fsdpx.core.comm.mesh import Mesh
from fsdpx.ext.fields.grid import LETTERS
from fsdpx.plan.grounds import unmeasured
from fsdpx.plan.machine import Machine
from fsdpx.plan.peak import mesh_args, options_text, text_of
from fsdpx.plan.prediction import Prediction
from fsdpx.plan.printed import call_text, grid, prose

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

    @property
    def label(self) -> str:
        """The kind with the widths of its axes, "fsdp + tensor 2"."""
        mesh = self.prediction.mesh
        widths = {axis: f"{axis} {mesh.width(axis)}" for axis in ("tensor", "pipe")}
        widths |= {"hybrid": f"hybrid of {mesh.width('shard')}", "space": f"space {'x'.join(map(str, mesh.space))}"}
        return " + ".join(widths.get(word, word) for word in self.kind.split(" + "))

    @property
    def rest(self) -> str:
        """The options that the label does not say, in words."""
        words: dict[str, Callable[[Any], str]] = {
            "microbatches": lambda n: f"{n} microbatches" if n > 1 else "",
            "recompute": lambda what: "recompute" if what == "all" else f"recompute {what}",
            "group_bytes": lambda n: f"units of {bytes_text(n)}", "schedule": str, "precision": str,
        }  # fmt: skip
        shown = (words[name](value) for name, value in self.options.items() if name in words)
        return ", ".join(filter(None, shown))

    def row(self, limit: int | None) -> tuple[str, ...]:
        """For a table: kind, time, memory, whether that is within the limit, bytes, and other options."""
        found, sent = self.prediction, sum(self.prediction.bytes.values())
        numbers = f"{found.seconds:.4g} s", bytes_text(found.memory), _fits(found.memory, limit), bytes_text(sent)
        return (self.label, *numbers, self.rest)


HEAD = ("kind", "step", "memory", "fits", "sends", "with")
CLOSE = 1.02
"""What takes at most so many times as long as the quickest is as quick: no prediction is better."""


def _fits(nbytes: int, limit: int | None) -> str:
    return "?" if limit is None else "yes" if nbytes <= limit else "NO"


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
    large : configurations that were predicted and do not fit
    """

    found: tuple[Candidate, ...]
    refused: tuple[tuple[str, str], ...]
    searched: str
    largest: int
    machine: Machine
    memory: int | None
    samples: int
    loss: str = "nn.CrossEntropy()"
    cells: tuple[int, ...] = ()
    longest: tuple[int, ...] = ()
    scaling: tuple[Prediction, ...] = ()
    slow: tuple[tuple[str, float], ...] = ()
    deepest: tuple[int, int] = (0, 0)
    limits: Mapping[str, str] = field(default_factory=dict)
    large: tuple[Candidate, ...] = ()

    @property
    def best(self) -> Candidate:
        """The quickest."""
        return self.found[0]

    @property
    def ranks(self) -> int:
        """Of the world."""
        return self.best.prediction.mesh.size

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

    @property
    def answer(self) -> str:
        """The quickest that fits, in a sentence."""
        best, ranks = self.best.prediction, f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        label = ranks if self.best.label == ranks else f"{self.best.label} on {ranks}"
        held = bytes_text(best.memory)
        fits = f"{held} a rank, whose memory {self.machine.name} does not say"
        if self.memory is not None:
            fits = f"{held} of {bytes_text(self.memory)} a rank: it fits"
        return f"{label}: {best.seconds:.3g} s a step, {fits}"

    def __str__(self) -> str:
        return self.text()

    def text(self, about: str = "") -> str:
        """The answer, then the tables, in lines of 80 characters. about: the model, in words."""
        close = [one.label for one in self._quickest_of_kinds() if self._is_close(one)]
        first = [prose(self.answer), *(prose(f"not measured: {why}", "  ") for why in unmeasured(self.best.prediction))]
        first += [prose(f"as quick within {CLOSE - 1:.0%}: {', '.join(close)}", "  ")] if close else []
        what = f"{about}; " * bool(about) + f"batch {self.samples} on {self.ranks} ranks of {self.machine.name}"
        rows = self.found[:SHOWN], self._quickest_of_kinds()
        tables = (grid(HEAD, [one.row(self.memory) for one in some], words=True) for some in rows)
        quickest, kinds = tables
        parts = [
            "\n".join(first), prose(what), f"the quickest, with what a rank holds and sends\n{quickest}",
            f"the quickest of each kind\n{kinds}",
            call_text(self.line), self.toml, self._limits(),
            f"on other numbers of ranks, with the same global batch\n{self._scaling()}", *self._left_out(),
            prose(f"where the time goes: {self.best.prediction}", "  ") + self._process(),
        ]  # fmt: skip
        return "\n\n".join(parts)

    def _quickest_of_kinds(self) -> list[Candidate]:
        """The quickest of each kind that fits, and of kinds that do not, the quickest first."""
        large = {one.kind: one for one in sorted(self.large, key=_seconds, reverse=True) if one.kind not in self.kinds}
        return sorted((*self.kinds.values(), *large.values()), key=lambda one: (one in self.large, _seconds(one)))

    def _is_close(self, one: Candidate) -> bool:
        best, fits = self.best, one not in self.large
        return fits and one.kind != best.kind and one.prediction.seconds <= CLOSE * best.prediction.seconds

    def _left_out(self) -> list[str]:
        """What was searched, refused and ruled out."""
        reasons: dict[str, list[str]] = {}
        for words, why in self.refused:
            reasons.setdefault(why.splitlines()[0], []).append(words)
        refused = [prose(f"  {len(some)}: {why}; such as {some[0]}", "    ") for why, some in reasons.items()]
        slow = min(self.slow, key=lambda one: one[1], default=None)
        found = [prose(f"searched {self.searched}", "  ")]
        found += ["refused\n" + "\n".join(refused[:SHOWN])] if refused else []
        ruled = f"ruled out, since their layers alone take longer: {len(self.slow)}, such as"
        return found if slow is None else [*found, prose(f"{ruled} {slow[0]}, at least {slow[1]:.4g} s", "  ")]

    def _process(self) -> str:
        """What the process of a rank takes that is no GPU."""
        nbytes = self.best.prediction.process
        more = f", more than the {bytes_text(self.memory or 0)} there are" * (nbytes > (self.memory or nbytes))
        words = f"with interpreter, libraries and MPI a process takes {bytes_text(nbytes)}{more}"
        return "" if self.machine.compute.gpu else f"\n{prose(words, '  ')}"

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
        others = [prose(f"  {words} with {by}", "    ") for words, by in lines if by != self.best.words]
        parts = [prose(f"with these options {', or '.join(same)} still fits")] if same else []
        return "\n".join([*parts, *(["the largest that fit with others", *others] if others else [])])

    def _scaling(self) -> str:
        rows: list[tuple[str, ...]] = []
        first = self.scaling[0]
        for one in self.scaling:
            sent, share = sum(one.bytes.values()), first.seconds * first.mesh.size / one.seconds / one.mesh.size
            rate = f"{one.seconds:.4g} s", f"{self.samples / one.seconds:,.4g}", f"{share:.0%}"
            held = bytes_text(one.memory), _fits(one.memory, self.memory)
            rows.append((str(one.mesh.size), *rate, *held, bytes_text(sent)))
        return grid(("ranks", "step", "samples/s", "efficiency", "memory", "fits", "sends"), rows)

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
            "answer": self.answer,
            "not_measured": unmeasured(self.best.prediction),
            "refused": [list(one) for one in self.refused],
            "slow": [list(one) for one in self.slow],
        }


def _seconds(one: Candidate) -> tuple[float, int]:
    """For sorting: of those that take as long, the one with least memory first."""
    return one.prediction.seconds, one.prediction.memory


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
