"""Adapters of `nn.lora` on disk, in the format of PEFT, and merged into the weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from fsdpx.core.base import safe_files
from fsdpx.core.checkpoint.atomic_commit import alone, place
from fsdpx.core.checkpoint.format import code_of, lay
from fsdpx.core.checkpoint.read import contents
from fsdpx.core.trainer.trainer import Trainer
from fsdpx.errors import CheckpointError, ConfigError
from fsdpx.ext.lora.lora import LOW, LoRALinear, adapter_of
from fsdpx.models.pretrained_reader import Stored
from fsdpx.models.tokenizer_files import object_of
from fsdpx.nn.layer import Layer, dotted

__all__ = ["load_adapter", "merged_parameters", "save_adapter"]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""The prefix that PEFT puts before the names of the model."""
ALIKE = {
    "peft_type": "LORA", "bias": "none", "use_rslora": False, "use_dora": False, "lora_bias": False, "rank_pattern": {},
    "alpha_pattern": {}, "modules_to_save": None,
}  # fmt: skip
"""Options of PEFT that compute something else, at the only value that `LoRALinear` knows."""


def save_adapter(trainer: Trainer, folder: str | PathLike[str], base_model: str = "") -> None:
    """Write the adapters alone, as PEFT does: `adapter_config.json` and `adapter_model.safetensors`. Collective.

    Layers have the names that they have in the folder of `fsdpx.models.from_pretrained`, beside which PEFT loads them;
    of another model, its own.

    Parameters
    ----------
    trainer : of a model of `nn.lora`
    folder : is made if it is not there; files of these names are replaced
    base_model : `base_model_name_or_path` of the file
    """
    adapted = _adapted(trainer, "save_adapter")
    path = place(trainer.host.world, "save_adapter", folder)
    theirs, turned = _theirs(trainer, adapted)
    arrays = trainer.parameters(names=_names(adapted))
    tensors = {f"{PREFIX}{theirs[name]}": array for name, array in arrays.items()}
    alone(trainer.host.world, f"save_adapter {path}", lambda: _write(path, adapted, tensors, turned, base_model))


def load_adapter(trainer: Trainer, folder: str | PathLike[str], convert: bool = False) -> None:
    """Take adapters that `save_adapter` or PEFT wrote for the same names of layers. Collective.

    CheckpointError on all ranks, before anything changes, where the file has other layers, another rank or alpha.

    Parameters
    ----------
    trainer : of a model of `nn.lora`
    folder : with `adapter_config.json` and `adapter_model.safetensors`
    convert : round or widen floats of another format
    """
    adapted = _adapted(trainer, "load_adapter")
    path = place(trainer.host.world, "load_adapter", folder)
    theirs, _ = _theirs(trainer, adapted)
    alone(trainer.host.world, f"load_adapter {path}", lambda: _demand_fit(path, adapted, theirs))
    rename = {f"{PREFIX}{other}": name for name, other in theirs.items()}
    trainer.load_weights(path / WEIGHTS, strict=False, rename=rename, convert=convert)


def merged_parameters(trainer: Trainer) -> dict[str, np.ndarray]:
    """The parameters of the model without adapters, W + alpha / rank B A in their place: what `load_weights` of a
    trainer of the plain model takes. All of them on every rank's host, as `Trainer.parameters`. Collective."""
    adapted = _adapted(trainer, "merged_parameters")
    for weight in (dotted(name, "weight") for name in adapted):
        if (other := trainer.inspect.placement.layout.canonical(weight)) != weight:
            raise ConfigError(f"merged_parameters: {weight!r} is tied to {other!r}, which has no adapter")
    arrays = trainer.parameters()
    for name, layer in adapted.items():
        down, up = (arrays.pop(dotted(name, low)) for low in LOW)
        weight = dotted(name, "weight")
        arrays[weight] = (arrays[weight] + layer.scale * (up @ down)).astype(arrays[weight].dtype)
    return arrays


def _adapted(trainer: Trainer, call: str) -> dict[str, LoRALinear]:
    """The layers with adapters by name."""
    found = {
        path: low
        for node in trainer.inspect.placement.model.nodes
        for path, layer in _walk(node.path, node.layer)
        if (low := adapter_of(layer)) is not None
    }
    if not found:
        raise ConfigError(f"{call}: the model has no adapters: make it with nn.lora(model, targets=...)")
    return found


def _walk(path: str, layer: Layer) -> Iterator[tuple[str, Layer]]:
    yield path, layer
    for name, child in layer.children().items():
        yield from _walk(dotted(path, name), child)


def _names(adapted: dict[str, LoRALinear]) -> list[str]:
    return [dotted(name, low) for name in adapted for low in LOW]


def _theirs(trainer: Trainer, adapted: dict[str, LoRALinear]) -> tuple[dict[str, str], bool]:
    """The name of each adapter matrix in files, and whether files hold it transposed."""
    found: dict[str, str] = {}
    turned = False
    for name in adapted:
        begun = trainer.inspect.placement.model.initial.get(dotted(name, "weight"))
        layer = begun.name.removesuffix(".weight") if isinstance(begun, Stored) else name
        found |= {dotted(name, low): dotted(layer, low) for low in LOW}
        turned |= isinstance(begun, Stored) and begun.turned
    return found, turned


def _settings(adapted: dict[str, LoRALinear]) -> dict[str, Any]:
    """The first layer's; `nn.lora` gives all the same."""
    layer = next(iter(adapted.values()))
    return {"r": layer.rank, "lora_alpha": layer.alpha}


def _write(
    path: Path, adapted: dict[str, LoRALinear], tensors: dict[str, np.ndarray], turned: bool, base_model: str
) -> None:
    path.mkdir(parents=True, exist_ok=True)
    config = _settings(adapted) | {
        "peft_type": "LORA", "base_model_name_or_path": base_model or None, "bias": "none", "fan_in_fan_out": turned,
        "inference_mode": True, "init_lora_weights": True, "lora_dropout": next(iter(adapted.values())).dropout,
        "target_modules": sorted({_layer(name) for name in tensors}), "task_type": None,
    }  # fmt: skip
    safe_files.write(path / CONFIG, json.dumps(dict(sorted(config.items())), indent=2) + "\n", safe_files.READABLE)
    plan = lay({name: (code_of(array.dtype), array.shape) for name, array in tensors.items()}, {"format": "pt"})
    order = sorted(plan.tensors, key=lambda name: plan.tensors[name].start)
    safe_files.write(
        path / WEIGHTS, plan.header + b"".join(tensors[name].tobytes() for name in order), safe_files.READABLE
    )


def _layer(name: str) -> str:
    """The layer of a tensor of the file."""
    return name.removeprefix(PREFIX).partition(".lora_")[0]


def _demand_fit(path: Path, adapted: dict[str, LoRALinear], names: dict[str, str]) -> None:
    found = object_of(path / CONFIG)
    for key, value in _settings(adapted).items():
        if found.get(key) != value:
            raise CheckpointError(f"{CONFIG} has {key} {found.get(key)}, the model {value}: make it with nn.lora alike")
    for key, known in ALIKE.items():
        if (value := found.get(key)) and value != known:
            raise CheckpointError(f"{CONFIG} has {key} {value!r}, which nn.lora does not know: only {known!r}")
    theirs = {name.removeprefix(PREFIX) for name in contents(path / WEIGHTS).tensors}
    ours = set(names.values())
    for what, some in (("missing", ours - theirs), ("not in the model", theirs - ours)):
        if some:
            raise CheckpointError(f"{WEIGHTS}: {what}: {', '.join(sorted(some))}")
