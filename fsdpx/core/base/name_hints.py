"""Suggestions for unknown names. A single table maps names of other libraries to their equivalents in fsdpx.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import wraps
from inspect import Parameter, signature
from typing import Any, Literal, ParamSpec, TypeVar

from fsdpx.core.base.arguments import wrap_with_type_hint_check
from fsdpx.errors import ConfigError, FsdpxError

__all__ = [
    "CALLS_ELSEWHERE", "NAMES_ELSEWHERE", "did_you_mean", "make_attribute_error", "parse_patterns",
    "require_known_options", "require_pattern_matches", "suggest_number_format", "wrap_constructor_with_option_check",
    "wrap_with_option_check",
]  # fmt: skip

P = ParamSpec("P")
T = TypeVar("T")
_EQUIVALENTS = {
    'strategy="fsdp"': "FULL_SHARD FSDP FullyShardedDataParallel",
    'strategy="zero3"': "ZeRO-3",
    'strategy="zero2"': "SHARD_GRAD_OP ZeRO-2",
    'strategy="zero1"': "ZeRO-1 ZeroRedundancyOptimizer",
    'strategy="hybrid"': "HYBRID_SHARD HSDP",
    'strategy="ddp"': "NO_SHARD DDP DistributedDataParallel Horovod",
    "strategy=": "sharding_strategy",
    "loss=": "criterion loss_fn",
    "optimizer=": "optim",
    "optimizer=optim.AdamW(lr=...)": "learning_rate lr",
    "optimizer=optim.AdamW(lr=optim.schedules.Cosine(...))": "lr_scheduler scheduler",
    "fsdpx.init(), which gets it from the launcher": "init_method",
    "nothing: the trainer passes the model's parameters; groups= divides them into groups": "params",
    "mpiexec -n, or fsdpx run -n: the launcher decides": "world_size nprocs num_processes",
    "fsdpx run --nproc-per-node: the launcher decides": "nproc_per_node",
    "fsdpx run --nodes: the launcher decides": "nnodes num_nodes num_machines",
    "an #SBATCH line in the file of --print-batch slurm, or an option of sbatch": "time account partition qos walltime",
    "nothing: the launcher brings ranks together; leave it out": "rdzv_endpoint rdzv_backend rdzv_id",
    "nothing: without a hostfile, all ranks are on this host; leave it out": "standalone",
    "comm=": "process_group group",
    "mesh=fsdpx.Mesh(...)": "device_mesh",
    "device_map=": "device_ids output_device",
    "microbatches=, the number of microbatches, not their size": "micro_batch_size train_micro_batch_size_per_gpu",
    "microbatches=": "gradient_accumulation_steps accumulate_grad_batches num_microbatches",
    "clip_norm=": "gradient_clipping max_grad_norm gradient_clip_val",
    "precision=": "mixed_precision dtype",
    'precision="fp16"': "fp16",
    'precision="bf16"': "bf16",
    "offload=fsdpx.OffloadConfig(folder), which offloads to disk": "cpu_offload",
    'recompute="all"': "activation_checkpointing gradient_checkpointing",
    "group_bytes=, such as '25MiB'": "bucket_cap_mb",
    "group_bytes=, which groups small layers; each larger layer is a unit": "auto_wrap_policy",
    "prefetch=": "backward_prefetch limit_all_gathers forward_prefetch",
    "nothing: parameters without a gradient are found automatically; leave it out": "find_unused_parameters",
    "nothing: every step is planned in advance; leave it out": "static_graph",
    "nothing: parameters keep their names; leave it out": "use_orig_params",
    "nothing: all ranks start with the same values; leave it out": "sync_module_states",
    "nothing: only the batch passed to step() matters; leave it out": "dataset_size",
    'strategy="fsdp" for True, "zero2" for False': "reshard_after_forward",
    "trainer.no_sync(), or microbatches=": "no_sync",
    "nothing: gradients are views of flat buffers; leave it out": "gradient_as_bucket_view",
    "nothing: running statistics are computed over the global batch; leave it out": "broadcast_buffers",
    "frozen=, with name patterns": "ignored_modules",
    "precision=fsdpx.Precision(compute=...)": "param_dtype",
    "precision=fsdpx.Precision(reduce=...)": "reduce_dtype",
    'strategy="zero1", "zero2" or "zero3"': "zero_stage",
    "mesh=fsdpx.Mesh(tensor=...)": "tensor_parallel_size tensor_model_parallel_size tp",
    "mesh=fsdpx.Mesh(pipe=...)": "pipeline_parallel_size pipeline_model_parallel_size pp",
    "nothing: it is the number of ranks divided by pipe= and tensor=; leave it out": "data_parallel_size",
    "mesh=fsdpx.Mesh(replica=...) to replicate the state, shard=... to shard it": "dp",
    "mesh=fsdpx.Mesh(replica=...)": "dp_replicate",
    "mesh=fsdpx.Mesh(shard=...)": "dp_shard",
    'mesh=fsdpx.Mesh(tensor=...) and sequence="ring"': "context_parallel_size cp",
    'mesh=fsdpx.Mesh(tensor=...) and sequence="parallel"': "sp",
    'mesh=fsdpx.Mesh(tensor=...) and sequence="samples"': "expert_model_parallel_size ep",
    "nothing: the axes are replica, shard, pipe and tensor": "mesh_dim_names",
    "fsdpx.Mesh(replica=..., shard=..., pipe=..., tensor=...)": "mesh_shape",
    "prefetch=, the number of batches that a thread reads ahead": "num_workers prefetch_factor",
    "nothing: batches are copied to the GPU as needed; leave it out": "pin_memory",
    "data.DataLoader(dataset, batch_size)": "train_batch_size batch_size",
    "trainer.fit(loader, epochs=...)": "num_epochs epochs",
    "nn.Sequential": "ModuleList",
    "nn.Composite, or a torch.nn.Module, which distribute accepts unchanged": "Module",
    "nn.ParameterSpec, in the specs of a layer": "Parameter",
    "layers, such as nn.ReLU() and nn.Softmax()": "functional",
    "nn.CrossEntropyLoss, without the log_softmax before it": "NLLLoss",
    "nn.BCEWithLogitsLoss, without the sigmoid before it": "BCELoss",
    "nn.BatchNorm": "BatchNorm1d BatchNorm2d BatchNorm3d SyncBatchNorm",
    "nn.InstanceNorm": "InstanceNorm1d InstanceNorm2d InstanceNorm3d",
    "nn.ChannelLayerNorm": "LayerNorm2d",
    "nn.NeighborhoodAttention": "NeighborhoodAttention1D NeighborhoodAttention2D NeighborhoodAttention3D",
    "nn.PhysicsAttention": "Physics_Attention_Irregular_Mesh Physics_Attention_1D Physics_Attention_2D "
    "Physics_Attention_3D",
    "nn.RelativeL2": "LpLoss",
    "nn.RelativeH1": "H1Loss",
    "nn.MultiHeadAttention": "MultiheadAttention",
    "nn.TransformerBlock": "TransformerEncoderLayer",
    "a torch.nn.Module, which distribute accepts unchanged": "LSTM GRU RNN",
    "optim.schedules.Cosine": "CosineAnnealingLR",
    "optim.schedules.Step": "StepLR",
    "optim.schedules.Linear": "LinearLR",
    "optim.schedules.WarmUp": "SequentialLR",
    "optim.schedules.WarmUp(..., optim.schedules.Cosine(...))": "OneCycleLR",
    "optimizer=optim.AdamW(lr=...), a function of the step": "LambdaLR",
    "fsdpx.init()": "init_process_group",
    "fsdpx.finalize()": "destroy_process_group",
    "fsdpx.rank()": "get_rank",
    "fsdpx.world_size()": "get_world_size",
    'fsdpx.distribute(model, strategy="fsdp")': "fully_shard",
    "fsdpx.distribute(model, ...)": "Accelerator",
    "fsdpx.Mesh": "DeviceMesh init_device_mesh",
    "data.ArrayDataset": "TensorDataset",
    "data.DataLoader": "DataLoader",
    "data.DataLoader(dataset, batch_size, comm=trainer.data_group)": "DistributedSampler",
    "trainer.predict(x), or trainer.evaluate(x, y)": "no_grad",
    "trainer.save(folder)": "save",
    "trainer.load(folder)": "load",
}  # fmt: skip
"""Maps each fsdpx name to the equivalent names in other libraries."""
NAMES_ELSEWHERE: dict[str, str] = {word: ours for ours, words in _EQUIVALENTS.items() for word in words.split()}
"""Maps each name in another library to its equivalent in fsdpx. Case, dashes and underscores in names are ignored."""
CALLS_ELSEWHERE: dict[str, str] = {
    "state_dict": "trainer.parameters(), or trainer.save(folder)",
    "load_state_dict": "trainer.load_parameters(values), or trainer.load(folder)",
    "clip_grad_norm_": "distribute(..., clip_norm=...)",
    "train": "nothing: step() trains, whereas evaluate() and predict() do not",
    "eval": "trainer.evaluate(x, y), or trainer.predict(x)",
    "module": "trainer.parameters()",
    "barrier": "fsdpx.barrier()",
    "to": "distribute(..., device=...)",
    "cuda": 'distribute(..., device="cuda")',
}  # fmt: skip
"""Maps each method name of a model or engine in another library to its equivalent in fsdpx."""
_OPTIONS: dict[str, str] = {
    "learning_rate": "lr", "epsilon": "eps", "beta": "betas", "beta1": "betas", "beta2": "betas", "beta_1": "betas",
    "beta_2": "betas", "b1": "betas", "b2": "betas", "wd": "weight_decay", "decay": "weight_decay",
    "T_max": "steps", "total_steps": "steps", "eta_min": "final", "step_size": "every",
    "nproc_per_node": "per_node", "nnodes": "nodes", "num_nodes": "nodes", "nprocs": "ranks", "num_processes": "ranks",
    "world_size": "ranks", "spawn.nprocs": "size", "spawn.world_size": "size", "spawn.nproc_per_node": "size",
}  # fmt: skip
"""Maps each wrong option name that a user may try to the correct fsdpx option. The wrong names are options of
optimizers, schedules and launchers in other libraries, or of other fsdpx functions."""
_FORMATS = {
    "float64": "fp64 64 64-true double", "float32": "fp32 32 32-true float single no",
    "bf16": "bfloat16 bf16-mixed mixed_bfloat16", "float16": "fp16 16 16-mixed mixed_float16 half",
}  # fmt: skip
"""Maps each number format of fsdpx to its names in other libraries."""
_FORMATS_ELSEWHERE = {word: ours for ours, words in _FORMATS.items() for word in words.split()}
_PLAIN = str.maketrans("", "", "-_ ")
_OTHERS = {word.lower().translate(_PLAIN): ours for word, ours in NAMES_ELSEWHERE.items()}


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a suggestion for an unknown word, as the end of a sentence: the word's equivalent in fsdpx, or the most
    similar of the `known` words. Return "" if there is none."""
    ours = _OTHERS.get(word.rpartition(".")[2].lower().translate(_PLAIN))
    if ours is not None:
        return f"; here that is {ours}"
    near = get_close_matches(word, list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def suggest_number_format(given: Any, known: Collection[Any]) -> str:
    """Return a suggestion for an unknown number format, as the end of a sentence. `given` is the name of a format in
    another library, or a dtype. The suggestion is the corresponding format in `known`. Return "" if there is none."""
    word = given if isinstance(given, str) else getattr(given, "__name__", str(given)).rpartition(".")[2]
    ours = _FORMATS_ELSEWHERE.get(word, word)
    return f"; here that is {ours!r}" if ours in known else ""


def make_attribute_error(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """Return the AttributeError for a name that a module does not have, with a suggestion of what was probably meant.
    """
    hint = "" if name.startswith("_") else did_you_mean(name, known)
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}", name=name)


def require_known_options(call: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError for an option that the function `call` does not have, with a suggestion of what was probably
    meant."""
    known = list(known)
    for name in options:
        if name not in known:
            ours = _OPTIONS.get(f"{call}.{name}", _OPTIONS.get(name))
            hint = f"; here that is {ours}=" if ours in known else did_you_mean(name, known) or ": " + ", ".join(known)
            raise ConfigError(f"{call}({name}=...): no such option{hint}")


def wrap_constructor_with_option_check(cls: type[T]) -> type[T]:
    """Make the constructor of a dataclass raise ConfigError for an unknown option or an argument that does not fit its
    type hint. Return the class.

    The error for an unknown option suggests what was probably meant. If parameters are passed to an optimizer, as in
    PyTorch, the error tells the user to leave them out.
    """
    known = [field.name for field in fields(cls) if field.init]  # type: ignore[arg-type]
    checked_init = wrap_with_type_hint_check(cls.__init__, cls.__name__)

    @wraps(checked_init)
    def check_and_init(self: Any, *given: Any, **options: Any) -> None:
        require_known_options(type(self).__name__, options, known)
        if given and hasattr(cls, "update") and isinstance(given[0], Iterator | list):
            raise ConfigError(f"{cls.__name__}(parameters, ...): leave out the parameters: the trainer passes them")
        checked_init(self, *given, **options)

    cls.__init__ = check_and_init  # type: ignore[method-assign]
    return cls


_REST = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD


def wrap_with_option_check(function: Callable[P, T], when: Literal["after", "failed"] = "after") -> Callable[P, T]:
    """Wrap a function or an `__init__` to raise ConfigError for an unknown option or an argument that does not fit its
    type hint. The error for an unknown option suggests what was probably meant.

    `when` is passed to `wrap_with_type_hint_check`.
    """
    name, named = function.__qualname__.removesuffix(".__init__"), signature(function).parameters
    taken = [one for one, parameter in named.items() if parameter.kind not in _REST]
    known = [one for one in taken if one not in ("self", "trainer")]
    checked = wrap_with_type_hint_check(function, name, when)

    @wraps(function)
    def call_checked(*given: P.args, **options: P.kwargs) -> T:
        require_known_options(name, (one for one in options if one not in taken), known)
        return checked(*given, **options)

    return call_checked


def parse_patterns(argument: str, given: Any) -> tuple[str, ...]:
    """Convert `given`, the name patterns passed for `argument`, to a tuple. A string is a single pattern. Raise
    ConfigError if `given` is neither a string nor a list of strings."""
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, Collection) or isinstance(given, Mapping) or not all(isinstance(p, str) for p in given):
        raise ConfigError(f"{argument}={given!r}: a list of name patterns is needed, such as ['0.*', 'head.weight']")
    return tuple(given)


def require_pattern_matches(
    argument: str, patterns: Iterable[str], names: Iterable[str], what: str = "parameter",
    fits: Callable[[str, str], bool] = fnmatchcase, kind: type[FsdpxError] = ConfigError,
) -> None:  # fmt: skip
    """Raise an error if one of the patterns matches none of the names. The error message contains the argument, the
    pattern and the most similar names.

    Parameters
    ----------
    argument : name of the argument that contains the patterns, for the error message
    patterns, names : the given patterns, and the existing names
    what : the kind of object that has these names, for the error message
    fits : function (name, pattern) that returns whether they match
    kind : class of the error
    """
    known = list(names)
    for pattern in patterns:
        if not any(fits(name, pattern) for name in known):
            word = pattern.strip("*.")
            near = [n for n in known if word and word in n] or get_close_matches(word, known, 6, 0.4) or known
            shown = ", ".join(map(repr, near[:6])) + (" ..." if len(near) > 6 else "")
            there = f"{'there are' if near is known else 'the nearest are'} {shown}" if known else "there is none"
            raise kind(f"{argument}: {pattern!r} matches no {what}; {there}")
