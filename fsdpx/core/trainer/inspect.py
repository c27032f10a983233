"""`trainer.inspect`: access to the engine and placement, measurements, and the settings that affect results."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fsdpx.core.base.extensions import import_declared_extension
from fsdpx.core.engine.engine import Engine
from fsdpx.core.state.placement import Placement
from fsdpx.core.trainer.call_runner import KEEPS_FOR_LATER, ON_EVERY_RANK, CallRunner, LastUpdate
from fsdpx.optim import get_learning_rate
from fsdpx.optim.optimizer import unwrap_optimizer

__all__ = ["Inspection"]

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class Inspection:
    """Read-only access to a trainer's internals through `trainer.inspect`: its engine and placement, its last update,
    and measurements."""

    __slots__ = ("_call_runner", "_parameters", "_step")

    def __init__(
        self,
        call_runner: CallRunner,
        step: Callable[[Any, Any], float],
        parameters: Callable[[], Mapping[str, np.ndarray]],
    ) -> None:
        self._call_runner, self._step, self._parameters = call_runner, step, parameters

    @property
    def engine(self) -> Engine:
        """The engine that runs this rank's programs."""
        return self._call_runner.session.engine

    @property
    def placement(self) -> Placement:
        """This rank's placement: layout of the parameters, mesh, number formats and options."""
        return self._call_runner.placement

    @property
    def last_update(self) -> LastUpdate | None:
        """Loss, gradient norm and learning rate of the last update; None before the first update."""
        return self._call_runner.last_update

    @property
    def loss_weight(self) -> float:
        """Denominator of the mean loss of the last `evaluate`: the number of samples, or of whatever else the loss
        counts, such as tokens."""
        return self._call_runner.loss_weight

    @property
    def lr(self) -> float:
        """Learning rate of the next update. To change it during training, give the optimizer a function of the step:
        `optim.SGD(lr=lambda step: 0.1 / step)`."""
        return get_learning_rate(self.placement.optimizer, self._call_runner.session.state.steps + 1)

    def list_settings(self) -> dict[str, str]:
        """Return the settings that affect results, except seed and data, as a dict that maps names to strings: layers,
        loss, optimizer, current learning rate. The settings are the same on every mesh, because model and loss are
        described without sharding."""
        session, place = self._call_runner.session, self.placement
        optimizer, clip = unwrap_optimizer(place.optimizer), place.options.clip_norm
        settings_by_name = {
            f"layer {node.path or '0'}": _repr_without_addresses(node.layer) for node in session.model.nodes
        }
        settings_by_name |= {
            "loss": _repr_without_addresses(session.loss),
            "clip_norm": str(clip),
            "learning rate": f"{self.lr:.6g}",
        }
        options = vars(optimizer) if hasattr(optimizer, "__dict__") else {}
        settings_by_name |= {
            f"optimizer.{name}": _repr_without_addresses(value) for name, value in options.items() if name != "lr"
        }
        return settings_by_name | {"optimizer": type(optimizer).__name__}

    def compute_fingerprint(self) -> str:
        """Return a SHA-256 digest of the names, dtypes, shapes and bytes of all parameters. Equal fingerprints mean
        bit-identical parameters. Collective."""
        digest = hashlib.sha256()
        for name, array in sorted(self._parameters().items()):
            digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def gather_summary(self) -> Any:
        """Return a `ReportSummary` with statistics over all ranks: time by operation, bandwidth, overlap, imbalance,
        and peak memory compared with the plan. Every rank gets the same summary. Print the summary to show a table.
        Collective."""
        return self._call_runner.run_call(
            ON_EVERY_RANK, "gather_summary", lambda: import_declared_extension("trainer", "summary")(self._call_runner)
        )

    def gather_expert_load(self) -> dict[str, Any]:
        """Return the load of the experts during training since the last `reset_counters`, summed over all ranks, as a
        dict that maps the path of each mixture-of-experts layer to its `ExpertLoad`. Collective."""
        return self._call_runner.run_call(
            ON_EVERY_RANK, "gather_expert_load", lambda: import_declared_extension("trainer",
            "routing")(self._call_runner)
        )

    def measure(self, x: Any, y: Any, steps: int = 5) -> Any:
        """Train for a few steps and return the measured time of each action (such as the forward pass of one layer
        group) on all pipeline ranks; see `fsdpx.ext.observe.measure`. Collective.

        Parameters
        ----------
        x, y : the batch, as for `Trainer.step`; every step uses the same batch
        steps : number of steps; they update the parameters

        Returns
        -------
        MeasuredStep : the timeline of the fastest step, and durations for simulating other schedules
        """
        measure = import_declared_extension("trainer", "measure")
        return self._call_runner.run_call(
            KEEPS_FOR_LATER, "measure", lambda: measure(self.engine, lambda: self._step(x, y), steps)
        )

    def save_trace(self) -> None:
        """Write a timeline of the last steps into the folder of `distribute(trace=...)`, one file per rank. Do nothing
        if no trace was requested. `fit` and `close` also call this method. Collective."""
        self._call_runner.require_open("save_trace")
        if self.engine.hooks.write_files:
            self._call_runner.agree_on_call("save_trace")
            self._call_runner.session.save_trace()

    def reset_counters(self) -> None:
        """Reset the traffic and time counters to zero."""
        self.engine.reset_counters()


def _repr_without_addresses(value: Any) -> str:
    """Return the repr of `value` without memory addresses, which differ from run to run."""
    return _ADDRESS.sub("", repr(value))
