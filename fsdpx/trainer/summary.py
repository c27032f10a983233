"""The summary: the reports of all ranks in one table, as PETSc's -log_view has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdpx.state.clock import Spent
from fsdpx.state.tables import bytes_text, table
from fsdpx.trainer.report import Report, call_text, slowest
from fsdpx.trainer.routing import Routing, routing_table, together

__all__ = ["Summary"]

NONE = Spent()
MEANING = """\
calls and bytes of all ranks; seconds in the actions of a verb, by rank; max/min: how unequal ranks are; waited: seconds
that a rank stood still before these actions, in the mean; GB/s: bytes of a rank over the time that its transfers were
under way; hidden: share of that time in which the rank computed."""


ROUTED = """\
choices: positions x experts each goes to; most, least: share of the expert that was chosen most and least; entropy: 1
where all are chosen alike, 0 where one is; dropped: choices that no expert computed; busiest: rows by rank."""


@dataclass(frozen=True)
class Summary:
    """reports: of all ranks, by rank."""

    reports: tuple[Report, ...]

    def __str__(self) -> str:
        one = self.reports[0]
        model = f"{one.parameters:,} parameters in {one.units} units"
        seconds = max(report.seconds for report in self.reports)
        head = f"{len(self.reports)} ranks: {model}, {one.steps} steps, {seconds:.1f} s"
        parts = (f"{self._verbs()}\n{MEANING}", self._moved(), *self._routed(), self._memory(), *self._layers())
        return "\n\n".join([head, *parts])

    @property
    def routing(self) -> dict[str, Routing]:
        """Of layers with experts, by path: choices of all positions, and rows that each rank's experts computed."""
        return together(report.routing for report in self.reports)

    def spent(self, verb: str) -> list[Spent]:
        """By rank; zeros where a rank has no such actions."""
        return [report.times.get(verb, NONE) for report in self.reports]

    def bandwidth(self, verb: str) -> float | None:
        """Bytes per second of a rank while its transfers are under way; None where nothing moves."""
        rows = self.spent(verb)
        moved, seconds = sum(one.nbytes for one in rows), sum(one.flown or one.seconds for one in rows)
        return moved / seconds if moved and seconds else None

    def hidden(self, verb: str) -> float | None:
        """Share of the time that its transfers were under way in which ranks computed."""
        flown, busy = (sum(getattr(one, name) for one in self.spent(verb)) for name in ("flown", "busy"))
        return 1 - busy / flown if flown else None

    def _weight(self, verb: str) -> float:
        return -sum(one.seconds + one.waited for one in self.spent(verb))

    def _verbs(self) -> str:
        verbs = {verb for report in self.reports for verb in report.times}
        rows: list[tuple[str, ...]] = [
            ("verb", "calls", "seconds mean", "min", "max", "max/min", "waited", "bytes", "GB/s", "hidden")
        ]
        for verb in sorted(verbs, key=self._weight):
            spent = self.spent(verb)
            seconds = [one.seconds for one in spent]
            least, most = min(seconds), max(seconds)
            moved, rate, hidden = sum(one.nbytes for one in spent), self.bandwidth(verb), self.hidden(verb)
            rows.append(
                (
                    verb, f"{sum(one.calls for one in spent):,}",
                    f"{np.mean(seconds):.3f}", f"{least:.3f}", f"{most:.3f}",
                    f"{most / least:.2f}" if least else "", f"{np.mean([one.waited for one in spent]):.3f}",
                    bytes_text(moved) if moved else "", f"{rate / 1e9:.3f}" if rate else "",
                    "" if hidden is None else f"{100 * hidden:.0f} %",
                )
            )  # fmt: skip
        return table(rows)

    def _moved(self) -> str:
        rows: list[tuple[str, ...]] = [("moved", "calls", "bytes of all ranks", "least of a rank", "most")]
        for key in sorted({key for report in self.reports for key in report.traffic}):
            counts = [report.traffic.get(key) for report in self.reports]
            moved = [0 if one is None else one.bytes for one in counts]
            calls = sum(0 if one is None else one.calls for one in counts)
            rows.append((call_text(*key), f"{calls:,}", *map(bytes_text, (sum(moved), min(moved), max(moved)))))
        return table(rows if len(rows) > 1 else [*rows, ("nothing: one rank", "", "", "", "")])

    def _layers(self) -> Iterator[str]:
        """The slowest ones, where ranks keep a trace."""
        paths = dict.fromkeys(path for report in self.reports for path in report.layers)
        return slowest({path: {r.rank: r.layers[path] for r in self.reports if path in r.layers} for path in paths})

    def _routed(self) -> list[str]:
        return [f"{text}\n{ROUTED}" for text in routing_table(self.routing, whole=True)]

    def _memory(self) -> str:
        """The rank that holds most of a kind stands for all."""
        kinds = sorted({kind for report in self.reports for kind in report.high_water})
        rows: list[tuple[str, ...]] = [("memory of a rank at its most", "planned", "held", "rank")]
        for kind in kinds:
            held = [report.high_water.get(kind, (0, 0)) for report in self.reports]
            rank = max(range(len(held)), key=lambda rank: held[rank][1])
            planned, most = held[rank]
            rows.append((kind, "" if planned is None else bytes_text(planned), bytes_text(most), str(rank)))
        peaks = [report.peak_rss for report in self.reports]
        rows.append(("process (RSS)", "", bytes_text(max(peaks)), str(peaks.index(max(peaks)))))
        return table(rows)

    def as_json(self) -> list[dict[str, Any]]:
        """By rank, for files and pages."""
        return [_row(report) for report in self.reports]


def _row(report: Report) -> dict[str, Any]:
    names = ("rank", "ranks", "steps", "parameters", "units", "seconds", "memory", "peak_rss", "overlap", "high_water")
    return {
        **{name: getattr(report, name) for name in names},
        "times": {verb: one._asdict() for verb, one in report.times.items()},
        "layers": {path: one._asdict() for path, one in report.layers.items()},
        "routing": {path: {"chosen": one.chosen, "computed": one.computed} for path, one in report.routing.items()},
        "traffic": [[axis, call, one.calls, one.bytes] for (axis, call), one in sorted(report.traffic.items())],
    }
