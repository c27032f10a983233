"""Adapters of low rank: their gradients, training, files and errors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import part

import fsdpx
from fsdpx import Trainer, nn, optim, spawn
from fsdpx.core.checkpoint.read import read_header
from fsdpx.core.comm import Communicator, Mesh
from fsdpx.errors import CheckpointError, ConfigError

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
        model, comm=comm, loss=nn.CrossEntropyLoss(), optimizer=optim.AdamW(lr=1e-2), precision="float64", **options
    )


def batch(trainer: Trainer) -> tuple[np.ndarray, np.ndarray]:
    """This rank's part of 12 samples."""
    x = np.random.default_rng(0).integers(0, 13, (12, 6))[part(trainer.data_group, 12)]
    return x, (3 * x + 1) % 13


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
        trainer = make(comm, nn.add_lora(plain(), RANK, ALPHA, targets=TARGETS), group_bytes=0, **options)
        values, merged = filled(trainer), fsdpx.gather_merged_parameters(trainer)
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


def test_training_with_dropout_is_the_same_on_every_mesh() -> None:
    """Numbers of three steps; the first loss is that of the plain model, and nothing frozen moves."""

    def run(comm: Communicator, options: dict[str, Any]) -> tuple[list[float], Any, Any]:
        trainer = make(comm, nn.add_lora(plain(), RANK, ALPHA, 0.25, targets=TARGETS), group_bytes=0, **options)
        before = trainer.parameters()
        return [trainer.step(*batch(trainer)) for _ in range(3)], before, trainer.parameters()

    losses, before, want = spawn(lambda comm: run(comm, {}), 1)[0]
    assert losses[0] == spawn(lambda comm: make(comm, plain()).step(*batch(make(comm, plain()))), 1)[0]
    assert {n for n in want if np.any(want[n] != before[n])} == {n for n in want if ".lora_" in n}
    for ranks, options in [*PLACES.values(), (2, {"strategy": "fsdp", "reproducible_chunks": 4})]:
        same, _, found = spawn(lambda comm, options=options: run(comm, options), ranks)[0]
        np.testing.assert_allclose(same, losses, rtol=1e-12)
        assert all(np.allclose(found[n], want[n], rtol=0, atol=1e-9) for n in want)


def test_a_tensor_axis_trains_what_one_process_does(tmp_path: Path) -> None:
    """What the model gives, three steps, merged weights and files, which hold whole matrices."""

    def run(comm: Communicator, options: dict[str, Any]) -> tuple[Any, ...]:
        trainer = make(comm, nn.add_lora(plain(), RANK, ALPHA, targets=TARGETS), **options)
        values = filled(trainer)
        given = trainer.evaluate(*batch(trainer))
        losses = [trainer.step(*batch(trainer)) for _ in range(3)]
        fsdpx.save_adapter(trainer, tmp_path / "a")
        found = trainer.parameters()
        trainer.load_parameters(values)
        fsdpx.load_adapter(trainer, tmp_path / "a")
        again = trainer.parameters()
        assert all(np.array_equal(again[name], found[name]) for name in found)
        return [given, *losses], found, fsdpx.gather_merged_parameters(trainer)

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
        model = nn.add_lora(nn.GPT(13, 8, 3, 2, 6), RANK, ALPHA, targets="blocks.2.attn.out")
        trainer = make(comm, model, group_bytes=0)
        trainer.step(*batch(trainer))
        return [str(a) for a in trainer.program.actions if a.op in ("B", "I", "W", "REDUCE")], trainer.report()

    actions, report = spawn(run, 2)[0]
    assert actions == ["B4.0", "B3.0", "REDUCE4"]
    counted = report.traffic["shard", "reduce_scatter"]
    assert (counted.calls, counted.bytes) == (1, RANK * (8 + 8) * 8 // 2)
    assert counted == report.predicted["shard", "reduce_scatter"]


def test_files_of_peft(tmp_path: Path) -> None:
    def run(comm: Communicator, rank: int = RANK, targets: Any = TARGETS) -> Trainer:
        return make(comm, nn.add_lora(plain(), rank, ALPHA, targets=targets))

    def write(comm: Communicator) -> tuple[Any, Any]:
        trainer = run(comm)
        values = filled(trainer)
        fsdpx.save_adapter(trainer, tmp_path / "a", "base")
        merged = make(comm, plain())
        merged.load_parameters(fsdpx.gather_merged_parameters(trainer))
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
    names = read_header(tmp_path / "a/adapter_model.safetensors").tensors
    assert "base_model.model.blocks.0.mlp.up.lora_A.weight" in names
    with pytest.raises(CheckpointError, match=r"has r 2, the model 3: pass the same to nn.add_lora"):
        spawn(lambda comm: fsdpx.load_adapter(run(comm, rank=3), tmp_path / "a"), 2)
    for key, value in (("use_rslora", True), ("rank_pattern", {"mlp.up": 8}), ("bias", "all")):
        (tmp_path / "c").mkdir(exist_ok=True)
        (tmp_path / "c/adapter_config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(CheckpointError, match=f"has {key} .*, which nn.add_lora does not know: only"):
            spawn(lambda comm: fsdpx.load_adapter(run(comm), tmp_path / "c"), 2)
    with pytest.raises(CheckpointError, match=r"not in the model: blocks\.0\.mlp\.down\.lora_A\.weight"):
        spawn(lambda comm: fsdpx.load_adapter(run(comm, targets="mlp.up"), tmp_path / "a"), 2)
    with pytest.raises(ConfigError, match=r"save_adapter: the model has no adapters: make it with nn.add_lora"):
        spawn(lambda comm: fsdpx.save_adapter(make(comm, plain()), tmp_path / "b"), 1)


def test_what_cannot_be_is_said() -> None:
    words = r"add_lora\(targets=\): 'q_proj' matches no Linear layer; there are '0\.up', .*'1'$"
    with pytest.raises(ConfigError, match=words):
        nn.add_lora(nn.Sequential(nn.MLP(4), nn.Linear(4, 2)), targets=["*.up", "q_proj"])
    words = r"'blocks\.0\.mlp\.up' LoRALinear\(.*, since its adapters have dropout=0\.5: use"
    with pytest.raises(ConfigError, match=words):
        spawn(lambda comm: make(comm, nn.add_lora(plain(), dropout=0.5, targets="mlp.up"), mesh=Mesh(tensor=2)), 2)
    tied = nn.add_lora(plain(), targets="head")
    with pytest.raises(ConfigError, match=r"gather_merged_parameters: 'head.weight' is tied to 'embed.weight'"):
        spawn(lambda comm: fsdpx.gather_merged_parameters(make(comm, tied)), 1)
