# Only type checkers and editors read this file. At runtime, layers must not import modules that use layers.
# tests/core/base/test_option_names.py checks that the signature equals that of `distribute`.
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # lets mypy check the modules in the order in which they are imported
    from collections.abc import Callable, Mapping, Sequence
    from os import PathLike
    from typing import Any, Unpack

    from fsdpx.core.base.config import Precision, Sharding
    from fsdpx.core.base.option_names import (
        ForeignModule,
        PrecisionName,
        RuntimeArgs,
        ScheduleName,
        SequenceMode,
        Strategy,
    )
    from fsdpx.core.comm.mesh import Mesh
    from fsdpx.core.compression import Choice
    from fsdpx.core.state.sample_layout import Domain
    from fsdpx.core.state.storage import StorageLevelChoice
    from fsdpx.core.state.sync_policy import SyncChoice
    from fsdpx.core.state.units import Stages
    from fsdpx.core.trainer.call_runner import CallRunnerChoice
    from fsdpx.core.trainer.recipe import RuntimeOptions
    from fsdpx.core.trainer.trainer import Trainer
    from fsdpx.nn.layer import Layer
    from fsdpx.nn.losses import Loss
    from fsdpx.optim.optimizer import Average, Optimizer

__all__ = ["as_distributed"]

def as_distributed(
    model: Layer | ForeignModule,
    *,
    loss: Loss | ForeignModule | None = None,
    optimizer: Optimizer | None = None,
    strategy: Strategy | Sharding | SyncChoice = "fsdp",
    mesh: Mesh | None = None,
    comm: Any = None,
    microbatches: int | None = None,
    seed: int = 0,
    precision: PrecisionName | Precision | None = None,
    clip_norm: float | None = None,
    compression: Choice = None,
    reproducible_chunks: int | None = None,
    frozen: Sequence[str] = (),
    schedule: ScheduleName | PathLike[str] | Callable[..., Any] = "1f1b",
    stages: Stages | None = None,
    recompute: int | str | None = None,
    tensor_plan: Mapping[str, Any] | None = None,
    sequence: SequenceMode | None = None,
    elastic: bool | CallRunnerChoice = False,
    average: Average | None = None,
    offload: StorageLevelChoice | None = None,
    domain: Domain | None = None,
    runtime: RuntimeOptions | None = None,
    **rarely: Unpack[RuntimeArgs],
) -> Trainer: ...
