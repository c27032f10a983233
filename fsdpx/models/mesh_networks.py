"""Build a `MeshGraphNet` from weights of PhysicsNeMo or of the program by Pfaff et al. (2021)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from fsdpx.ext.meshes.mesh_graph_net import MeshGraphNet

__all__ = ["build_deepmind_network", "build_physicsnemo_network", "join_deepmind_tensors", "join_physicsnemo_tensors"]

Tensors = dict[str, np.ndarray]


def build_physicsnemo_network(tensors: Mapping[str, np.ndarray], **options: Any) -> MeshGraphNet:
    """Return a model without parameter values that fits weights of PhysicsNeMo's `MeshGraphNet`. In this model, nodes
    sum the edge features after the residual connection."""
    return _build_mesh_graph_net(join_physicsnemo_tensors(tensors), "edges", options)


def build_deepmind_network(tensors: Mapping[str, np.ndarray], **options: Any) -> MeshGraphNet:
    """Return a model, without parameter values, whose architecture fits weights from the program by Pfaff et al.
    (2021). In this architecture, nodes sum the outputs of the edge MLPs before the residual connection."""
    return _build_mesh_graph_net(join_deepmind_tensors(tensors), "messages", options)


def join_physicsnemo_tensors(tensors: Mapping[str, np.ndarray]) -> Tensors:
    """Return PhysicsNeMo's tensors under the parameter names of `MeshGraphNet`.

    With `do_concat_trick=True`, the first matrix of each edge MLP is stored as three separate matrices, and the rest of
    the MLP, which is stored under `model`, begins with the activation."""
    found: Tensors = {}
    for name, array in tensors.items():
        layer = re.fullmatch(r"processor\.processor_layers\.(\d+)\.(edge|node)_mlp\.(.*)", name)
        if layer is None:
            end = re.fullmatch(r"(edge_encoder|node_encoder|node_decoder)\.model\.(.*)", name)
            found[name if end is None else f"{end[1].replace('node_decoder', 'decoder')}.{end[2]}"] = array
            continue
        path = f"processor.processor_layers.{layer[1]}.edge_mlp"
        block, rest, is_split = f"{layer[2]}_{int(layer[1]) // 2}", layer[3], f"{path}.lin_efeat" in tensors
        if rest == "lin_efeat":
            parts = [tensors[f"{path}.{part}"] for part in ("lin_efeat", "lin_src", "lin_dst")]
            found[f"{block}.0.weight"] = np.concatenate(parts, axis=1)
        elif rest == "bias":
            found[f"{block}.0.bias"] = array
        elif inside := re.fullmatch(r"model\.(\d+)\.(.*)", rest):
            found[f"{block}.{int(inside[1]) + is_split}.{inside[2]}"] = array
        elif rest not in ("lin_src", "lin_dst"):
            found[name] = array
    return found


def join_deepmind_tensors(tensors: Mapping[str, np.ndarray]) -> Tensors:
    """Convert the variables of the program by Pfaff et al. (2021) to the parameters of a `MeshGraphNet`, by name. The
    program builds a TensorFlow graph of Sonnet modules.

    In this program, matrices are stored as (inputs, outputs). The inputs of edge MLPs are [sender, receiver, edge]
    instead of [edge, sender, receiver], and the inputs of node MLPs are [node, received] instead of [received, node].
    """
    found: Tensors = {}
    names = {
        r"encoder/(mlp|layer_norm)": "node_encoder",
        r"encoder/(mlp|layer_norm)_1": "edge_encoder",
        r"decoder/(mlp)": "decoder",
        r"GraphNetBlock(?:_(?P<step>\d+))?/[^/]*_edge_fn/(mlp|layer_norm)": "edge",
        r"GraphNetBlock(?:_(?P<step>\d+))?/node_fn/(mlp|layer_norm)": "node",
    }
    last = max((int(n) for name in tensors for n in re.findall(r"linear_(\d+)/", name)), default=0)
    for name, array in tensors.items():
        found[name] = array
        for pattern, ours in names.items():
            match = re.fullmatch(
                rf"EncodeProcessDecode/{pattern}/(?:linear_(?P<n>\d+)/)?(?P<kind>w|b|gamma|beta)", name
            )
            if match is None:
                continue
            del found[name]
            block = f"{ours}_{match.groupdict().get('step') or 0}" if ours in ("edge", "node") else ours
            place = last * 2 + 1 if match["n"] is None else int(match["n"]) * 2
            part = "weight" if match["kind"] in ("w", "gamma") else "bias"
            found[f"{block}.{place}.{part}"] = array.T if match["kind"] == "w" else array
    for name in [name for name in found if re.fullmatch(r"(edge|node)_\d+\.0\.weight", name)]:
        # in these files node features come first, so move their columns to the end
        first = found[name].shape[0] * (2 if name.startswith("edge") else 1)
        found[name] = np.concatenate([found[name][:, first:], found[name][:, :first]], axis=1)
    return found


def _build_mesh_graph_net(tensors: Mapping[str, np.ndarray], residual: str, options: Mapping[str, Any]) -> MeshGraphNet:
    """Return the network whose parameters have the shapes of `tensors`. The keys of `tensors` are parameter names."""
    hidden, edge_features = tensors["edge_encoder.0.weight"].shape
    places = [int(n) for name in tensors for n in re.findall(r"^decoder\.(\d+)\.weight$", name)]
    steps = sum(re.fullmatch(r"node_\d+\.0\.weight", name) is not None for name in tensors)
    hidden_layers = max(places, default=2) // 2
    out_features = tensors[f"decoder.{2 * hidden_layers}.weight"].shape[0]
    given = {"hidden_layers": hidden_layers, "residual": residual, **options}
    node_features = tensors["node_encoder.0.weight"].shape[1]
    return MeshGraphNet(node_features, edge_features, out_features, hidden, steps, **given)
