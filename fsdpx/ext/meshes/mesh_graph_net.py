"""`MeshGraphNet`, a graph network for simulations on meshes."""

from __future__ import annotations

from typing import Any

from fsdpx.errors import ConfigError
from fsdpx.ext.meshes.aggregate import Aggregate, EdgeFeatures
from fsdpx.ext.meshes.edge_mlp import EdgeMLP, NodeMLP, RecomputedMLP
from fsdpx.nn.container import Composite
from fsdpx.nn.layer import require_positive, store_init_args
from fsdpx.nn.linear import Linear
from fsdpx.nn.shape import Concat

__all__ = ["MeshGraphNet"]


class FeatureMLP(RecomputedMLP):
    """MLP that is applied along the last dim, with the same layers as `EdgeMLP`."""

    reads = ("x",)

    def __init__(self, features: int, out: int, hidden: int, hidden_layers: int, activation: str, norm: bool) -> None:
        self._add_layers(Linear(features, hidden), hidden, out, hidden_layers, activation, norm)


class MeshGraphNet(Composite):
    """Graph network for simulations on meshes (Pfaff et al. 2021): (samples, nodes, node_features) -> (samples, nodes,
    out_features).

    With `edge_inputs`, the model has a second input: edge features of each sample, (samples, edges, edge_inputs), as
    returned by `Partition.exchange_edges`. They are appended to the features from the `Partition`.

    MLPs encode the features of nodes and edges. Each message-passing step then computes an update of each edge (the
    message) from the features of the edge and of its two nodes. At each node, it sums the messages of the incoming
    edges, and computes an update of the node. Both updates are added to the previous values. A last MLP decodes the
    nodes. Edge features come from the `Partition`. Inputs should be scaled to magnitudes of about 1.

    Each step exchanges ghosts once: ghosts x hidden numbers per sample in the forward pass, and the same number in the
    backward pass.

    Parameters
    ----------
    node_features, out_features : number of node features in the input and in the result
    edge_features : number of edge features from the `Partition`; d + 1 if the `Partition` computes them from positions
        with d coordinates. May be 0 with `edge_inputs`
    hidden : size of all hidden features; default 128
    message_passing_steps : number of message-passing steps; default 15
    hidden_layers : number of hidden layers in each MLP; default 2
    activation : name of the activation function; default "relu"
    residual : what each node sums: "messages" (default), the outputs of the edge MLPs, as in the code of Pfaff et al.;
        or "edges", the updated edge features, as in PhysicsNeMo
    how : how nodes combine the values that they receive, as in the argument `how` of `Aggregate`; default "sum"
    edge_inputs : number of edge features in the second input; if 0 (default), there is no second input
    recompute_hidden : whether the backward pass recomputes the hidden layers of the edge MLPs, except in the last
        step, instead of keeping their activations. This takes about 5 % more time and, with the defaults, 17 % less
        memory; default True
    """

    reads: tuple[str, ...] = ("x",)
    edge_features: int
    message_passing_steps: int
    residual: str
    how: str

    def __init__(
        self, node_features: int, edge_features: int, out_features: int, hidden: int = 128,
        message_passing_steps: int = 15, *, hidden_layers: int = 2, activation: str = "relu",
        residual: str = "messages", how: str = "sum", edge_inputs: int = 0, recompute_hidden: bool = True,
    ) -> None:  # fmt: skip
        require_positive(
            self, node_features=node_features, edge_features=edge_features + edge_inputs, out_features=out_features,
            hidden=hidden, message_passing_steps=message_passing_steps, hidden_layers=hidden_layers,
        )  # fmt: skip
        if residual not in ("messages", "edges"):
            raise ConfigError(f'MeshGraphNet: residual={residual!r}: choose "messages" or "edges"')
        store_init_args(self, locals())
        if edge_inputs:
            self.reads = ("x", "edges")
        mlp = hidden, hidden_layers, activation
        self.edge_encoder = FeatureMLP(edge_features + edge_inputs, hidden, *mlp, True)
        self.node_encoder = FeatureMLP(node_features, hidden, *mlp, True)
        options: dict[str, Any] = {"activation": activation}
        for i in range(message_passing_steps):
            # not in the last step: the backward pass begins there, and recomputing would increase peak memory
            recomputes = recompute_hidden and i < message_passing_steps - 1
            edge_mlp = EdgeMLP(hidden, hidden, hidden, hidden, hidden_layers, recompute_hidden=recomputes, **options)
            setattr(self, f"edge_{i}", edge_mlp)
            setattr(self, f"node_{i}", NodeMLP(hidden, hidden, hidden, hidden, hidden_layers, **options))
        self.decoder = FeatureMLP(hidden, out_features, *mlp, False)

    def compose(self, x: Any, *inputs: Any) -> Any:
        nodes = self.node_encoder(x)
        found = [*([EdgeFeatures(self.edge_features)(x)] if self.edge_features else []), *inputs]
        edges = self.edge_encoder(found[0] if len(found) == 1 else Concat()(*found))
        for i in range(self.message_passing_steps):
            messages = getattr(self, f"edge_{i}")(nodes, edges)
            if self.residual == "edges":
                edges = messages = edges + messages
            elif i < self.message_passing_steps - 1:
                edges = edges + messages
            nodes = nodes + getattr(self, f"node_{i}")(Aggregate(self.how)(messages), nodes)
        return self.decoder(nodes)
