"""Saves, loads and merges LoRA adapters in PEFT's file format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from fsdpx.core.base import safe_files
from fsdpx.core.checkpoint.atomic_commit import agree_on_path, run_on_rank0
from fsdpx.core.checkpoint.format import dtype_to_code, make_file_header
from fsdpx.core.checkpoint.read import read_header
from fsdpx.core.trainer.trainer import Trainer
from fsdpx.errors import CheckpointError, ConfigError
from fsdpx.ext.lora.lora import ADAPTER_NAMES, LoRALinear, get_adapter_of_layer
from fsdpx.models.pretrained_reader import TensorSource
from fsdpx.models.tokenizer_files import read_json_object
from fsdpx.nn.layer import Layer, join_path

__all__ = ["gather_merged_parameters", "load_adapter", "save_adapter"]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
"""The prefix that PEFT adds to the parameter names of the model."""
SUPPORTED_CONFIG = {
    "peft_type": "LORA", "bias": "none", "use_rslora": False, "use_dora": False, "lora_bias": False, "rank_pattern": {},
    "alpha_pattern": {}, "modules_to_save": None,
}  # fmt: skip
"""PEFT option that changes the computation -> the only value that `LoRALinear` supports."""


def save_adapter(trainer: Trainer, folder: str | PathLike[str], base_model: str = "") -> None:
    """Save the LoRA adapters, without the other parameters, in the format of PEFT. Collective.

    Writes `adapter_config.json` and `adapter_model.safetensors`. If the model was loaded by
    `fsdpx.models.from_pretrained`, the files use the layer names of the model's folder, so PEFT can load the adapters
    together with the model. Otherwise, the files use the layer names of the fsdpx model.

    Parameters
    ----------
    trainer : trainer of a model returned by `nn.add_lora`
    folder : path of the folder, which is created if it does not exist; existing files with these names are replaced
    base_model : value of `base_model_name_or_path` in `adapter_config.json`
    """
    adapted = _find_adapted_layers(trainer, "save_adapter")
    path = agree_on_path(trainer.call_runner.world, "save_adapter", folder)
    theirs, turned = _get_peft_names_and_is_transposed(trainer, adapted)
    arrays = trainer.parameters(names=_list_adapter_parameters(adapted))
    tensors = {f"{PEFT_PREFIX}{theirs[name]}": array for name, array in arrays.items()}
    run_on_rank0(
        trainer.call_runner.world,
        f"save_adapter {path}",
        lambda: _write_adapter_files(path, adapted, tensors, turned, base_model),
    )


def load_adapter(trainer: Trainer, folder: str | PathLike[str], convert: bool = False) -> None:
    """Load LoRA adapters from files that `save_adapter` or PEFT wrote. The files must use the layer names that
    `save_adapter` would write for this model. Collective.

    If the files differ from the model in layers, rank or alpha, raises CheckpointError on all ranks before anything
    changes.

    Parameters
    ----------
    trainer : trainer of a model returned by `nn.add_lora`
    folder : path of a folder with `adapter_config.json` and `adapter_model.safetensors`
    convert : whether to cast floating-point values of another dtype to the dtype of the model's parameters
    """
    adapted = _find_adapted_layers(trainer, "load_adapter")
    world = trainer.call_runner.world
    path = agree_on_path(world, "load_adapter", folder)
    theirs, _ = _get_peft_names_and_is_transposed(trainer, adapted)
    run_on_rank0(world, f"load_adapter {path}", lambda: _require_adapter_matches_model(path, adapted, theirs))
    rename = {f"{PEFT_PREFIX}{other}": name for name, other in theirs.items()}
    trainer.load_parameters(path / WEIGHTS, strict=False, rename=rename, convert=convert)


def gather_merged_parameters(trainer: Trainer) -> dict[str, np.ndarray]:
    """Gather the model's parameters with the adapters merged into the weights. W becomes `W + alpha / rank * B @ A`.
    Collective.

    Parameters
    ----------
    trainer : trainer of a model returned by `nn.add_lora`

    Returns
    -------
    dict name -> NumPy array, with all parameters on every rank, as in the result of `Trainer.parameters`. A trainer of
    the model without adapters can load this dict with `load_parameters`

    Raises
    ------
    ConfigError
        if the model has no adapters, or if an adapted weight is tied to a parameter without an adapter
    """
    adapted = _find_adapted_layers(trainer, "gather_merged_parameters")
    for weight in (join_path(name, "weight") for name in adapted):
        if (other := trainer.inspect.placement.layout.canonical_name(weight)) != weight:
            raise ConfigError(f"gather_merged_parameters: {weight!r} is tied to {other!r}, which has no adapter")
    arrays = trainer.parameters()
    for name, layer in adapted.items():
        down, up = (arrays.pop(join_path(name, low)) for low in ADAPTER_NAMES)
        weight = join_path(name, "weight")
        arrays[weight] = (arrays[weight] + layer.scale * (up @ down)).astype(arrays[weight].dtype)
    return arrays


def _find_adapted_layers(trainer: Trainer, call: str) -> dict[str, LoRALinear]:
    """Return {path: layer} for the layers that have adapters. Raise ConfigError if no layer has an adapter. `call` is
    the name of the calling function, for the error message."""
    found = {
        path: low
        for node in trainer.inspect.placement.model.nodes
        for path, layer in _iterate_layers(node.path, node.layer)
        if (low := get_adapter_of_layer(layer)) is not None
    }
    if not found:
        raise ConfigError(f"{call}: the model has no adapters: make it with nn.add_lora(model, targets=...)")
    return found


def _iterate_layers(path: str, layer: Layer) -> Iterator[tuple[str, Layer]]:
    yield path, layer
    for name, child in layer.children().items():
        yield from _iterate_layers(join_path(path, name), child)


def _list_adapter_parameters(adapted: dict[str, LoRALinear]) -> list[str]:
    return [join_path(name, low) for name in adapted for low in ADAPTER_NAMES]


def _get_peft_names_and_is_transposed(trainer: Trainer, adapted: dict[str, LoRALinear]) -> tuple[dict[str, str], bool]:
    """Return {name of an adapter matrix: its name in PEFT's files}, and whether adapted weights are transposed in the
    files of the model."""
    found: dict[str, str] = {}
    turned = False
    for name in adapted:
        begun = trainer.inspect.placement.model.initial.get(join_path(name, "weight"))
        layer = begun.name.removesuffix(".weight") if isinstance(begun, TensorSource) else name
        found |= {join_path(name, low): join_path(layer, low) for low in ADAPTER_NAMES}
        turned |= isinstance(begun, TensorSource) and begun.transposed
    return found, turned


def _make_peft_rank_and_alpha(adapted: dict[str, LoRALinear]) -> dict[str, Any]:
    """Return the rank and alpha of the adapters as a dict whose keys are PEFT's names.

    Both are read from the first layer because `nn.add_lora` gives all layers the same rank and alpha."""
    layer = next(iter(adapted.values()))
    return {"r": layer.rank, "lora_alpha": layer.alpha}


def _write_adapter_files(
    path: Path, adapted: dict[str, LoRALinear], tensors: dict[str, np.ndarray], turned: bool, base_model: str
) -> None:
    path.mkdir(parents=True, exist_ok=True)
    config = _make_peft_rank_and_alpha(adapted) | {
        "peft_type": "LORA", "base_model_name_or_path": base_model or None, "bias": "none", "fan_in_fan_out": turned,
        "inference_mode": True, "init_lora_weights": True, "lora_dropout": next(iter(adapted.values())).dropout,
        "target_modules": sorted({_get_layer_name(name) for name in tensors}), "task_type": None,
    }  # fmt: skip
    safe_files.write_file(path / CONFIG, json.dumps(dict(sorted(config.items())), indent=2) + "\n", safe_files.READABLE)
    plan = make_file_header(
        {name: (dtype_to_code(array.dtype), array.shape) for name, array in tensors.items()}, {"format": "pt"}
    )
    order = sorted(plan.tensors, key=lambda name: plan.tensors[name].start)
    safe_files.write_file(
        path / WEIGHTS, plan.header + b"".join(tensors[name].tobytes() for name in order), safe_files.READABLE
    )


def _get_layer_name(name: str) -> str:
    """Return the name of the layer that a tensor in an adapter file belongs to."""
    return name.removeprefix(PEFT_PREFIX).partition(".lora_")[0]


def _require_adapter_matches_model(path: Path, adapted: dict[str, LoRALinear], names: dict[str, str]) -> None:
    found = read_json_object(path / CONFIG)
    for key, value in _make_peft_rank_and_alpha(adapted).items():
        if found.get(key) != value:
            raise CheckpointError(
                f"{CONFIG} has {key} {found.get(key)}, the model {value}: pass the same to nn.add_lora"
            )
    for key, known in SUPPORTED_CONFIG.items():
        if (value := found.get(key)) and value != known:
            raise CheckpointError(f"{CONFIG} has {key} {value!r}, which nn.add_lora does not know: only {known!r}")
    theirs = {name.removeprefix(PEFT_PREFIX) for name in read_header(path / WEIGHTS).tensors}
    ours = set(names.values())
    for what, some in (("missing", ours - theirs), ("not in the model", theirs - ours)):
        if some:
            raise CheckpointError(f"{WEIGHTS}: {what}: {', '.join(sorted(some))}")
