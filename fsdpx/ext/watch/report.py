"""The watchdog's reports on hangs and long waits: which ranks are waiting for which tensor, and what the other ranks
are doing."""

from __future__ import annotations

import math
import re
from collections.abc import Collection

from fsdpx.ext.watch.flight_recorder import FlightRecord
from fsdpx.ext.watch.rank_exits import get_process_state

__all__ = [
    "FIRST_REPORT_SECONDS",
    "HUNG_STATUS",
    "describe_lost_rank",
    "format_hang_report",
    "format_long_wait_report",
    "format_rank_ranges",
    "is_wait_report_due",
]  # fmt: skip

HUNG_STATUS = 124
"""Exit status of a job that a watchdog has ended. The command timeout(1) uses the same status."""
FIRST_REPORT_SECONDS = 60.0
"""Once a wait has lasted this many seconds, rank 0 prints a single report on which ranks are waiting, and where. The
job continues."""


def is_wait_report_due(flights: Collection[FlightRecord], last: float, now: float) -> bool:
    """Return whether a new report on long waits is due.

    It is due if the longest current wait began after the last report (at time `last`) and has already taken
    FIRST_REPORT_SECONDS."""
    begun = min((flight.since for flight in flights if flight.since and flight.exit_status is None), default=math.inf)
    return last < begun <= now - FIRST_REPORT_SECONDS


def format_long_wait_report(flights: dict[int, FlightRecord], ranks: int, timeout: float, now: float, host: str) -> str:
    """Return a report on a long wait: which ranks are waiting for which tensor in which call, and where the other
    ranks are.

    The job may be healthy, for example if a rank takes a long time to compile or to read data. For the arguments, see
    `format_hang_report`."""
    alike: dict[str, list[int]] = {}
    for rank in range(ranks):
        flight = flights.get(rank)
        if flight is None:
            text = f"no record on {host} (ended, or on another host)"
        elif flight.exit_status is not None or (flight.host == host and get_process_state(flight.process) in ("", "T")):
            text = describe_lost_rank(flight, host)
        elif flight.since:
            text = f"waiting {_describe_wait(flight)}" + (
                f", in call {flight.calls}, {flight.call}" if flight.calls else ""
            )
        else:
            text = _describe_action_and_script_line(flight, now)
        alike.setdefault(text, []).append(rank)
    head = f"fsdpx watchdog: still waiting after {FIRST_REPORT_SECONDS:g} s; "
    head += "the job goes on, and ends if nothing moves for "
    return (
        "\n  ".join(
            [f"{head}{timeout:g} s", *(f"{format_rank_ranges(group)}: {text}" for text, group in alike.items())]
        )
        + "\n"
    )


def format_hang_report(
    flights: dict[int, FlightRecord], ranks: int, silent: Collection[int], timeout: float, now: float, host: str
) -> str:
    """Return a report on a hang: which ranks are waiting for which tensor in which action, and where the other ranks
    are.

    `flights` maps ranks to flight records, and `ranks` is the number of ranks. `silent` are the ranks whose watchdogs
    have stopped. `timeout` is the number of seconds without any progress, `now` the time in seconds since 1970, and
    `host` the host on which the report is written."""
    lines = [f"fsdpx watchdog: no rank has made progress for {timeout:g} s; the job ends with status {HUNG_STATUS}"]
    waiting: dict[str, list[FlightRecord]] = {}
    for flight in flights.values():
        if flight.since and flight.rank not in silent:
            waiting.setdefault(_describe_wait(flight), []).append(flight)
    for what, group in waiting.items():
        longest = max(now - flight.since for flight in group)
        verb = "wait" if len(group) > 1 else "waits"
        lines.append(f"  {format_rank_ranges([f.rank for f in group])} {verb} {what}, for {longest:.1f} s")
    for flight in flights.values():
        if flight.rank in silent:
            lines.append(
                f"  rank {flight.rank} {describe_lost_rank(flight, host)}; it was {flight.describe_latest_action(now)}"
            )
        elif not flight.since:
            lines.append(f"  rank {flight.rank} is {flight.describe_latest_action(now)}; it stands at")
            lines += ["      " + line for line in flight.what.splitlines()[1:] or ["no stack"]]
    missing = [rank for rank in range(ranks) if rank not in flights]
    if missing:
        lines.append(f"  {format_rank_ranges(missing)}: no record on {host} (ended, or on another host)")
    return "\n".join(lines) + "\n"


def _describe_action_and_script_line(flight: FlightRecord, now: float) -> str:
    """Return a description of what a rank that is not waiting is doing: its action, if any, and the line of its script.
    """
    line = flight.what.partition("\n")[0]
    if line and (flight.last_action is None or flight.last_action.end):
        return line
    return flight.describe_latest_action(now) + (f", {line}" if line else "")


def _describe_wait(flight: FlightRecord) -> str:
    what = re.sub(r" on rank \d+ of \d+$", "", flight.what)
    last = flight.last_action
    if last is None or last.end:
        return f"outside any action for {what}"
    return f"in action {last.action} for {what}"


def describe_lost_rank(flight: FlightRecord, host: str) -> str:
    """Return a description of what may have happened to a rank that no longer responds."""
    if flight.host != host:
        return f"on {flight.host} no longer answers"
    if flight.exit_status is not None:
        return "has come to the end of its script"
    state = get_process_state(flight.process)
    if state == "":
        return f"is gone (process {flight.process} has ended)"
    if state == "T":
        return f"is stopped (process {flight.process} got SIGSTOP)"
    return f"does not answer (process {flight.process} is in native code that lets no other thread run)"


def format_rank_ranges(ranks: list[int]) -> str:
    """Return ranks as text, such as "rank 3" or "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {words}"
