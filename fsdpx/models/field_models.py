"""Load models of fields and meshes from the weights of other projects: the usual U-Net, neuraloperator's FNO,
PDEBench's models, and MeshGraphNets of PhysicsNeMo and of Pfaff et al.

The names and shapes of the tensors determine the model. Each project has a table that maps tensor names to
parameters."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from os import PathLike
from typing import Any

import numpy as np

from fsdpx.core.base.dataclass import dataclass, field
from fsdpx.core.base.safe_files import expanduser
from fsdpx.core.checkpoint.read import open_weights, read_elements
from fsdpx.errors import CheckpointError, ConfigError
from fsdpx.ext.fields.pad import Pad
from fsdpx.ext.fields.spectral import FNO, PointwiseConv, SpectralConv
from fsdpx.ext.fields.unet import UNet
from fsdpx.models.architectures import Architecture
from fsdpx.models.mesh_networks import (
    build_deepmind_network,
    build_physicsnemo_network,
    join_deepmind_tensors,
    join_physicsnemo_tensors,
)
from fsdpx.nn.activation import GELU
from fsdpx.nn.container import Container
from fsdpx.nn.graph import Graph
from fsdpx.nn.layer_list import linearize, parameter_specs
from fsdpx.nn.shape import Add

__all__ = ["from_state_dict", "to_state_dict"]

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class ArrayInitializer:
    """Initializer that copies a parameter's values from an array."""

    array: np.ndarray = field(repr=False, compare=False)
    digest: int = 0

    def __call__(self, seed: int, name: str, start: int, stop: int, shape: tuple[int, ...]) -> np.ndarray:
        return self.array.reshape(-1)[start:stop]


@dataclass(frozen=True)
class Project:
    """A supported project: how to recognize its models by their tensors, and how to build them.

    Parameters
    ----------
    marker_name : name of a tensor that occurs in all models of this project, and in no others
    make_model : function that builds the model from the tensors and the caller's options
    names : parameter name in fsdpx -> tensor name in the project, as in `Architecture`
    join_tensors : function that converts the project's tensors to one tensor per parameter
    unused : patterns (fnmatch) of the names of tensors that are not needed
    """

    marker_name: str
    make_model: Callable[..., Container]
    names: Mapping[str, str] = field(default_factory=dict)
    join_tensors: Callable[[Tensors], Tensors] = lambda tensors: tensors
    unused: tuple[str, ...] = ()


def from_state_dict(source: Mapping[str, Any] | str | PathLike[str], **options: Any) -> Container:
    """Build the field or mesh model that the given weights belong to, and initialize it with these weights. Every rank
    must pass the same weights.

    Supported field models are: the usual U-Net (Buda et al. 2019) and its versions in PDEBench and The Well;
    `neuralop.models.FNO` of neuraloperator 2.0 with dense weights; and FNO1d to FNO3d of PDEBench, whose last input
    channels are the coordinates of the cells. Supported mesh models are `MeshGraphNet` of PhysicsNeMo, and the model of
    the TensorFlow program by Pfaff et al. (2021). For the TensorFlow program, `source` maps names of variables to their
    values, and the normalization statistics are not read.

    Parameters
    ----------
    source : arrays by name, as returned by `module.state_dict()`; or the path of a safetensors file or of a folder that
        contains one
    options : properties that the weights do not determine. U-Net: `activation="tanh"` (PDEBench, The Well), `padding`,
        and `transposed=True` if the last layer is a ConvTranspose (The Well) with equal numbers of input and output
        channels. neuraloperator's FNO: `positions=False`. PDEBench's FNO: `padding`, the number of cells that are
        added at the end of each dim. MeshGraphNets: options of `nn.MeshGraphNet`, such as `activation` and `how`

    Returns
    -------
    Container : `nn.UNet`, `nn.FNO`, `nn.Graph` or `nn.MeshGraphNet`

    Raises
    ------
    CheckpointError : if the names match no supported model, or if tensors are missing, left over or of the wrong shape
    """
    return _build_model_of_matching_project(_read_tensors(source), options)


def to_state_dict(
    parameters: Mapping[str, Any], like: Mapping[str, Any] | str | PathLike[str], **options: Any
) -> Tensors:
    """Convert parameters to the names, shapes and dtypes of another project. This is the inverse of `from_state_dict`.

    Parameters
    ----------
    parameters : full arrays by name, as returned by `trainer.parameters()`
    like : the current weights of the other project's module, as `module.state_dict()`
    options : as in `from_state_dict`

    Returns
    -------
    dict : arrays by name; convert them to tensors before you pass them to `module.load_state_dict`. Tensors of `like`
        that are not parameters of the fsdpx model are returned unchanged

    Raises
    ------
    CheckpointError : as in `from_state_dict`, and if parameters are missing or of the wrong shape
    """
    tensors = _read_tensors(like)
    ends = np.cumsum([0, *(_view_as_real(a).size for a in tensors.values())]).tolist()
    # The elements of all tensors are numbered consecutively, and each element is replaced by its number. In a model
    # built from the resulting tensors, the value of each parameter element is then the number of the tensor element
    # that it comes from.
    places = {}
    for (name, array), first, end in zip(tensors.items(), ends, ends[1:], strict=False):
        numbers = np.arange(first, end, dtype=np.float64)
        places[name] = (numbers.view(np.complex128) if np.iscomplexobj(array) else numbers).reshape(array.shape)
    flat = np.concatenate([_view_as_real(a).reshape(-1).astype(np.float64) for a in tensors.values()])
    for name, value in _build_model_of_matching_project(places, options).initial.items():
        assert isinstance(value, ArrayInitializer)
        at, ours = value.array.astype(np.int64), _to_array(parameters[name]) if name in parameters else np.empty(0)
        if ours.shape != at.shape:
            raise CheckpointError(f"to_state_dict: {name} is {ours.shape}, and {at.shape} is needed")
        flat[at] = ours
    found = {}
    for (name, array), first, end in zip(tensors.items(), ends, ends[1:], strict=False):
        part = flat[first:end].view(np.complex128) if np.iscomplexobj(array) else flat[first:end]
        found[name] = part.astype(array.dtype).reshape(array.shape)
    return found


def _build_model_of_matching_project(tensors: Tensors, options: Mapping[str, Any]) -> Container:
    """Build the model of the first project whose marker tensor is present, and initialize it with the tensors. Raise
    CheckpointError if no project matches."""
    tensors = {name.removesuffix(":0"): array for name, array in tensors.items()}  # TensorFlow appends ":0" to names
    for project in PROJECTS:
        found = next((name for name in tensors if name.endswith(project.marker_name)), None)
        if found is not None:
            prefix = found.removesuffix(project.marker_name)
            return _build_model_from_tensors(
                project, {_remove_prefix(name, prefix): a for name, a in tensors.items()}, options
            )
    marks = ", ".join(project.marker_name for project in PROJECTS)
    raise CheckpointError(f"from_state_dict: no model is known that has these tensors; known are those with {marks}")


def _view_as_real(array: np.ndarray) -> np.ndarray:
    """Convert a complex array to pairs (real, imaginary) along a new last dim. Return other arrays unchanged."""
    return np.stack([array.real, array.imag], axis=-1) if np.iscomplexobj(array) else array


def _read_tensors(source: Any) -> Tensors:
    if isinstance(source, Mapping):
        return {name: _to_array(value) for name, value in source.items() if hasattr(value, "shape")}
    if not isinstance(source, str | PathLike):
        raise CheckpointError(f"from_state_dict: give module.state_dict() or a path, got a {type(source).__name__}")
    files = open_weights(expanduser(source))
    return {
        name: read_elements(files, name, [(0, entry.elements)]).reshape(entry.shape)
        for name, (_, entry) in files.locations.items()
    }


def _to_array(value: Any) -> np.ndarray:
    return np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)


def _remove_prefix(name: str, prefix: str) -> str:
    if not name.startswith(prefix):
        raise CheckpointError(f"from_state_dict: {name} does not begin with {prefix!r}, as others do")
    return name.removeprefix(prefix)


def _build_model_from_tensors(project: Project, tensors: Tensors, options: Mapping[str, Any]) -> Container:
    """Build the model of a project, and initialize it with the tensors. Raise CheckpointError if tensors are missing or
    left over."""
    kept = {n: a for n, a in tensors.items() if not any(fnmatchcase(n, pattern) for pattern in project.unused)}
    try:
        model, kept = project.make_model(kept, **options), project.join_tensors(kept)
    except KeyError as error:
        raise CheckpointError(f"from_state_dict: missing: {error.args[0]}") from None
    table = Architecture(project.make_model, {**project.names, **{f"{n}.": f"{n}." for n in model.children()}})
    specs = {name: spec.shape for name, spec in parameter_specs(linearize(model)).items()}
    theirs = {name: table.get_names_in_files(name, 1)[0] for name in specs}
    missing = [other for other in theirs.values() if other not in kept]
    extra = sorted(kept.keys() - set(theirs.values()))
    texts = [f"{what}: {', '.join(n[:5])}" for what, n in (("missing", missing), ("not in the model", extra)) if n]
    if texts:
        raise CheckpointError(f"from_state_dict: {'; '.join(texts)}")
    model.initial = {
        name: _make_initializer_from_tensor(other, kept[other], specs[name]) for name, other in theirs.items()
    }
    return model


def _make_initializer_from_tensor(name: str, array: np.ndarray, shape: tuple[int, ...]) -> ArrayInitializer:
    """Return an initializer with the values of the tensor `array`, whose name is `name`; complex numbers become pairs
    (real, imaginary). Raise CheckpointError unless the tensor has the parameter's shape `shape`, apart from dims of
    size 1."""
    pairs = _view_as_real(array)
    if [n for n in pairs.shape if n != 1] != [n for n in shape if n != 1]:
        raise CheckpointError(f"from_state_dict: {name} is {array.shape}, and {shape} is needed")
    values = np.ascontiguousarray(pairs).reshape(shape)
    return ArrayInitializer(values, zlib.crc32(values.tobytes()))


def _build_unet_from_tensors(tensors: Tensors, *, transposed: bool | None = None, **options: Any) -> Container:
    first, last = tensors["encoder1.enc1conv1.weight"], tensors["conv.weight"]
    width, outputs = first.shape[0], len(tensors["conv.bias"])
    if transposed or (transposed is None and last.shape[:2] == (width, outputs) != (outputs, width)):
        tensors["conv.weight"] = last.swapaxes(0, 1)
    norm = None
    if "encoder1.enc1norm1.weight" in tensors:
        norm = "batch" if "encoder1.enc1norm1.running_mean" in tensors else "group"
    depth = sum(name.startswith("encoder") and name.endswith("conv1.weight") for name in tensors)
    given = {"dims": first.ndim - 2, "width": width, "depth": depth, "norm": norm, **options}
    return UNet(first.shape[1], outputs, **given)


def _compute_last_n_modes(modes: int) -> int:
    """Return the value of the FNO option `n_modes` for the last dim. Weights are stored only for the nonnegative
    frequencies of this dim; `modes` is the number of these frequencies."""
    return max(2 * (modes - 1), 1)


def _build_fno_from_tensors(tensors: Tensors, *, positions: bool = True) -> Container:
    spectral, lifting = tensors["fno_blocks.convs.0.weight.tensor"], tensors["lifting.fcs.0.weight"]
    if not np.iscomplexobj(spectral):
        raise CheckpointError("from_state_dict: weights of SpectralConv must be complex: read them by torch.load")
    *modes, last = spectral.shape[2:]
    projection, inside = tensors["projection.fcs.1.weight"], tensors["fno_blocks.channel_mlp.0.fcs.0.weight"]
    layers = sum(name.startswith("fno_blocks.convs.") and name.endswith(".weight.tensor") for name in tensors)
    inputs = lifting.shape[1] - (len(modes) + 1) * positions
    return FNO(
        inputs, projection.shape[0], (*modes, _compute_last_n_modes(last)), spectral.shape[0], layers, lifting.shape[0],
        projection.shape[1], inside.shape[0], positions,
    )  # fmt: skip


def _concatenate_corner_weights(tensors: Tensors) -> Tensors:
    """Return the tensors of a PDEBench FNO, with the weights for the corners of each spectrum concatenated into one
    tensor, in the order of frequencies."""
    found = {name: a for name, a in tensors.items() if ".weights" not in name}
    for conv in sorted({name.partition(".weights")[0] for name in tensors.keys() - found.keys()}):
        count = sum(name.startswith(f"{conv}.weights") for name in tensors)
        corners = [tensors[f"{conv}.weights{i + 1}"] for i in range(count)]
        dim = 2
        # corners with odd indices hold the negative frequencies of this dim, and are placed first
        while len(corners) > 1:
            pairs = zip(corners[1::2], corners[::2], strict=True)
            corners, dim = [np.concatenate(pair, axis=dim) for pair in pairs], dim + 1
        found[f"{conv}.weight"] = corners[0]
    return found


def _build_pdebench_fno(tensors: Tensors, *, padding: int | tuple[int, ...] | None = None) -> Container:
    first, spectral = tensors["fc0.weight"], tensors["conv0.weights1"]
    width, *modes = spectral.shape[1:]
    dims, layers = len(modes), sum(name.endswith(".weights1") for name in tensors)
    if padding is None:  # the default padding of PDEBench
        padding = (0, 0, 6) if dims == 3 else 2
    each = (padding,) * dims if isinstance(padding, int) else tuple(padding)
    if len(each) != dims:
        raise ConfigError(f"from_state_dict: padding={padding!r} must be of {dims} dims")
    nodes: dict[str, tuple[Any, ...]] = {
        "fc0": (PointwiseConv(first.shape[1], width), "x"),
        "pad": (Pad(tuple((0, n) for n in each)), "fc0"),
    }
    last = "pad"
    for i in range(layers):
        nodes[f"conv{i}"] = (
            SpectralConv(width, width, (*(2 * m for m in modes[:-1]), _compute_last_n_modes(modes[-1])), False),
            last,
        )
        nodes[f"w{i}"] = PointwiseConv(width, width), last
        nodes[f"sum{i}"] = Add(), f"conv{i}", f"w{i}"
        last = f"sum{i}"
        if i < layers - 1:
            nodes[f"act{i}"] = GELU(), last
            last = f"act{i}"
    nodes["crop"] = Pad(tuple((0, -n) for n in each)), last
    hidden, outputs = (tensors[f"fc{i}.weight"].shape[0] for i in (1, 2))
    nodes["fc1"] = PointwiseConv(width, hidden), "crop"
    nodes["act"] = GELU(), "fc1"
    nodes["fc2"] = PointwiseConv(hidden, outputs), "act"
    return Graph(nodes, outputs=("fc2",))


PROJECTS = (
    Project("encoder1.enc1conv1.weight", _build_unet_from_tensors, unused=("*.num_batches_tracked",)),
    Project(
        "fno_blocks.convs.0.weight.tensor",
        _build_fno_from_tensors,
        {
            "conv*.weight": "fno_blocks.convs.*.weight.tensor",
            "conv*.bias": "fno_blocks.convs.*.bias",
            "skip*.weight": "fno_blocks.fno_skips.*.conv.weight",
            "mlp*.0.": "fno_blocks.channel_mlp.*.fcs.0.",
            "mlp*.2.": "fno_blocks.channel_mlp.*.fcs.1.",
            "gate*.": "fno_blocks.channel_mlp_skips.*.",
            "lifting.0.": "lifting.fcs.0.",
            "lifting.2.": "lifting.fcs.1.",
            "projection.0.": "projection.fcs.0.",
            "projection.2.": "projection.fcs.1.",
        },
    ),
    Project("conv0.weights1", _build_pdebench_fno, join_tensors=_concatenate_corner_weights, unused=("bn*",)),
    Project(
        "processor.processor_layers.1.node_mlp.model.0.weight", build_physicsnemo_network,
        join_tensors=join_physicsnemo_tensors, unused=("device_buffer", "*._extra_state"),
    ),
    Project(
        "EncodeProcessDecode/encoder/mlp/linear_0/w", build_deepmind_network, join_tensors=join_deepmind_tensors,
        unused=("Model/*", "global_step", "beta*_power", "*/Adam", "*/Adam_1"),
    ),
)
"""The projects whose models `from_state_dict` can build, each with the name of a tensor that identifies its models."""
