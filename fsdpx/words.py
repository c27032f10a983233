"""Words of other libraries, and of earlier versions of this one, and what to write instead: one table for all errors
about names that are unknown."""

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import wraps
from inspect import Parameter, signature
from opcode import opmap
from typing import Any, ParamSpec, TypeVar

from fsdpx.errors import ConfigError, FsdpxError

__all__ = [
    "CALLS", "GONE", "LEFT", "MOVED", "OTHERS", "absent", "demand_known", "demand_match", "knowing", "left", "meant",
    "moved", "patterns_of", "refusing",
]  # fmt: skip

P = ParamSpec("P")
T = TypeVar("T")
OTHERS: dict[str, str] = {
    "FULL_SHARD": 'strategy="fsdp"',
    "FSDP": 'strategy="fsdp"',
    "FullyShardedDataParallel": 'strategy="fsdp"',
    "ZeRO-3": 'strategy="zero3"',
    "SHARD_GRAD_OP": 'strategy="zero2"',
    "ZeRO-2": 'strategy="zero2"',
    "ZeRO-1": 'strategy="zero1"',
    "ZeroRedundancyOptimizer": 'strategy="zero1"',
    "HYBRID_SHARD": 'strategy="hybrid"',
    "HSDP": 'strategy="hybrid"',
    "NO_SHARD": 'strategy="ddp"',
    "DDP": 'strategy="ddp"',
    "DistributedDataParallel": 'strategy="ddp"',
    "Horovod": 'strategy="ddp"',
    "sharding_strategy": "strategy=",
    "criterion": "loss=",
    "loss_fn": "loss=",
    "optim": "optimizer=",
    "learning_rate": "optimizer=optim.AdamW(lr=...)",
    "lr": "optimizer=optim.AdamW(lr=...)",
    "lr_scheduler": "optimizer=optim.AdamW(lr=optim.schedules.Cosine(...))",
    "scheduler": "optimizer=optim.AdamW(lr=optim.schedules.Cosine(...))",
    "init_method": "fsdpx.init(), which takes it from the launcher",
    "params": "nothing: a trainer knows the parameters of its model, and groups= makes groups of them",
    "world_size": "mpiexec -n, or fsdpx run -n: the launcher decides",
    "nproc_per_node": "fsdpx run --nproc-per-node: the launcher decides",
    "nprocs": "mpiexec -n, or fsdpx run -n: the launcher decides",
    "num_processes": "mpiexec -n, or fsdpx run -n: the launcher decides",
    "nnodes": "fsdpx run --nodes: the launcher decides",
    "num_nodes": "fsdpx run --nodes: the launcher decides",
    "num_machines": "fsdpx run --nodes: the launcher decides",
    "rdzv_endpoint": "nothing: the launcher brings ranks together; leave it out",
    "rdzv_backend": "nothing: the launcher brings ranks together; leave it out",
    "rdzv_id": "nothing: the launcher brings ranks together; leave it out",
    "standalone": "nothing: without a hostfile all ranks are on this host; leave it out",
    "process_group": "comm=",
    "group": "comm=",
    "device_mesh": "mesh=fsdpx.Mesh(...)",
    "device_ids": "device_map=",
    "output_device": "device_map=",
    "micro_batch_size": "microbatches=, their number, not their size",
    "train_micro_batch_size_per_gpu": "microbatches=, their number, not their size",
    "gradient_accumulation_steps": "microbatches=",
    "accumulate_grad_batches": "microbatches=",
    "gradient_clipping": "clip_norm=",
    "max_grad_norm": "clip_norm=",
    "gradient_clip_val": "clip_norm=",
    "mixed_precision": "precision=",
    "dtype": "precision=",
    "fp16": 'precision="fp16"',
    "bf16": 'precision="bf16"',
    "cpu_offload": "offload=fsdpx.Offload(folder), on disk",
    "activation_checkpointing": 'recompute="all"',
    "gradient_checkpointing": 'recompute="all"',
    "bucket_cap_mb": "group_bytes=, such as '25MiB'",
    "auto_wrap_policy": "group_bytes=: layers are units by themselves",
    "backward_prefetch": "ahead=",
    "find_unused_parameters": "nothing: parameters without a gradient are found; leave it out",
    "static_graph": "nothing: a step is always known beforehand; leave it out",
    "use_orig_params": "nothing: parameters keep their names; leave it out",
    "sync_module_states": "nothing: all ranks begin with the same values; leave it out",
    "dataset_size": "nothing: the batch that step() is given counts; leave it out",
    "reshard_after_forward": 'strategy="fsdp" for True, "zero2" for False',
    "no_sync": "trainer.no_sync(), or microbatches=",
    "gradient_as_bucket_view": "nothing: gradients are views of flat buffers; leave it out",
    "broadcast_buffers": "nothing: running statistics are of the global batch; leave it out",
    "ignored_modules": "frozen=, with name patterns",
    "limit_all_gathers": "ahead=",
    "forward_prefetch": "ahead=",
    "param_dtype": "precision=fsdpx.Precision(compute=...)",
    "reduce_dtype": "precision=fsdpx.Precision(reduce=...)",
    "zero_stage": 'strategy="zero1", "zero2" or "zero3"',
    "tensor_parallel_size": "mesh=fsdpx.Mesh(tensor=...)",
    "tensor_model_parallel_size": "mesh=fsdpx.Mesh(tensor=...)",
    "tp": "mesh=fsdpx.Mesh(tensor=...)",
    "pipeline_parallel_size": "mesh=fsdpx.Mesh(pipe=...)",
    "pipeline_model_parallel_size": "mesh=fsdpx.Mesh(pipe=...)",
    "pp": "mesh=fsdpx.Mesh(pipe=...)",
    "data_parallel_size": "nothing: data ranks are those that pipe= and tensor= leave; leave it out",
    "dp": "mesh=fsdpx.Mesh(replica=...) for copies, shard=... for parts",
    "dp_replicate": "mesh=fsdpx.Mesh(replica=...)",
    "dp_shard": "mesh=fsdpx.Mesh(shard=...)",
    "context_parallel_size": 'mesh=fsdpx.Mesh(tensor=...) and sequence="ring"',
    "cp": 'mesh=fsdpx.Mesh(tensor=...) and sequence="ring"',
    "sp": 'mesh=fsdpx.Mesh(tensor=...) and sequence="parallel"',
    "expert_model_parallel_size": 'mesh=fsdpx.Mesh(tensor=...) and sequence="samples"',
    "ep": 'mesh=fsdpx.Mesh(tensor=...) and sequence="samples"',
    "mesh_dim_names": "nothing: the axes are replica, shard, pipe and tensor",
    "mesh_shape": "fsdpx.Mesh(replica=..., shard=..., pipe=..., tensor=...)",
    "num_microbatches": "microbatches=",
    "num_workers": "prefetch=, batches that a thread reads ahead",
    "prefetch_factor": "prefetch=, batches that a thread reads ahead",
    "pin_memory": "nothing: batches are copied where a GPU needs them; leave it out",
    "train_batch_size": "data.DataLoader(dataset, batch_size)",
    "batch_size": "data.DataLoader(dataset, batch_size)",
    "num_epochs": "trainer.fit(loader, epochs=...)",
    "epochs": "trainer.fit(loader, epochs=...)",
    "Sequential": "nn.Chain",
    "Module": "nn.Composite, or a torch.nn.Module, which distribute takes as it is",
    "ModuleList": "nn.Chain",
    "Parameter": "nn.Spec, in the specs of a layer",
    "functional": "layers: nn.ReLU(), nn.Softmax()",
    "CrossEntropyLoss": "nn.CrossEntropy",
    "NLLLoss": "nn.CrossEntropy, without the log_softmax before it",
    "MSELoss": "nn.MSE",
    "BCEWithLogitsLoss": "nn.BCEWithLogits",
    "BCELoss": "nn.BCEWithLogits, without the sigmoid before it",
    "BatchNorm1d": "nn.BatchNorm",
    "BatchNorm2d": "nn.BatchNorm",
    "BatchNorm3d": "nn.BatchNorm",
    "SyncBatchNorm": "nn.BatchNorm",
    "InstanceNorm1d": "nn.InstanceNorm",
    "InstanceNorm2d": "nn.InstanceNorm",
    "InstanceNorm3d": "nn.InstanceNorm",
    "MultiheadAttention": "nn.MultiHeadAttention",
    "TransformerEncoderLayer": "nn.TransformerBlock",
    "LSTM": "a torch.nn.Module, which distribute takes as it is",
    "GRU": "a torch.nn.Module, which distribute takes as it is",
    "RNN": "a torch.nn.Module, which distribute takes as it is",
    "CosineAnnealingLR": "optim.schedules.Cosine",
    "StepLR": "optim.schedules.Step",
    "LinearLR": "optim.schedules.Linear",
    "SequentialLR": "optim.schedules.WarmUp",
    "OneCycleLR": "optim.schedules.WarmUp(..., optim.schedules.Cosine(...))",
    "LambdaLR": "optimizer=optim.AdamW(lr=...), a function of the step",
    "init_process_group": "fsdpx.init()",
    "destroy_process_group": "fsdpx.finalize()",
    "get_rank": "fsdpx.rank()",
    "get_world_size": "fsdpx.world_size()",
    "fully_shard": 'fsdpx.distribute(model, strategy="fsdp")',
    "Accelerator": "fsdpx.distribute(model, ...)",
    "DeviceMesh": "fsdpx.Mesh",
    "init_device_mesh": "fsdpx.Mesh",
    "TensorDataset": "data.ArrayDataset",
    "DataLoader": "data.DataLoader",
    "DistributedSampler": "data.DataLoader(dataset, batch_size, comm=trainer.data)",
    "no_grad": "trainer.predict(x), or trainer.evaluate(x, y)",
    "save": "trainer.save(folder)",
    "load": "trainer.load(folder)",
}  # fmt: skip
"""Word -> what to write here. Capitals, dashes and underscores do not count."""
LEFT: dict[str, str] = {
    "SOAP": "optim.Muon(...)",
    "Prodigy": "optim.AdamW(lr=optim.schedules.WarmUp(...))",
    "AdamWScheduleFree": "optim.AdamW(lr=optim.schedules.WarmUp(...)) and average=fsdpx.EMA()",
    "OneBitAdam": 'optim.AdamW(...) and codec="int8"',
    "OneBit": 'codec="int8"',
    "AdamW8bit": 'optim.AdamW(...) and strategy="zero1", which divides its state',
    "Adafactor": 'optim.AdamW(...) and strategy="zero1", which divides its state',
    "sign": 'codec="int8"',
    "RandomK": 'codec="topk"',
    "param=int8": 'param="bf16", half the bytes',
    "EASGD": 'strategy="gossip", or "diloco"',
    "ParquetDataset": "datasets.load_dataset of Hugging Face, which goes into DataLoader as it is",
    "TarDataset": "any dataset with len() and [i], which goes into DataLoader as it is",
    "Mixture": "datasets.interleave_datasets of Hugging Face, or a dataset of your own with len() and [i]",
    "augment": "transform=, or the dataset's own [i]",
    "cuda_graphs": "nothing; leave it out",
    "ElasticTrainer": "Trainer: what an elastic one has more is in trainer.host",
    "--plot": "bench comm --json FILE, whose rows any program draws",
    "--node-rank": "torchrun, which comes with PyTorch, on each host (docs/launching.md)",
}
"""Name of an earlier version -> what to use instead."""
MOVED: dict[str, str] = dict.fromkeys((
    "engine", "placement", "last", "weight", "lr", "settings", "fingerprint", "summary", "routing", "measure",
    "save_trace", "reset",
), "inspect") | dict.fromkeys((
    "world", "rank", "alone", "most", "no_batch", "met", "apart", "finish", "remember", "checkpoint", "resume",
    "wait_saved", "trains", "training_ranks", "recoveries", "resize",
), "host")  # fmt: skip
"""What an earlier version's trainer had by itself -> the part of a trainer that has it now. The old name still works,
with a warning."""
GONE: dict[str, str] = {
    "unfreeze": "trainer.freeze(..., undo=True)",
    "save_pretrained": "fsdpx.models.save_pretrained(trainer, folder)",
    "routes": "nothing: trainer.inspect.routing() is empty without experts",
}
"""What an earlier version's trainer had -> what to use instead. The old name is an error."""
CALLS: dict[str, str] = {
    "state_dict": "trainer.parameters(), or trainer.save(folder)",
    "load_state_dict": "trainer.load_weights(values), or trainer.load(folder)",
    "clip_grad_norm_": "clip_norm= of distribute",
    "train": "nothing: step() trains, evaluate() and predict() do not",
    "eval": "trainer.evaluate(x, y), or trainer.predict(x)",
    "module": "trainer.parameters()",
    "barrier": "fsdpx.barrier()",
    "to": "device= of distribute",
    "cuda": 'device="cuda" of distribute',
}  # fmt: skip
"""What is called on a model or an engine of another library -> what to write here."""
_OPTIONS: dict[str, str] = {
    "learning_rate": "lr", "epsilon": "eps", "beta": "betas", "beta1": "betas", "beta2": "betas", "beta_1": "betas",
    "beta_2": "betas", "b1": "betas", "b2": "betas", "wd": "weight_decay", "decay": "weight_decay",
    "T_max": "steps", "total_steps": "steps", "eta_min": "final", "step_size": "every",
    "nproc_per_node": "per_node", "nnodes": "nodes", "num_nodes": "nodes", "nprocs": "ranks", "num_processes": "ranks",
    "world_size": "ranks", "spawn.nprocs": "size", "spawn.world_size": "size", "spawn.nproc_per_node": "size",
}  # fmt: skip
"""Option of another library's optimisers, schedules and launchers, or of a call of ours -> its option here."""
_PLAIN = str.maketrans("", "", "-_ ")
_LEFT = {word.lower().translate(_PLAIN): instead for word, instead in LEFT.items()}
_OTHERS = {word.lower().translate(_PLAIN): ours for word, ours in OTHERS.items()}


def meant(word: str, known: Iterable[str]) -> str:
    """What an unknown word may mean, as the end of a sentence: its name here, the nearest of `known`, or nothing."""
    if gone := left(word):
        return f"; {gone}"
    ours = _OTHERS.get(word.rpartition(".")[2].lower().translate(_PLAIN))
    if ours is not None:
        return f"; here that is {ours}"
    near = get_close_matches(word, list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def absent(module: str, name: str, known: Iterable[str]) -> AttributeError | ImportError:
    """The error for a name that a module does not have, with what may be meant. Call it from `__getattr__`.

    Python answers "from fsdpx import FSDP" with a text of its own for an AttributeError, which would hide this one."""
    hint = "" if name.startswith("_") else meant(name, known)
    by = sys._getframe(2)
    if by.f_code.co_code[by.f_lasti] == opmap["IMPORT_FROM"]:
        return ImportError(f"cannot import name {name!r} from {module!r}{hint}", name=module)
    return AttributeError(left(name) or f"module {module!r} has no attribute {name!r}{hint}")


def demand_known(call: str, options: Iterable[str], known: Iterable[str]) -> None:
    """ConfigError for options that a call does not have, with what may be meant."""
    known = list(known)
    for name in options:
        if name not in known:
            ours = _OPTIONS.get(f"{call}.{name}", _OPTIONS.get(name))
            hint = f"; here that is {ours}=" if ours in known else meant(name, known) or ": " + ", ".join(known)
            raise ConfigError(f"{call}({name}=...): no such option{hint}")


def knowing(kind: type[T]) -> type[T]:
    """Let a dataclass answer an option that it does not have with ConfigError, which says what may be meant."""
    known = [field.name for field in fields(kind) if field.init]  # type: ignore[arg-type]
    made = kind.__init__

    @wraps(made)
    def begin(self: Any, *given: Any, **options: Any) -> None:
        demand_known(type(self).__name__, options, known)
        made(self, *given, **options)

    kind.__init__ = begin  # type: ignore[method-assign]
    return kind


_REST = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD


def refusing(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function or an `__init__` answer an option that it does not have with ConfigError, as `knowing` does."""
    name, named = function.__qualname__.removesuffix(".__init__"), signature(function).parameters
    taken = [one for one, parameter in named.items() if parameter.kind not in _REST]
    known = [one for one in taken if one not in ("self", "trainer")]

    @wraps(function)
    def call(*given: P.args, **options: P.kwargs) -> T:
        demand_known(name, (one for one in options if one not in taken), known)
        return function(*given, **options)

    return call


def patterns_of(argument: str, given: Any) -> tuple[str, ...]:
    """The name patterns that an argument was given, a string as one of them; ConfigError for what is none."""
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, Collection) or isinstance(given, Mapping) or not all(isinstance(p, str) for p in given):
        raise ConfigError(f"{argument}={given!r}: a list of name patterns is needed, such as ['0.*', 'head.weight']")
    return tuple(given)


def demand_match(
    argument: str, patterns: Iterable[str], names: Iterable[str], what: str = "parameter",
    fits: Callable[[str, str], bool] = fnmatchcase, kind: type[FsdpxError] = ConfigError,
) -> None:  # fmt: skip
    """An error for a pattern that fits none of the names; it says the argument, the pattern and the nearest names.

    Parameters
    ----------
    argument : where the patterns were given
    patterns, names : those given, and those that there are
    what : a name is of
    fits : whether a name and a pattern belong together
    kind : of the error
    """
    known = list(names)
    for pattern in patterns:
        if not any(fits(name, pattern) for name in known):
            word = pattern.strip("*.")
            near = [n for n in known if word and word in n] or get_close_matches(word, known, 6, 0.4) or known
            shown = ", ".join(map(repr, near[:6])) + (" ..." if len(near) > 6 else "")
            there = f"{'there are' if near is known else 'the nearest are'} {shown}" if known else "there is none"
            raise kind(f"{argument}: {pattern!r} matches no {what}; {there}")


def moved(name: str) -> str:
    """What to say of a name that the trainer of an earlier version, or of another library, had; "" of any other."""
    if name in CALLS:
        return f"a trainer has no {name}: use {CALLS[name]}"
    instead = f"trainer.{MOVED[name]}.{name}" if name in MOVED else GONE.get(name)
    return "" if instead is None else f"a trainer has no {name} any more: use {instead}"


def left(word: str) -> str:
    """What to say of a name that an earlier version had; "" of any other."""
    instead = _LEFT.get(word.rpartition(".")[2].lower().translate(_PLAIN))
    return "" if instead is None else f"{word} is no longer in fsdpx: use {instead}"
