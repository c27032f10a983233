"""Names that options take, for type checkers and editors. Each list is declared here and tested against its table.

At run time all of these types are `str`: packages of users add names (`fsdpx.core.base.extensions`), and the call that
looks a name up knows them all and says more about an unknown one."""

from typing import TYPE_CHECKING, Literal

__all__ = [
    "NAMES",
    "Backend",
    "CodecName",
    "Device",
    "DtypeName",
    "PrecisionName",
    "ScheduleName",
    "SequenceMode",
    "Strategy",
    "WeightsChoice",
]  # fmt: skip

_Backend = Literal["node", "mpi", "nccl", "gloo", "local", "fake"]
_CodecName = Literal["plain", "ring", "bf16", "fp16", "int8", "topk", "powersgd"]
_Device = Literal["cpu", "cuda", "shape"]
_DtypeName = Literal["float64", "float32", "bf16", "bfloat16", "fp16", "float16"]
_PrecisionName = Literal[_DtypeName, "bf16-true"]
_ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv"]
_SequenceMode = Literal["parallel", "ulysses", "ring", "samples"]
_Strategy = Literal[
    "ddp", "zero1", "zero2", "zero3", "fsdp", "hybrid", "async", "gossip", "local_sgd", "diloco", "auto"
]  # fmt: skip
_WeightsChoice = Literal["parameters", "average"]

if TYPE_CHECKING:
    Backend = _Backend
    CodecName = _CodecName
    Device = _Device
    DtypeName = _DtypeName
    PrecisionName = _PrecisionName
    ScheduleName = _ScheduleName
    SequenceMode = _SequenceMode
    Strategy = _Strategy
    WeightsChoice = _WeightsChoice
else:
    Backend = CodecName = Device = DtypeName = PrecisionName = ScheduleName = SequenceMode = Strategy = str
    WeightsChoice = str

NAMES = {
    "backend": _Backend, "codec": _CodecName, "device": _Device, "dtype": _DtypeName, "precision": _PrecisionName,
    "schedule": _ScheduleName, "sequence": _SequenceMode, "strategy": _Strategy, "weights": _WeightsChoice,
}  # fmt: skip
"""Option -> the `Literal` of its names, for `typing.get_args`."""
