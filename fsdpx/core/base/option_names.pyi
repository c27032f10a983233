# Read only by type checkers, never when a program runs. tests/core/base/test_option_names.py checks that each list
# agrees with the table or the signature that it copies.
from collections.abc import Callable, Collection, Iterator, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict

if TYPE_CHECKING:  # so that mypy checks these modules in the order in which they are run
    from fsdpx.core.array.devices import DeviceMap
    from fsdpx.core.base.config import TraceConfig

Backend = Literal["node", "mpi", "nccl", "gloo", "local", "fake"]
CodecName = Literal["plain", "ring", "bf16", "fp16", "int8", "topk", "powersgd"]
Device = Literal["cpu", "cuda", "shape"]
DtypeName = Literal["float64", "float32", "bf16", "bfloat16", "fp16", "float16"]
PrecisionName = Literal["float64", "float32", "bf16", "bfloat16", "bf16-true", "fp16", "float16"]
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv"]
SequenceMode = Literal["parallel", "ulysses", "ring", "samples"]
Strategy = Literal["ddp", "zero1", "zero2", "zero3", "fsdp", "hybrid", "async", "gossip", "local_sgd", "diloco", "auto"]
WeightsChoice = Literal["parameters", "average"]

class ForeignModule(Protocol):
    """A module of another library, which has methods of a `torch.nn.Module` that layers of fsdpx lack."""

    training: bool

    def named_parameters(self, prefix: str = ..., recurse: bool = ...) -> Iterator[tuple[str, Any]]: ...

class RuntimeArgs(TypedDict, total=False):
    """Keyword arguments of `fsdpx.distribute` in addition to those in its signature: the fields of `RuntimeOptions`,
    and the arguments of strategy="auto"."""

    device: Device
    device_map: DeviceMap
    backend: Backend | None
    group_bytes: int | str | None
    prefetch: int | None
    costs: Mapping[str, float] | None
    check: bool | None
    check_finite: bool
    tune: bool | None
    replay: bool
    trace: str | PathLike[str] | TraceConfig | None
    batch: Any
    memory: int | str | None
    machine: Any

class GenerateArgs(TypedDict, total=False):
    """Keyword arguments of `Trainer.generate`."""

    temperature: float
    top_k: int | None
    top_p: float | None
    repetition_penalty: float
    stop: int | Collection[int]
    seed: int
    stream: Callable[[int, int], object] | None
    cache: bool
