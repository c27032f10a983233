"""Experts, adapters of low rank, and layers that are computed again."""

import gc
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from amount import few, in_full
from tensor_ranks import compare, environment, full, local, on_axis

import fsdpx
from fsdpx import FakeCommunicator, Trainer, nn, optim, spawn
from fsdpx.core.array import shapes
from fsdpx.core.array.random import Random
from fsdpx.core.checkpoint.read import contents
from fsdpx.core.comm import Axes, Communicator, Mesh, connect
from fsdpx.core.comm.mesh import alone
from fsdpx.errors import CheckpointError, ConfigError, DataError
from fsdpx.nn.container import Recomputed
from fsdpx.nn.init import normal
from fsdpx.nn.layer import Env, Layer

rng = np.random.default_rng(0)
ROWS = rng.standard_normal((2, 5, 4))


def moe(experts: int = 5, **options: Any) -> nn.MoE:
    return nn.MoE(4, 3, experts, 2, balance=0.3, init=normal(0.7), **options)


@pytest.mark.parametrize("width", few((2, 3, 4), 2))
@pytest.mark.parametrize("split", [False, True])
def test_whole_inputs(width: int, split: bool) -> None:
    planned, _ = compare(moe(), nn.MSE(), ROWS, ROWS + 1, width, split)
    assert type(planned.model) is nn.CutMoE
    assert planned.partial == {"router"}
    assert planned.model.specs()["down"].cut == nn.Cut(0)


@pytest.mark.parametrize("sequence", [None, "parallel", "ulysses", "ring"])
def test_a_model_however_its_sequences_are_cut(sequence: str | None) -> None:
    """Seven positions over two ranks, and five experts."""
    model = nn.Llama(11, 8, 2, 2, 8, hidden=6, experts=5, balance=0.3)
    tokens = rng.integers(0, 11, (2, 8))
    planned, runs = compare(model, nn.CrossEntropy(), tokens[:, :-1], tokens[:, 1:], 2, sequence=sequence)
    assert {"blocks.0.mlp.router", "blocks.1.mlp.router"} <= planned.partial
    assert not {"blocks.0.mlp.gate", "blocks.1.mlp.down"} & planned.partial
    assert all(run.forward.of("tensor", "all_to_all").calls >= 6 for run in runs)


def test_ranks_without_rows_and_experts_nobody_chooses() -> None:
    """One position on four ranks; a router that sends everything to one rank's experts."""
    compare(moe(), nn.MSE(), ROWS[:1, :1], ROWS[:1, :1] + 1, 4)
    model, p = moe(4), full(moe(4))
    p["router"] = np.array([[9.0] * 4, [8.0] * 4, [-9.0] * 4, [-9.0] * 4])
    x = np.abs(ROWS)
    want, _ = model.forward(environment(), p, x)
    planned = nn.parallelise(model, nn.MSE(), 2)

    def body(axes: Axes) -> tuple[Any, list[int]]:
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
    experts, _ = compare(model, nn.CrossEntropy(), tokens, tokens, 2, plan={"blocks.*.mlp": nn.Own})
    assert [n for n, s in experts.model.specs().items() if s.cut] == [
        f"blocks.0.mlp.{n}" for n in ("gate", "up", "down")
    ]
    attention, _ = compare(model, nn.CrossEntropy(), tokens, tokens, 2, plan={"blocks.*.attn": nn.Own})
    assert not any(s.cut for n, s in attention.model.specs().items() if "mlp" in n)


def test_bytes_that_go_to_others() -> None:
    """Ten rows; all go to the first rank, where its own five stay."""
    cut = nn.CutMoE(4, 3, 2, 1)
    p = full(cut) | {"router": np.array([[9.0] * 4, [-9.0] * 4])}

    def body(axes: Axes) -> list[int]:
        cut.forward(environment(axes), local(cut, p, axes.tensor.rank, 2), np.abs(ROWS))
        counted = axes.counters
        return [counted.of("tensor", verb).bytes for verb in ("all_to_all", "all_gather")]

    result = 5 * 4 * 8
    assert on_axis(2, body) == [[result, 16 + result], [result + 5 * 8, 16 + result]]


def test_shapes_without_data() -> None:
    axes = connect(Mesh(shard=1, tensor=4), FakeCommunicator(1, 4))
    env = nn.Env(shapes, axes, Random(0))
    cut = nn.CutMoE(4, 3, 5, 2, sequence=True)
    p = {n: shapes.ShapeArray(s.local(1, 4), np.float32) for n, s in cut.specs().items()}
    x = shapes.ShapeArray((2, 5, 4), np.float32)
    y, saved = cut.forward(env, p, x)
    dx, kept = cut.backward_input(env, p, saved, y)
    cut.backward_params(env, p, kept)
    assert y.shape == dx.shape == (2, 5, 4)
    assert axes.counters.tallies == {}


def test_inputs_of_several_lengths_are_not_cut_by_samples() -> None:
    with pytest.raises(DataError, match="input: sequence='samples' takes inputs that all have one length of dim 1"):
        on_axis(2, lambda axes: nn.Enter(0).forward(environment(axes), {}, ROWS))


@pytest.mark.parametrize(
    ("width", "options", "message"),
    [
        (3, {}, "'' has 2 experts, fewer than the 3 ranks of the tensor axis: .* or a tensor_plan that leaves"),
        (2, {"plan": {"": nn.Column}}, "cannot be cut as Column: .* Own attention, MLP, MoE and what contains them"),
    ],
)
def test_what_cannot_be_cut(width: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        nn.parallelise(nn.MoE(4, 3, 2, 1), nn.MSE(), width, **options)


TARGETS = ["blocks.1.attn.qkv", "mlp.up", "*.mlp.down"]
RANK, ALPHA = 2, 6.0

PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ddp": (2, {"strategy": "ddp"}),
    "fsdp": (3, {"strategy": "fsdp", "microbatches": 2, "recompute": "all"}),
    "pipe": (2, {"mesh": Mesh(pipe=2), "microbatches": 2, "schedule": "zb-h1"}),
}

TENSOR: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, {"mesh": Mesh(shard=1, tensor=2), "strategy": "ddp"}),
    "sequence": (4, {"mesh": Mesh(shard=2, tensor=2), "strategy": "fsdp", "sequence": "parallel"}),
    "tensor pipe": (4, {"mesh": Mesh(pipe=2, tensor=2), "microbatches": 2, "schedule": "zb-h1"}),
}


def plain() -> nn.Layer:
    return nn.GPT(13, 8, 2, 2, 6)


def make(comm: Communicator, model: nn.Layer, **options: Any) -> Trainer:
    return fsdpx.distribute(
        model, comm=comm, loss=nn.CrossEntropy(), optimizer=optim.AdamW(lr=1e-2), precision="float64", **options
    )


def batch(trainer: Trainer) -> tuple[np.ndarray, np.ndarray]:
    """This rank's part of 12 samples."""
    x = np.random.default_rng(0).integers(0, 13, (12, 6))
    size, rank = trainer.data.size, trainer.data.rank
    mine = slice(12 * rank // size, 12 * (rank + 1) // size)
    return x[mine], (3 * x[mine] + 1) % 13


def filled(trainer: Trainer) -> dict[str, np.ndarray]:
    """Adapters that are not zero."""
    rng = np.random.default_rng(1)
    values = trainer.parameters()
    values |= {name: rng.normal(size=values[name].shape) for name in values if "lora_" in name}
    trainer.load_parameters(values)
    return values


def gradients(comm: Communicator, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of the model without adapters."""
    trainer = make(comm, plain())
    trainer.load_parameters(values)
    trainer.accumulate(*batch(trainer))
    return trainer.gradients()


@pytest.mark.parametrize("place", [*PLACES, *TENSOR])
def test_gradients_are_those_of_the_formula(place: str) -> None:
    """With W + s B A for W in the plain model, whose gradient is G: B has s G A^T, and A has s B^T G."""
    ranks, options = (PLACES | TENSOR)[place]

    def run(comm: Communicator) -> tuple[Any, ...]:
        trainer = make(comm, nn.lora(plain(), RANK, ALPHA, targets=TARGETS), group_bytes=0, **options)
        values, merged = filled(trainer), fsdpx.merged_parameters(trainer)
        trainer.accumulate(*batch(trainer))
        return values, merged, trainer.gradients()

    values, merged, found = spawn(run, ranks)[0]
    full, scale = spawn(lambda comm: gradients(comm, merged), 1)[0], ALPHA / RANK
    names = {f"blocks.{i}.mlp.{n}" for i in (0, 1) for n in ("up", "down")} | {"blocks.1.attn.qkv"}
    assert {name.partition(".lora_")[0] for name in found} == names
    assert len(found) == 2 * len(names)
    for name in names:
        down, up, g = values[f"{name}.lora_A.weight"], values[f"{name}.lora_B.weight"], full[f"{name}.weight"]
        np.testing.assert_allclose(found[f"{name}.lora_B.weight"], scale * g @ down.T, rtol=0, atol=1e-12)
        np.testing.assert_allclose(found[f"{name}.lora_A.weight"], scale * up.T @ g, rtol=0, atol=1e-12)


@in_full
def test_training_with_dropout_is_the_same_on_every_mesh() -> None:
    """Numbers of three steps; the first loss is that of the plain model, and nothing frozen moves."""

    def run(comm: Communicator, options: dict[str, Any]) -> tuple[list[float], Any, Any]:
        trainer = make(comm, nn.lora(plain(), RANK, ALPHA, 0.25, targets=TARGETS), group_bytes=0, **options)
        before = trainer.parameters()
        return [trainer.step(*batch(trainer)) for _ in range(3)], before, trainer.parameters()

    losses, before, want = spawn(lambda comm: run(comm, {}), 1)[0]
    assert losses[0] == spawn(lambda comm: make(comm, plain()).step(*batch(make(comm, plain()))), 1)[0]
    assert {n for n in want if np.any(want[n] != before[n])} == {n for n in want if ".lora_" in n}
    for ranks, options in [*PLACES.values(), (2, {"strategy": "fsdp", "chunks": 4})]:
        same, _, found = spawn(lambda comm, options=options: run(comm, options), ranks)[0]
        np.testing.assert_allclose(same, losses, rtol=1e-12)
        assert all(np.allclose(found[n], want[n], rtol=0, atol=1e-9) for n in want)


@in_full
def test_a_tensor_axis_trains_what_one_process_does(tmp_path: Path) -> None:
    """What the model gives, three steps, merged weights and files, which hold whole matrices."""

    def run(comm: Communicator, options: dict[str, Any]) -> tuple[Any, ...]:
        trainer = make(comm, nn.lora(plain(), RANK, ALPHA, targets=TARGETS), **options)
        values = filled(trainer)
        given = trainer.evaluate(*batch(trainer))
        losses = [trainer.step(*batch(trainer)) for _ in range(3)]
        fsdpx.save_adapter(trainer, tmp_path / "a")
        found = trainer.parameters()
        trainer.load_parameters(values)
        fsdpx.load_adapter(trainer, tmp_path / "a")
        again = trainer.parameters()
        assert all(np.array_equal(again[name], found[name]) for name in found)
        return [given, *losses], found, fsdpx.merged_parameters(trainer)

    losses, *want = spawn(lambda comm: run(comm, {}), 1)[0]
    for ranks, options in TENSOR.values():
        same, *found = spawn(lambda comm, options=options: run(comm, options), ranks)[0]
        np.testing.assert_allclose(same, losses, rtol=1e-10)
        for a, b in zip(found, want, strict=True):
            assert a.keys() == b.keys()
            assert all(np.allclose(a[n], b[n], rtol=0, atol=1e-10) for n in b)


def test_the_program_and_the_wire_know_adapters_alone() -> None:
    """Adapters of the last block of three: nothing runs backward below it, and its two matrices are what is reduced."""

    def run(comm: Communicator) -> tuple[Any, ...]:
        model = nn.lora(nn.GPT(13, 8, 3, 2, 6), RANK, ALPHA, targets="blocks.2.attn.out")
        trainer = make(comm, model, group_bytes=0)
        trainer.step(*batch(trainer))
        return [str(a) for a in trainer.program.actions if a.op in ("B", "I", "W", "REDUCE")], trainer.report()

    actions, report = spawn(run, 2)[0]
    assert actions == ["B4.0", "B3.0", "REDUCE4"]
    counted = report.traffic["shard", "reduce_scatter"]
    assert (counted.calls, counted.bytes) == (1, RANK * (8 + 8) * 8 // 2)
    assert counted == report.predicted["shard", "reduce_scatter"]


@in_full
def test_files_of_peft(tmp_path: Path) -> None:
    def run(comm: Communicator, rank: int = RANK, targets: Any = TARGETS) -> Trainer:
        return make(comm, nn.lora(plain(), rank, ALPHA, targets=targets))

    def write(comm: Communicator) -> tuple[Any, Any]:
        trainer = run(comm)
        values = filled(trainer)
        fsdpx.save_adapter(trainer, tmp_path / "a", "base")
        merged = make(comm, plain())
        merged.load_weights(fsdpx.merged_parameters(trainer))
        x, _ = batch(trainer)
        np.testing.assert_allclose(merged.predict(x), trainer.predict(x), rtol=0, atol=1e-12)
        again = run(comm)
        fsdpx.load_adapter(again, tmp_path / "a")
        return values, again.parameters()

    for values, found in spawn(write, 2):
        assert all(np.array_equal(values[name], found[name]) for name in values)
    config = json.loads((tmp_path / "a/adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["bias"]) == ("LORA", RANK, ALPHA, "none")
    assert "blocks.1.attn.qkv" in config["target_modules"]
    names = contents(tmp_path / "a/adapter_model.safetensors").tensors
    assert "base_model.model.blocks.0.mlp.up.lora_A.weight" in names
    with pytest.raises(CheckpointError, match=r"has r 2, the model 3: make it with nn.lora alike"):
        spawn(lambda comm: fsdpx.load_adapter(run(comm, rank=3), tmp_path / "a"), 2)
    for key, value in (("use_rslora", True), ("rank_pattern", {"mlp.up": 8}), ("bias", "all")):
        (tmp_path / "c").mkdir(exist_ok=True)
        (tmp_path / "c/adapter_config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(CheckpointError, match=f"has {key} .*, which nn.lora does not know: only"):
            spawn(lambda comm: fsdpx.load_adapter(run(comm), tmp_path / "c"), 2)
    with pytest.raises(CheckpointError, match=r"not in the model: blocks\.0\.mlp\.down\.lora_A\.weight"):
        spawn(lambda comm: fsdpx.load_adapter(run(comm, targets="mlp.up"), tmp_path / "a"), 2)
    with pytest.raises(ConfigError, match=r"save_adapter: the model has no adapters: make it with nn.lora"):
        spawn(lambda comm: fsdpx.save_adapter(make(comm, plain()), tmp_path / "b"), 1)


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ConfigError, match=r"'q_proj' matches no Linear layer; there are '0\.up', '0\.down', '1'$"):
        nn.lora(nn.Chain(nn.MLP(4), nn.Linear(4, 2)), targets=["*.up", "q_proj"])
    with pytest.raises(
        ConfigError, match=r"'blocks\.0\.mlp\.up' LoRALinear\(.*, since its adapters have dropout=0\.5: use"
    ):
        spawn(lambda comm: make(comm, nn.lora(plain(), dropout=0.5, targets="mlp.up"), mesh=Mesh(tensor=2)), 2)
    tied = nn.lora(plain(), targets="head")
    with pytest.raises(ConfigError, match=r"'head.weight' is tied to 'embed.weight', which has no adapter"):
        spawn(lambda comm: fsdpx.merged_parameters(make(comm, tied)), 1)


def env() -> Env:
    return Env(np, alone(), Random(0), True)


MODELS = {
    "block": nn.TransformerBlock(16, 2, dropout=0.1),
    "norms in a row": nn.Residual(nn.Chain(nn.LayerNorm(16), nn.RMSNorm(16), nn.Linear(16, 16), nn.RMSNorm(16))),
    "containers in containers": nn.Residual(nn.Chain(nn.TransformerBlock(16, 2), nn.TransformerBlock(16, 2))),
    "given out": nn.Residual(nn.LayerNorm(16)),
}


def run(layer: Layer) -> tuple[Any, Any, dict[str, Any]]:
    rng = np.random.default_rng(1)
    p = {name: rng.standard_normal(spec.shape).astype(np.float32) for name, spec in layer.specs().items()}
    g = {name: np.zeros_like(array) for name, array in p.items()}
    x, dy = rng.standard_normal((2, 3, 5, 16)).astype(np.float32)
    y, saved = layer.forward(env(), p, x)
    dx = layer.backward(env(), p, g, saved, dy)
    return saved, (y, dx), g


def arrays(held: Any) -> Iterator[Any]:
    if isinstance(held, tuple):
        for part in held:
            yield from arrays(part)
    else:
        yield held


@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_with_less_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, results, g = run(MODELS[name])
    monkeypatch.setattr(nn.LayerNorm, "cheap", False)
    monkeypatch.setattr(nn.RMSNorm, "cheap", False)
    more, want, want_g = run(MODELS[name])
    for got, wanted in zip([*results, *g.values()], [*want, *want_g.values()], strict=True):
        assert got.tobytes() == wanted.tobytes()
    kept, whole = ({id(a): a.nbytes for a in arrays(s) if isinstance(a, np.ndarray)} for s in (saved, more))
    if name != "given out":
        assert sum(kept.values()) < sum(whole.values())
        assert any(isinstance(part, Recomputed) for part in arrays(saved))


def test_nothing_is_left_behind() -> None:
    """No cycle keeps activations alive until the collector comes."""
    gc.collect()
    gc.disable()
    try:
        saved, _, _ = run(MODELS["block"])
        watched = [weakref.ref(a) for a in arrays(saved) if isinstance(a, np.ndarray)]
        assert watched
        del saved
        assert not any(ref() is not None for ref in watched)
    finally:
        gc.enable()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("split", [False, True])
def test_attention_made_again_in_backward(dropout: float, split: bool) -> None:
    """Only queries, keys and values are kept, of everything that attention makes."""
    layer = nn.MultiHeadAttention(16, 2, dropout=dropout)
    kept, recomputed = (attention(layer, names, split) for names in (frozenset[str](), frozenset({"attention"})))
    for got, wanted in zip(recomputed[1:], kept[1:], strict=True):
        assert got.tobytes() == wanted.tobytes()
    shapes = [a.shape for a in arrays(recomputed[0])]
    assert shapes == [(3, 5, 16), (3, 5, 48)]
    assert len(list(arrays(kept[0]))) > len(shapes)


@pytest.mark.parametrize("split", [False, True])
def test_heads_that_a_norm_made_are_recomputed_too(split: bool) -> None:
    """Queries and keys come from a cheap layer, whose results are placeholders themselves."""
    layer = nn.GroupedQueryAttention(16, 2, 1, None, qk_norm=1e-6)
    kept, recomputed = (attention(layer, names, split) for names in (frozenset[str](), frozenset({"attention"})))
    for got, wanted in zip(recomputed[1:], kept[1:], strict=True):
        assert got.tobytes() == wanted.tobytes()


def attention(layer: Layer, recompute: frozenset[str], split: bool) -> list[Any]:
    rng = np.random.default_rng(1)
    p = {name: rng.standard_normal(spec.shape) for name, spec in layer.specs().items()}
    g = {name: np.zeros_like(array) for name, array in p.items()}
    x, dy = rng.standard_normal((2, 3, 5, 16))
    world = Env(np, alone(), Random(0), True, recompute).at("attn")
    assert world.recompute == recompute
    y, saved = layer.forward(world, p, x)
    if split:
        dx, rest = layer.backward_input(world, p, saved, dy)
        layer.backward_params(world, g, rest)
    else:
        dx = layer.backward(world, p, g, saved, dy)
    return [saved, y, dx, *g.values()]


def test_statistics_do_not_move_when_a_forward_is_made_again() -> None:
    layer, x = nn.BatchNorm(3), np.random.default_rng(1).standard_normal((4, 3))
    p = {name: np.ones(3) for name in layer.specs()}
    first, _ = layer.forward(env(), p, x)
    moved = p["running_mean"].copy()
    assert not np.array_equal(moved, np.ones(3))
    second, _ = layer.forward(Env(np, alone(), Random(0), True, recomputing=True).at("norm"), p, x)
    assert first.tobytes() == second.tobytes()
    np.testing.assert_array_equal(p["running_mean"], moved)


def test_a_cheap_layer_must_say_how() -> None:
    class Forgetful(nn.Tanh):
        cheap = True

    layer = nn.Residual(nn.Chain(Forgetful(), nn.Linear(16, 16)))
    with pytest.raises(ConfigError, match=r"Forgetful\(\) is cheap but does not define recompute"):
        run(layer)
