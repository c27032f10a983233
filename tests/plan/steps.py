"""A step of ranks that run, beside what was predicted of it."""

from typing import Any

from fsdpx.plan import Prediction

__all__ = ["demand_equal", "observed"]


def observed(made: Any, x: Any, y: Any) -> Any:
    """Traffic and memory of one step of a trainer, and by action the bytes of passing rows that have no memory."""
    made.inspect.reset()
    parts, ledger = dict[str, int](), made.inspect.engine.state.ledger
    absent = lambda: sum(row.nbytes for row in ledger if row.passing and row.key not in ledger.arrays)  # noqa: E731
    made.inspect.engine.observers.append(lambda action: parts.setdefault(str(action), absent()))
    made.step(x, y)
    report = made.report()
    traffic = {k: (v.calls, v.bytes) for k, v in report.traffic.items() if k[0] != "world"}
    return traffic, report.memory, parts


def demand_equal(found: Prediction, real: Any) -> None:
    """Bytes, calls and memory of each class are those of its rank. real: what `observed` gave on all ranks."""
    for one in found.classes:
        traffic, memory, absent = real[one.rank]
        assert dict(one.traffic) == traffic
        memory["gradients"] -= absent[one.peak.action]  # those that have no memory yet when most is held
        there = {kind: n for kind, n in memory.items() if n}
        assert {kind: n for kind, n in one.memory.items() if kind != "activations"} == there
