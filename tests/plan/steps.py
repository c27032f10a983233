"""Steps of ranks that run, and steps measured on A100s, beside what is predicted of them."""

import csv
from pathlib import Path

from fsdpx import Mesh, nn
from fsdpx.plan import predict

__all__ = ["X", "demand_equal", "demand_equal_on_parts", "gpt", "observed", "place_on_data_axis", "steps_of_a100s"]

X = ((16, 8), "int64")
"""Inputs of `gpt`, and targets."""


def gpt(blocks=2):
    return nn.GPT(64, 32, blocks, 2, 8)


def observed(made, x, y):
    """Traffic and memory of one step of a trainer, and by action the bytes of passing rows that have no memory."""
    made.inspect.reset_counters()
    parts, ledger = {}, made.inspect.engine.state.ledger
    absent = lambda: sum(row.nbytes for row in ledger if row.is_freed_by_update and row.key not in ledger.arrays)  # noqa: E731
    made.inspect.engine.add_observer(lambda action: parts.setdefault(str(action), absent()))
    made.step(x, y)
    report = made.report()
    traffic = {k: (v.calls, v.bytes) for k, v in report.traffic.items() if k[0] != "world"}
    return traffic, report.memory, parts


def demand_equal(found, real):
    """Bytes, calls and memory of each class are those of its rank. real: what `observed` gave on all ranks."""
    for one in found.classes:
        traffic, memory, absent = real[one.rank]
        assert dict(one.traffic) == traffic
        memory["gradients"] -= absent[one.peak.action]  # those that have no memory yet when most is held
        there = {kind: n for kind, n in memory.items() if n}
        assert {kind: n for kind, n in one.memory.items() if kind != "activations"} == there


def demand_equal_on_parts(found, real):
    """As `demand_equal`, of ranks that hold a part of a field or mesh: also the most that one sends to the others."""
    demand_equal(found, real)
    sent = [{call: n for (axis, call), (_, n) in traffic.items() if axis == "domain"} for traffic, *_ in real]
    assert found.bytes_sent["domain"] == max(sum(n for call, n in one.items() if call != "recv") for one in sent)


def place_on_data_axis(found, rank, parts, samples):
    """The ranks that share the samples of a rank, one for each part; which part it has, and how many of the samples."""
    data = found.mesh.ranks_along(found.mesh.coordinates_of(rank), ("replica", "shard"))
    group, part = divmod(data.index(rank), parts)
    groups = found.mesh.width_of("data") // parts
    return data[group * parts :][:parts], part, samples * (group + 1) // groups - samples * group // groups


def steps_of_a100s(each):
    """Predicted and measured seconds of every so many rows of the file, trained as Megatron does it."""
    lines = Path(__file__).with_name("a100-one-node.csv").read_text().splitlines()
    for row in [*csv.DictReader(line for line in lines if not line.startswith("#"))][::each]:
        n = {name: int(value) for name, value in row.items() if name != "step_ms"}
        tokens = (n["global_batch"], n["seq"]), "int64"
        found = predict(
            nn.GPT(51200, n["hidden"], n["layers"], n["heads"], max(n["seq"], 2048)),
            (tokens, tokens),
            ranks=n["gpus"],
            machine="a100-dgx-200g",
            mesh=Mesh(replica=n["data"], pipe=n["pipe"], tensor=n["tensor"]),
            microbatches=n["global_batch"] // n["data"] // n["micro_batch"],
            recompute="all",
            precision="fp16",
        )
        yield found.seconds, float(row["step_ms"]) / 1e3
