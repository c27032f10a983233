"""Lists the figures in a prediction that are not based on measurements."""

from __future__ import annotations

from fsdpx.core.base.config import normalize_half_name, resolve_precision
from fsdpx.plan.machine import Machine
from fsdpx.plan.prediction import Prediction

__all__ = ["describe_unmeasured_figures"]

MEASURE = "python -m fsdpx measure-machine"


def describe_unmeasured_figures(found: Prediction) -> list[str]:
    """Return a list of sentences that say which figures of the prediction are not based on measurements. The list is
    empty if there are no such figures."""
    machine, ranks = found.machine, found.mesh.size
    measured = machine.measured or ()
    sentences = []
    if machine.measured is None:
        sentences.append(f"{machine.name} does not say what of it was measured: {MEASURE} writes a file that does")
    elif "compute" not in measured:
        sentences.append(f"{machine.name} has published figures, none of which was measured: expect other times")
    elif ranks > 1 and "links" not in measured:
        sentences.append(f"how long messages take on {machine.name} is not measured: its links have published figures")
    more = (
        _make_unmeasured_kernels_warning(machine),
        _make_unmeasured_half_rate_warning(found),
        _explain_if_sharding_over_gpus(found),
    )
    return sentences + [*filter(None, more)]


def _make_unmeasured_kernels_warning(machine: Machine) -> str:
    """Return a warning if no kernel of a CPU machine was measured, else "". Without measured rates, kernels are assumed
    to reach the rate of matrix products, but convolutions reach at most half of it."""
    if machine.compute.gpu or machine.compute.kernels.passes:
        return ""
    rates = f"no kernel of {machine.name} was measured: all are priced as matrix products and copies of memory"
    return f"{rates}, which convolutions and norms do not reach; {MEASURE} there measures them"


def _make_unmeasured_half_rate_warning(found: Prediction) -> str:
    """Return a warning if the machine has no measured rate for the 16-bit number format of the step, else ""."""
    compute, machine = found.machine.compute, found.machine
    formats = resolve_precision(found.step.options["precision"])
    name = normalize_half_name(formats.compute)
    known = compute.kernels.passes or (compute.gpu and "compute" in (machine.measured or ()))
    if known or formats.compute in ("float32", "float64"):
        return ""
    if compute.gpu or name in compute.flops:
        need = "" if compute.gpu else ", which is reached with oneDNN alone"
        return f"{name} on {machine.name} goes at a published rate{need}"
    return (
        f"{machine.name} has no rate for {name}: it is priced as float32, which is what processors compute without "
        "oneDNN and instructions for it"
    )


def _explain_if_sharding_over_gpus(found: Prediction) -> str:
    """Return a warning if the step shards state over GPUs, else "". Predictions for GPUs were validated only for
    replicas, tensor parallelism and pipeline parallelism."""
    if not found.machine.compute.gpu or found.mesh.width_of("shard") < 2:
        return ""
    return "no measured step of several GPUs with zero1 to fsdp stands behind these times: they are computed alone"
