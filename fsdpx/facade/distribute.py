"""distribute: from a model and its choices to a trainer; all ranks check every choice alike before any byte moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fsdpx.comm.codecs import Codec
from fsdpx.comm.communicator import Communicator
from fsdpx.comm.mesh import Mesh
from fsdpx.comm.opening import adopt, resilient
from fsdpx.comm.opening import world as open_world
from fsdpx.config import Precision, Sharding
from fsdpx.elastic.options import Elastic
from fsdpx.elastic.trainer import ElasticTrainer
from fsdpx.errors import ConfigError
from fsdpx.facade.functional import default
from fsdpx.nn.layer import Layer
from fsdpx.trainer.assemble import session_of
from fsdpx.trainer.recipe import Distribution, Machinery, Recipe, Training
from fsdpx.trainer.trainer import Trainer
from fsdpx.watch.watchdog import watch_axes

__all__ = ["distribute"]


def distribute(
    model: Layer,
    *,
    loss: Any,
    optimizer: Any,
    strategy: str | Sharding = "fsdp",
    mesh: Mesh | None = None,
    comm: Any = None,
    backend: str | None = None,
    microbatches: int | None = None,
    seed: int = 0,
    precision: str | Precision | None = None,
    clip_norm: float | None = None,
    group_bytes: int | None = None,
    codec: str | Codec | None = None,
    chunks: int | None = None,
    ahead: int | None = None,
    frozen: Sequence[str] = (),
    device: str = "cpu",
    check: bool | None = None,
    check_finite: bool = False,
    tune: bool | None = None,
    progress: str | None = None,
    schedule: str | Callable[..., Any] = "1f1b",
    stages: Sequence[str | int] | None = None,
    costs: Mapping[str, float] | None = None,
    recompute: Any = None,
    tensor_plan: Mapping[str, Any] | None = None,
    sequence: str | None = None,
    elastic: bool | Elastic = False,
) -> Trainer:
    """Spread `model` over the ranks of `comm` and return its `Trainer`. Collective.

    loss, optimizer: from `fsdpx.nn` and `fsdpx.optim`. strategy: "ddp", "zero1", "zero2", "zero3", "fsdp", "hybrid" or
    `fsdpx.Sharding(...)`. mesh: widths of the axes; they replace those of the strategy. comm: an mpi4py communicator
    (duplicated) or a `Communicator`, by default that of `fsdpx.init()`; backend: "mpi" or "local" opens one anew.
    microbatches: how many pieces each rank's batch runs in (default 1; in a pipe 4 for each of its ranks, which leaves
    little of the bubble: Huang et al. 2019). seed: of initialisation and dropout, independent of the layout. precision:
    "float64", "float32", "bf16", "fp16" or `fsdpx.Precision(...)`. clip_norm: largest global
    gradient norm. group_bytes: smaller layers are grouped until a unit holds that many bytes of parameters (default:
    measured, 1 MiB without tuning).
    codec: how gradients travel ("plain", "ring", "bf16", "fp16" or a `Codec`). chunks: cut the global batch into that
    many equal parts whose gradients are added in one fixed tree: bit-identical results at any number of ranks.
    ahead: pages gathered ahead of use. frozen: name patterns of parameters that are not trained. device: "cpu",
    "cuda", or "shape" to count without computing. check: compare every collective between ranks before it runs
    (default: FSDPX_CHECK). check_finite: look for NaN and Inf in every unit. tune: choose what was not said by a
    measurement of some 100 ms that is kept on disk (default: yes, unless FSDPX_TUNE=0). progress: "loop" moves
    transfers on between actions, "thread" also during them (default: measured, "loop" without tuning).

    With a pipe axis: schedule is "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", a function or a text file
    (docs/schedules.md); stages: where the model is cut, as the paths of the first layers or the numbers of layers of
    all stages; costs: path pattern -> cost of a layer, for the automatic cut. With a tensor axis: tensor_plan says how
    layers are cut, by path pattern (default: the model's own); sequence: "parallel" for norms and dropout on parts of
    the sequence, "ulysses" or "ring" for whole parameters and sequences cut from end to end (docs/tensor.md).
    recompute: units that run forward again instead of keeping what backward needs: "all", every k-th, as many as it
    takes to stay within "512MiB", or "attention" alone.

    elastic: True or `fsdpx.Elastic(...)`: training goes on when ranks die, leave or join; batches are then given whole
    on every rank, and the result is an `ElasticTrainer` (docs/elastic.md).
    """
    recipe = Recipe(
        Training(
            model, loss, optimizer, frozen, microbatches, seed, clip_norm, chunks, check_finite, recompute
        ),
        Distribution(
            strategy, mesh, group_bytes, ahead, codec, schedule, stages, costs, tensor_plan, sequence
        ),
        Machinery(precision, device, check, tune, progress),
    )  # fmt: skip
    choice = Elastic.of(elastic)
    if choice is None:
        return Trainer(session_of(recipe, _world(comm, backend), watch=watch_axes))
    if backend not in (None, "mpi"):
        raise ConfigError(f"backend={backend!r}: elastic ranks exchange messages; leave backend out")
    return ElasticTrainer(recipe, resilient(comm), choice)


def _world(comm: Any, backend: str | None) -> Communicator:
    if comm is not None:
        return adopt(comm, backend)
    return default() if backend is None else open_world(backend)
