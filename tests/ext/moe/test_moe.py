"""Experts on the ranks of a tensor axis."""

from typing import Any

import numpy as np
import pytest
from amount import few
from tensor_ranks import compare, environment, full, local, on_axis

from fsdpx import FakeCommunicator, nn
from fsdpx.core.array import shapes
from fsdpx.core.array.random import Random
from fsdpx.core.comm import Mesh, MeshAxes, connect_axes
from fsdpx.errors import ConfigError, DataError
from fsdpx.nn.init import normal

rng = np.random.default_rng(0)
ROWS = rng.standard_normal((2, 5, 4))


def moe(experts: int = 5, **options: Any) -> nn.MoE:
    return nn.MoE(4, 3, experts, 2, balance=0.3, init=normal(0.7), **options)


@pytest.mark.parametrize("width", few((2, 3, 4), 2))
@pytest.mark.parametrize("split", [False, True])
def test_whole_inputs(width: int, split: bool) -> None:
    planned, _ = compare(moe(), nn.MSELoss(), ROWS, ROWS + 1, width, split)
    assert type(planned.model) is nn.sharding.ShardedMoE
    assert planned.partial == {"router"}
    assert planned.model.specs()["down"].cut == nn.sharding.ShardSpec(0)


@pytest.mark.parametrize("sequence", [None, "parallel", "ulysses", "ring"])
def test_a_model_however_its_sequences_are_cut(sequence: str | None) -> None:
    """Seven positions over two ranks, and five experts."""
    model = nn.Llama(11, 8, 2, 2, 8, hidden=6, experts=5, balance=0.3)
    tokens = rng.integers(0, 11, (2, 8))
    planned, runs = compare(model, nn.CrossEntropyLoss(), tokens[:, :-1], tokens[:, 1:], 2, sequence=sequence)
    assert {"blocks.0.mlp.router", "blocks.1.mlp.router"} <= planned.partial
    assert not {"blocks.0.mlp.gate", "blocks.1.mlp.down"} & planned.partial
    assert all(run.forward.sum_counts("tensor", "all_to_all").calls >= 6 for run in runs)


def test_ranks_without_rows_and_experts_nobody_chooses() -> None:
    """One position on four ranks; a router that sends everything to one rank's experts."""
    compare(moe(), nn.MSELoss(), ROWS[:1, :1], ROWS[:1, :1] + 1, 4)
    model, p = moe(4), full(moe(4))
    p["router"] = np.array([[9.0] * 4, [8.0] * 4, [-9.0] * 4, [-9.0] * 4])
    x = np.abs(ROWS)
    want, _ = model.forward(environment(), p, x)
    planned = nn.sharding.parallelize(model, nn.MSELoss(), 2)

    def body(axes: MeshAxes) -> tuple[Any, list[int]]:
        mine = local(planned.model, p, axes.tensor.rank, 2)
        y, _ = planned.model.forward(environment(axes), mine, x)
        return y, axes.counters.tallies[""]

    found = on_axis(2, body)
    for y, _ in found:
        np.testing.assert_allclose(y, want, rtol=1e-12)
    assert [tally for _, tally in found] == [[5, 5, 0, 0, 20], [5, 5, 0, 0, 0]]


def test_a_plan_that_leaves_attention_whole_or_experts() -> None:
    model = nn.Llama(11, 8, 1, 2, 8, hidden=6, experts=4)
    tokens = rng.integers(0, 11, (2, 8))

    def cut(part: str) -> list[str]:
        plan = {f"blocks.*.{part}": nn.sharding.LayerDefault}
        planned, _ = compare(model, nn.CrossEntropyLoss(), tokens, tokens, 2, plan=plan)
        return [name for name, spec in planned.model.specs().items() if spec.cut]

    assert cut("mlp") == ["blocks.0.mlp.gate", "blocks.0.mlp.up", "blocks.0.mlp.down"]
    assert not any("mlp" in name for name in cut("attn"))


def test_bytes_that_go_to_others() -> None:
    """Ten rows; all go to the first rank, where its own five stay."""
    cut = nn.sharding.ShardedMoE(4, 3, 2, 1)
    p = full(cut) | {"router": np.array([[9.0] * 4, [-9.0] * 4])}

    def body(axes: MeshAxes) -> list[int]:
        cut.forward(environment(axes), local(cut, p, axes.tensor.rank, 2), np.abs(ROWS))
        return [axes.counters.sum_counts("tensor", verb).bytes for verb in ("all_to_all", "all_gather")]

    result = 5 * 4 * 8
    assert on_axis(2, body) == [[result, 16 + result], [result + 5 * 8, 16 + result]]


def test_shapes_without_data() -> None:
    axes = connect_axes(Mesh(shard=1, tensor=4), FakeCommunicator(1, 4))
    env = nn.LayerContext(shapes, axes, Random(0))
    cut = nn.sharding.ShardedMoE(4, 3, 5, 2, sequence=True)
    p = {n: shapes.ShapeArray(s.local_shape(1, 4), np.float32) for n, s in cut.specs().items()}
    x = shapes.ShapeArray((2, 5, 4), np.float32)
    y, saved = cut.forward(env, p, x)
    dx, kept = cut.backward_input(env, p, saved, y)
    cut.backward_params(env, p, kept)
    assert y.shape == dx.shape == (2, 5, 4)
    assert axes.counters.tallies == {}


def test_inputs_of_several_lengths_are_not_cut_by_samples() -> None:
    with pytest.raises(DataError, match="input: sequence='samples' takes inputs that all have one length of dim 1"):
        on_axis(2, lambda axes: nn.sharding.SplitSequence(0).forward(environment(axes), {}, ROWS))


@pytest.mark.parametrize(
    ("width", "options", "message"),
    [
        (3, {}, "'' has 2 experts, fewer than the 3 ranks of the tensor axis: .* or a tensor_plan that leaves"),
        (2, {"plan": {"": nn.sharding.ColumnParallel}},
         "cannot be sharded as ColumnParallel: .* VocabParallel an Embedding, .* and what contains them"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut(width: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        nn.sharding.parallelize(nn.MoE(4, 3, 2, 1), nn.MSELoss(), width, **options)
