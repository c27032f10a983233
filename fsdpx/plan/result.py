"""`Plan`, the result of a search. It can be shown as tables, as JSON, or as a line of Python that uses the fastest
configuration."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from fsdpx.core.base.dataclass import dataclass, field
from fsdpx.core.base.messages import format_bytes, format_count, format_table, wrap_lines
from fsdpx.core.comm.mesh import Mesh
from fsdpx.ext.fields.grid import LETTERS
from fsdpx.plan.grounds import describe_unmeasured_figures
from fsdpx.plan.machine import Machine
from fsdpx.plan.peak import format_mesh_arguments, format_option_as_python, format_options
from fsdpx.plan.prediction import Prediction
from fsdpx.plan.printed import wrap_call_into_lines

__all__ = ["MAX_SHOWN", "Candidate", "Plan", "can_split_evenly"]

MAX_SHOWN = 5
"""Maximum number of rows in a table, and maximum number of reasons for rejection that are shown."""


@dataclass(frozen=True)
class Candidate:
    """One configuration (options of `distribute`) with its prediction.

    Parameters
    ----------
    summary : the kinds of parallelism that the configuration combines, such as "fsdp + tensor"
    options : options of `distribute`
    prediction : time, memory and traffic of a step
    """

    summary: str
    options: Mapping[str, Any]
    prediction: Prediction

    @property
    def python_text(self) -> str:
        """The configuration as Python keyword arguments of `distribute`."""
        return format_options(self.options)

    @property
    def label(self) -> str:
        """The kinds of parallelism with the widths of the mesh axes, such as "fsdp + tensor 2"."""
        mesh = self.prediction.mesh
        widths = {axis: f"{axis} {mesh.width_of(axis)}" for axis in ("tensor", "pipe")}
        widths |= {
            "hybrid": f"hybrid of {mesh.width_of('shard')}",
            "domain": f"domain {'x'.join(map(str, mesh.domain))}",
        }
        return " + ".join(widths.get(word, word) for word in self.summary.split(" + "))

    @property
    def other_options(self) -> str:
        """Text with the options that are not part of `label`, such as "4 microbatches, recompute"."""
        words: dict[str, Callable[[Any], str]] = {
            "microbatches": lambda n: f"{n} microbatches" if n > 1 else "",
            "recompute": lambda what: "recompute" if what == "all" else f"recompute {what}",
            "group_bytes": lambda n: f"units of {format_bytes(n)}", "schedule": str, "precision": str,
        }  # fmt: skip
        shown = (words[name](value) for name, value in self.options.items() if name in words)
        return ", ".join(filter(None, shown))

    def format_row(self, limit: int | None) -> tuple[str, ...]:
        """Return the table row of this configuration: label, step time in seconds, memory, whether the memory is
        within the limit, bytes sent, and other options.

        Parameters
        ----------
        limit : bytes of memory that a rank may use; None if not known, which is shown as "?"

        Returns
        -------
        tuple : six strings
        """
        found, sent = self.prediction, sum(self.prediction.bytes_sent.values())
        numbers = (
            f"{found.seconds:.4g} s",
            format_bytes(found.memory),
            _format_whether_fits(found.memory, limit),
            format_bytes(sent),
        )
        return (self.label, *numbers, self.other_options)


HEAD = ("kind", "step", "memory", "fits", "sends", "with")
CLOSE_TIME_FACTOR = 1.02
"""Configurations that take at most this factor times the shortest time count as equally fast, because predictions are
not accurate enough to tell them apart."""


def _format_whether_fits(nbytes: int, limit: int | None) -> str:
    return "?" if limit is None else "yes" if nbytes <= limit else "NO"


@dataclass(frozen=True)
class Plan:
    """The result of a search for the fastest configuration.

    Parameters
    ----------
    candidates : configurations that fit, the fastest first
    rejected : (options, reason) for each configuration that cannot run or does not fit
    search_space : description of what was tried
    largest_batch : number of samples in the largest global batch that fits with the options of the fastest
        configuration, or with those of the configurations that need the least memory. It is found by doubling the given
        batch
    machine : the machine for which the steps were predicted
    memory : bytes that a rank may use; None if not known
    samples : number of samples in the global batch
    loss : the loss as a Python expression
    cells : number of cells of the field along each dim, if the batch consists of fields
    longest : size of the longest sequence that fits (in tokens) or of the largest field that fits (in cells along each
        dim), found by doubling, as for `largest_batch`; () if the model accepts only the size of the given batch
    scaling : predictions of the fastest configuration on other numbers of ranks, with the same global batch, fewest
        ranks first
    slow : (options, seconds) for each configuration that was ruled out as too slow. Here, `seconds` is a lower bound on
        the step time, which exceeds the step times of the configurations that are shown
    deepest : (blocks, parameters) of the deepest model of the same width that fits, at most 16 times as deep as the
        given model; (0, 0) if the model has no repeated block
    limits : the options that make the largest batch, size and depth fit; the keys are "batch", "size" and "depth"
    large : configurations that were predicted but do not fit
    """

    candidates: tuple[Candidate, ...]
    rejected: tuple[tuple[str, str], ...]
    search_space: str
    largest_batch: int
    machine: Machine
    memory: int | None
    samples: int
    loss: str = "nn.CrossEntropyLoss()"
    cells: tuple[int, ...] = ()
    longest: tuple[int, ...] = ()
    scaling: tuple[Prediction, ...] = ()
    slow: tuple[tuple[str, float], ...] = ()
    deepest: tuple[int, int] = (0, 0)
    limits: Mapping[str, str] = field(default_factory=dict)
    large: tuple[Candidate, ...] = ()

    @property
    def best_candidate(self) -> Candidate:
        """The fastest configuration that fits."""
        return self.candidates[0]

    @property
    def rank_count(self) -> int:
        """Number of ranks of the job."""
        return self.best_candidate.prediction.mesh.size

    @property
    def best_by_kind(self) -> dict[str, Candidate]:
        """The fastest configuration that fits, for each kind of parallelism (`Candidate.summary`)."""
        return {one.summary: one for one in reversed(self.candidates)}

    @property
    def python_line(self) -> str:
        """A line of Python that calls `distribute` with the fastest configuration."""
        words, space = self.best_candidate.python_text, self.best_candidate.options.get("domain")
        if isinstance(space, tuple):
            even = f"fsdpx.Grid.from_shape({self.cells}, {space}, fsdpx.rank()).local_shape"
            own = tuple(n // width for n, width in zip(self.cells, space, strict=True))
            part = own if can_split_evenly(space, self.cells) else even
            layout = "c" + LETTERS[3 - len(space) :]
            grid = f"fsdpx.Grid(fsdpx.init(), {part}, dims={space}, layout={layout!r})"
            words = words.replace(f"domain={space}", f"domain={grid}")
        return f"trainer = model.as_distributed(loss={self.loss}, optimizer=optim.AdamW(), {words})"

    @property
    def distribute_section_text(self) -> str:
        """The [distribute] section of a run file (TOML) for the fastest configuration. Options that only Python can
        express are written as comments."""
        lines = ["[distribute]"]
        for name, value in self.best_candidate.options.items():
            plain = format_mesh_arguments(value).replace(", ", ",") if isinstance(value, Mesh) else value
            lines.append(f"{name} = {json.dumps(plain)}" if isinstance(plain, str | int) else f"# {name}={value!r}")
        return "\n".join(lines)

    @property
    def fastest_configuration_line(self) -> str:
        """One line of text with the fastest configuration, its step time and its memory."""
        best, ranks = self.best_candidate.prediction, format_count(self.rank_count, "rank")
        label = ranks if self.best_candidate.label == ranks else f"{self.best_candidate.label} on {ranks}"
        held = format_bytes(best.memory)
        fits = f"{held} per rank (the memory of {self.machine.name} is not known)"
        if self.memory is not None:
            fits = f"{held} of {format_bytes(self.memory)} per rank: it fits"
        return f"{label}: {best.seconds:.3g} s per step, {fits}"

    def __str__(self) -> str:
        return self.format_plan()

    def format_plan(self, about: str = "") -> str:
        """Return all tables of the plan as text, in lines of at most 80 characters.

        Parameters
        ----------
        about : description of the model for the heading (default: none)

        Returns
        -------
        str : what `print(plan)` shows
        """
        close = [one.label for one in self._list_fastest_of_each_kind() if self._is_close_alternative_to_best(one)]
        first = [
            self.fastest_configuration_line,
            *(f"not measured: {why}" for why in describe_unmeasured_figures(self.best_candidate.prediction)),
            *([f"as fast within {CLOSE_TIME_FACTOR - 1:.0%}: {', '.join(close)}"] if close else []),
        ]
        samples, ranks = format_count(self.samples, "sample"), format_count(self.rank_count, "rank")
        what = f"{about}; " * bool(about) + f"batch of {samples} on {ranks} of {self.machine.name}"
        rows = self.candidates[:MAX_SHOWN], self._list_fastest_of_each_kind()
        tables = (format_table([HEAD, *(one.format_row(self.memory) for one in some)], text=True) for some in rows)
        fastest, kinds = tables
        parts = [
            wrap_lines("\n".join(first)), wrap_call_into_lines(self.python_line), self.distribute_section_text,
            wrap_lines(what), f"the fastest, with what a rank holds and sends\n{fastest}",
            f"the fastest of each kind\n{kinds}", self._format_largest_that_fit(),
            f"on other numbers of ranks, with the same global batch\n{self._format_scaling_table()}",
            *self._list_search_paragraphs(),
            wrap_lines(f"where the time goes: {self.best_candidate.prediction}") + self._format_process_memory(),
        ]  # fmt: skip
        return "\n\n".join(parts)

    def _list_fastest_of_each_kind(self) -> list[Candidate]:
        """Return the fastest configuration of each kind of parallelism, sorted by step time. Configurations that fit
        into memory come first."""
        large = {
            one.summary: one
            for one in sorted(self.large, key=_make_sort_key, reverse=True)
            if one.summary not in self.best_by_kind
        }
        return sorted(
            (*self.best_by_kind.values(), *large.values()), key=lambda one: (one in self.large, _make_sort_key(one))
        )

    def _is_close_alternative_to_best(self, candidate: Candidate) -> bool:
        """Return whether a configuration fits, takes at most `CLOSE_TIME_FACTOR` times as long as the fastest
        configuration, and differs from it in the kinds of parallelism."""
        best, fits = self.best_candidate, candidate not in self.large
        return (
            fits
            and candidate.summary != best.summary
            and candidate.prediction.seconds <= CLOSE_TIME_FACTOR * best.prediction.seconds
        )

    def _list_search_paragraphs(self) -> list[str]:
        """Return paragraphs of text that say which configurations were searched, which were rejected and why, and
        which were ruled out as too slow."""
        reasons: dict[str, list[str]] = {}
        for words, why in self.rejected:
            reasons.setdefault(why.splitlines()[0], []).append(words)
        refused = [wrap_lines(f"  {len(some)}: {why}; such as {some[0]}") for why, some in reasons.items()]
        slow = min(self.slow, key=lambda one: one[1], default=None)
        found = [wrap_lines(f"searched {self.search_space}")]
        found += ["refused\n" + "\n".join(refused[:MAX_SHOWN])] if refused else []
        ruled = f"ruled out, since their layers alone take longer: {len(self.slow)}, such as"
        return found if slow is None else [*found, wrap_lines(f"{ruled} {slow[0]}, at least {slow[1]:.4g} s")]

    def _format_process_memory(self) -> str:
        """Return a line of text about the memory of a rank's whole process; "" for GPUs."""
        nbytes = self.best_candidate.prediction.process_memory_bytes
        more = f", more than the {format_bytes(self.memory or 0)} there are" * (nbytes > (self.memory or nbytes))
        words = f"with interpreter, libraries and MPI a process takes {format_bytes(nbytes)}{more}"
        return "" if self.machine.compute.gpu else f"\n{wrap_lines(words)}"

    def _format_largest_that_fit(self) -> str:
        """Return lines of text about the largest batch, sample size and model depth that fit into memory, and about the
        options that make them fit."""
        what = "sequences" if len(self.longest) == 1 else "fields"
        layers, count = self.deepest
        most = {
            "batch": f"a global batch of {format_count(self.largest_batch, 'sample')}",
            "size": f"{what} of {' x '.join(map(str, self.longest))}" * bool(self.longest),
            "depth": f"{layers} blocks of this width ({count:,} parameters)" * (layers > 0),
        }
        lines = [
            (words, self.limits.get(name, self.best_candidate.python_text)) for name, words in most.items() if words
        ]
        same = [words for words, by in lines if by == self.best_candidate.python_text]
        others = [f"  {words}, with {by}" for words, by in lines if by != self.best_candidate.python_text]
        parts = [f"the largest that fits with these options: {', or '.join(same)}"] if same else []
        parts += ["the largest that fits with other options:", *others] if others else []
        return wrap_lines("\n".join(parts))

    def _format_scaling_table(self) -> str:
        """Return a table of predicted step times and memory for other numbers of ranks."""
        rows: list[tuple[str, ...]] = [("ranks", "step", "samples/s", "efficiency", "memory", "fits", "sends")]
        first = self.scaling[0]
        for one in self.scaling:
            sent, share = sum(one.bytes_sent.values()), first.seconds * first.mesh.size / one.seconds / one.mesh.size
            rate = f"{one.seconds:.4g} s", f"{self.samples / one.seconds:,.4g}", f"{share:.0%}"
            held = format_bytes(one.memory), _format_whether_fits(one.memory, self.memory)
            rows.append((str(one.mesh.size), *rate, *held, format_bytes(sent)))
        return format_table(rows)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a dict that can be written as JSON."""
        return {
            "machine": self.machine.name,
            "ranks": self.rank_count,
            "samples": self.samples,
            "memory": self.memory,
            "searched": self.search_space,
            "largest_batch": self.largest_batch,
            "limits": dict(self.limits),
            "longest": list(self.longest),
            "deepest": dict(zip(("blocks", "parameters"), self.deepest, strict=True)) if self.deepest[0] else None,
            "scaling": [
                {"ranks": one.mesh.size, "seconds": one.seconds, "memory": one.memory, "bytes": one.bytes_sent}
                for one in self.scaling
            ],
            "line": self.python_line,
            "toml": self.distribute_section_text,
            "found": [_candidate_to_dict(one) for one in self.candidates],
            "answer": self.fastest_configuration_line,
            "not_measured": describe_unmeasured_figures(self.best_candidate.prediction),
            "refused": [list(one) for one in self.rejected],
            "slow": [list(one) for one in self.slow],
        }


def _make_sort_key(candidate: Candidate) -> tuple[float, int]:
    """Return a sort key that orders configurations by step time, then by memory."""
    return candidate.prediction.seconds, candidate.prediction.memory


def _candidate_to_dict(candidate: Candidate) -> dict[str, Any]:
    found = candidate.prediction
    return {
        "kind": candidate.summary, "options": {name: format_option_as_python(value) for name,
        value in candidate.options.items()}, "seconds": found.seconds, "parts": dict(found.parts),
        "memory": found.memory, "process": found.process_memory_bytes, "bytes": found.bytes_sent,
        "bubble": found.bubble_share,
    }  # fmt: skip


def can_split_evenly(dims: tuple[int, ...], cells: tuple[int, ...]) -> bool:
    """Return whether a field of `cells` (the number of cells along each dim) can be split into equal parts over a grid
    of `dims` ranks."""
    return all(n % width == 0 for n, width in zip(cells, dims, strict=True))
