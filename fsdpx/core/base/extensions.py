"""Look up extensions by name. The core knows an extension only by its name, and imports it when the name is first used.

Other packages add extensions through entry points. In the group `fsdpx.codec`, for example, an entry point declares the
name of a codec and its `module:attribute`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

from fsdpx.errors import ConfigError

__all__ = [
    "EXTENSIONS",
    "import_declared_extension",
    "import_extension_if_declared",
    "import_extension_module",
    "list_extensions",
]

EXTENSIONS: dict[str, dict[str, str]] = {
    "codec": {
        "int8": "fsdpx.ext.compression.int8:Int8",
        "topk": "fsdpx.ext.compression.topk:TopK",
        "powersgd": "fsdpx.ext.compression.powersgd:PowerSGD",
    },
    "backend": {
        "nccl": "fsdpx.ext.gpu.nccl:open_nccl_communicator",
        "gloo": "fsdpx.ext.gloo.open_gloo:open_gloo",
    },
    "kernels": {"fields": "fsdpx.ext.fields.kernels", "meshes": "fsdpx.ext.meshes.kernels"},
    "code": {"disk": "fsdpx.ext.native.store:STORE"},
    "device": {"cuda": "fsdpx.ext.gpu.device:CUDA", "shape": "fsdpx.core.array.shapes.device:SHAPES"},
    "array": {"cupy": "fsdpx.ext.gpu.device:CUDA", "fsdpx.core.array.shapes": "fsdpx.core.array.shapes.device:SHAPES"},
    "half": {
        "matmul": "fsdpx.ext.half:matmul",
        "library": "fsdpx.ext.half.arithmetic:find_matmul_library_and_warn",
        "precision": "fsdpx.ext.half.arithmetic:choose_float16_precision",
        "optimizer": "fsdpx.ext.half.rounded:RoundedOptimizer",
    },
    "strategy": {
        "async": "fsdpx.ext.asynchronous:AsyncSGD",
        "gossip": "fsdpx.ext.asynchronous:GossipSGD",
        "local_sgd": "fsdpx.ext.asynchronous:make_local_sgd",
        "diloco": "fsdpx.ext.asynchronous:LocalSGD",
    },
    "verbs": {
        "asynchronous": "fsdpx.ext.asynchronous.local:VERBS",
        "offload": "fsdpx.ext.offload.verbs:VERBS",
    },
    "planner": {"auto": "fsdpx.plan.auto:fill_in_fastest_configuration"},
    "ranks": {"elastic": "fsdpx.ext.elastic.config:ElasticConfig"},
    "layer": {"moe": "fsdpx.ext.moe.moe:MoE"},
    "library": {"torch": "fsdpx.ext.interop.torch:adapt_torch"},
    "observer": {
        "watchdog": "fsdpx.ext.watch.watchdog:start_watchdog",
        "trace": "fsdpx.ext.observe.trace:TraceWriter",
        "values": "fsdpx.ext.observe.record:ValueRecorder",
        "replay": "fsdpx.ext.gpu.replay:CudaGraphObserver",
    },
    "fit": {
        "log": "fsdpx.ext.observe.log:TrainingLog",
        "progress": "fsdpx.ext.observe.progress:ProgressBar",
        "preemption": "fsdpx.ext.watch.preempt:Preemption",
        "routing": "fsdpx.ext.observe.routing:ExpertLoadMetrics",
    },
    "trainer": {
        "report": "fsdpx.ext.observe.report:make_report_of_rank",
        "summary": "fsdpx.ext.observe.report:gather_summary",
        "routing": "fsdpx.ext.observe.routing:gather_expert_load",
        "measure": "fsdpx.ext.observe.measure:measure_timeline_of_fastest_step",
        "generate": "fsdpx.models.generation.generate:generate",
    },
}
"""Extensions, keyed by kind and name, each as `module:attribute`. The kind determines what the attribute is:

codec : a class or function that makes a `Codec` and can be called without arguments
backend : a function that opens a communicator for a `core.comm.init.CommunicatorRequest`
kernels : a package of kernels, with the compiled ones in its folder `compiled`; `python -m fsdpx compile --all`
    compiles the kernels of every package
code : a store of machine code (a `core.array.jit.CodeStore`)
device : a `core.array.devices.Device`, keyed by its name in `distribute(device=...)`
array : a `core.array.devices.Device`, keyed by the module that defines the class of the device's arrays
half : 16-bit arithmetic: the module of matrix products, a function that names the library that computes these products,
    a function that returns the formats of precision="fp16", and the optimizer for parameters held in bfloat16
strategy : a function that makes a `SyncChoice` for ranks that do not perform every step together
verbs : the table of verbs (operations of a program) to which the module adds its own verbs on import, so that tools can
    read programs of other runs
planner : a function that chooses all other options for a strategy such as "auto"; its arguments are a recipe, a
    communicator and the options of the planner
ranks : a `CallRunnerChoice` class, for a trainer whose set of ranks may change during training; its constructor can be
    called without arguments
layer : a layer class that a model of `fsdpx.nn` uses if an option requests it
library : a function that converts a model and a loss of another library to layers, keyed by the library's import name.
    The function's third argument is the domain that the layers run over, if there is one
observer : an observer that is created on request: "watchdog" watches the ranks of a communicator, unless
    FSDPX_WATCH=0; "trace", "values" and "replay" observe an engine, with `trace=`, FSDPX_RECORD and `replay=`. Other
    observers are passed to `Engine.add_observer`
fit : objects that `fit` creates by default: callbacks, a handler of stop signals, and metrics of layers with experts
trainer : the function that implements a method of a trainer, or of `trainer.inspect`
"""


def import_extension_if_declared(kind: str, name: str, optional: bool = False) -> Any:
    """Import and return the extension `name` of a kind such as "codec"; return None if it is not declared.

    If `optional` is true, also return None if the files of the extension are missing.

    Raises
    ------
    ConfigError : the extension is declared, but its files are missing
    """
    target = EXTENSIONS[kind].get(name) or _read_entry_points_of_kind(kind).get(name)
    if target is None:
        return None
    module, _, attribute = target.partition(":")
    home = import_extension_module(module, f"{kind} {name!r}", optional)
    return getattr(home, attribute) if home and attribute else home


def import_extension_module(module: str, what: str, optional: bool = False) -> Any:
    """Import and return a module of an extension.

    If its files are missing, return None if `optional` is true; otherwise raise a ConfigError that begins with `what`.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        is_missing_module = f"{module}.".startswith(f"{error.name}.")
        if is_missing_module and optional:
            return None
        # the missing module is a library that the extension imports, not the extension itself
        if not is_missing_module and not str(error.name).startswith("fsdpx."):
            raise
        raise ConfigError(
            f"{what} is an extension whose files are missing: there is no {error.name}; install it again, or leave it "
            "out"
        ) from error


def import_declared_extension(kind: str, name: str) -> Any:
    """Import and return the extension `name` of a kind such as "codec"; raise ConfigError if it is not declared."""
    extension = import_extension_if_declared(kind, name)
    if extension is None:
        raise ConfigError(f"unknown {kind} {name!r}: choose one of {', '.join(list_extensions(kind))}")
    return extension


def list_extensions(kind: str) -> list[str]:
    """Return the names of all extensions of a kind such as "codec". Names from fsdpx come first, followed by names from
    other packages."""
    return [*EXTENSIONS[kind], *_read_entry_points_of_kind(kind)]


@cache
def _read_entry_points_of_kind(kind: str) -> Mapping[str, str]:
    """Return the extensions of this kind that installed packages declare, as a dict {name: `module:attribute`}."""
    # imported only when needed, because importing importlib.metadata is slow
    from importlib.metadata import entry_points

    return {
        point.name: point.value for point in entry_points(group=f"fsdpx.{kind}") if point.name not in EXTENSIONS[kind]
    }
