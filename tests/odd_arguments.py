"""Call the public API with odd arguments: every error must be one of `fsdpx.errors`, in no time.

    python tests/odd_arguments.py            # all calls
    python tests/odd_arguments.py Conv2d fit # those whose names contain a word
    python tests/odd_arguments.py --ranks    # the odd argument on one of two ranks alone

The calls are made from the signatures of the public names: a valid call first, then the same call with one argument
replaced by something odd, for each argument and each odd value. What is not an error must end, and what is one must be
for users: no AttributeError from the inside.
"""

import argparse
import contextlib
import inspect
import io
import math
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

import fsdpx
from fsdpx import data, nn, optim
from fsdpx.errors import FsdpxError

SECONDS_PER_CALL = 20
"""A call of this test takes milliseconds: one that takes this long on any machine does not end."""
REST = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


class Odd:
    """An object that nothing takes."""

    def __repr__(self) -> str:
        return "Odd()"


def list_odd_values() -> dict[str, Any]:
    """Name -> value. Functions and iterators are made anew for each call."""
    values = [
        None, True, 0, -1, 1.5, math.nan, math.inf, 1j, 10**30, np.array(3), np.float32(2), np.array([1, 2]),
        np.zeros((2, 2)), "x", "", "\0", b"x", [], (1, 2, 3, 4), (True, 2), ["x"], {}, {"x": 1}, {1, 2}, range(3),
    ]  # fmt: skip
    unlike_others = {"an iterator": iter([1]), "a function": lambda *_, **__: None, "a class": int, "an object": Odd()}
    return {repr(value): value for value in values} | unlike_others


@dataclass
class Call:
    """A function or a class with arguments that it takes. given: by name. over: positional arguments before them."""

    name: str
    function: Callable[..., Any]
    given: dict[str, Any]
    over: tuple[Any, ...] = ()
    parameters: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        named = inspect.signature(self.function).parameters.values()
        known = [one.name for one in named if one.kind not in REST]
        self.parameters = self.parameters or known[len(self.over) :]

    def make(self, **odd: Any) -> Any:
        return self.function(*self.over, **{**self.given, **odd})


# -- valid calls -----------------------------------------------------------------------------------------------------

BY_NAME: dict[str, Any] = {
    "in_features": 4, "out_features": 4, "in_channels": 4, "out_channels": 4, "kernel_size": 3, "num_groups": 2,
    "num_channels": 4, "num_embeddings": 8, "embedding_dim": 4, "normalized_shape": 4, "num_features": 4, "size": 2,
    "layer": nn.Linear(4, 4), "body": nn.Linear(4, 4), "model": nn.Linear(4, 4), "net": nn.Linear(4, 4), "p": 0.1,
    "shape": (4,), "lr": 0.1, "steps": 10, "every": 5, "mean": [0.0, 1.0], "std": [1.0, 2.0], "n": 12, "rank": 0,
    "width": 4, "channels": 4, "output_size": 2, "vocab": 8, "d_model": 4, "n_layers": 1, "n_heads": 2, "kv_heads": 2,
    "d_head": 2, "seq_len": 8, "d_hidden": 8, "experts": 2, "low": 1.0, "coordinate": 0, "factor": 0.5, "image": 8,
    "patch": 4, "classes": 3, "dims": 2, "n_modes": 2, "padding": (1, 1), "loss": nn.MSELoss(),
    "residual": nn.Linear(4, 4),
}  # fmt: skip
"""What a required parameter of this name is given."""
TEXT = "some text to read, long enough for a few samples of eight bytes each"
EXAMPLES: dict[str, dict[str, Any]] = {
    "nn.Sequential": {"ties": None}, "nn.Graph": {"nodes": {"y": (nn.Linear(4, 4), "x")}, "outputs": ("y",)},
    "nn.Lambda": {"function": np.sin, "derivative": np.cos}, "nn.Mask": {"cells": np.ones((2, 2), bool)},
    "nn.LoRALinear": {"linear": nn.Linear(4, 4), "rank": 2, "alpha": 4.0}, "nn.Upsample": {"scale_factor": 2},
    "nn.UNet": {"in_channels": 2, "out_channels": 1, "width": 4},
    "nn.add_lora": {"model": nn.Linear(4, 4), "targets": "*"},
    "nn.ConvTranspose1d": {"in_channels": 4, "out_channels": 4, "kernel_size": 2},
    "optim.schedules.WarmUp": {"steps": 5, "schedule": 0.1},
    "data.DataLoader": {"dataset": data.ArrayDataset(np.zeros((12, 4)), np.zeros(12, int)), "batch_size": 4},
    "data.gather_channel_statistics": {"batches": [np.ones((2, 3, 4))]},
    "data.TextDataset": {"path": "text.txt", "seq_len": 8},
    "data.TokenDataset": {"path": "tokens.bin", "seq_len": 8},
    "fsdpx.Cast16": {"name": "bf16"}, "fsdpx.Grid": {"comm": fsdpx.FakeCommunicator(0, 1), "shape": (4, 4)},
    "fsdpx.spawn": {"fn": lambda comm: comm.rank, "size": 2},
    "fsdpx.LaunchConfig": {"ranks": 2}, "fsdpx.ModelBuilder": {"plan": {"model": {"kind": "MLP", "d_model": 4}}},
    "fsdpx.dry_run": {
        "model": nn.Sequential(nn.Linear(4, 3)), "x": np.zeros((4, 4), np.float32), "y": np.zeros(4, int), "ranks": 2,
        "loss": nn.CrossEntropyLoss(), "optimizer": optim.AdamW(),
    },
    "fsdpx.OffloadConfig": {"folder": "offload"}, "fsdpx.CheckpointConfig": {"folder": "checkpoints"},
    "fsdpx.TraceConfig": {"folder": "trace"}, "fsdpx.RunFolder": {"path": "run"},
}  # fmt: skip
"""Arguments of calls whose parameters need more than their name tells."""
INNER = set(
    "nn.Attention nn.AttentionBlock nn.BertEmbedding nn.Container nn.sharding.ShardedMoE nn.GatedMLP nn.HeadNorm "
    "nn.GroupedQueryAttention nn.sharding.SequenceParallelTokenEmbedding nn.sharding.VocabParallelTokenEmbedding "
    "nn.sharding.ShardedDropout nn.sharding.output_shapes nn.sharding.parallelize nn.sharding.value_shapes "
    "nn.sharding.parameter_specs nn.sharding.linearize nn.ParameterSpec nn.sharding.WithInputOutput "
    "optim.ShardSegment optim.ShardSegments optim.get_learning_rate data.Dataset data.BatchShard "
    "fsdpx.Handle fsdpx.ReduceOp fsdpx.Trainer fsdpx.launch fsdpx.plan fsdpx.load_adapter fsdpx.WeightsReport "
    "fsdpx.gather_merged_parameters fsdpx.save_adapter optim.Optimizer fsdpx.JobPreempted "
    "data.SupervisedDataset data.FieldDataset nn.LayerContext fsdpx.init fsdpx.finalize nn.PhysicsLoss".split()
)
"""Parts that users do not make themselves, and calls that have tests of their own for odd arguments."""
USERS = {
    ("nn.Lambda", "function"), ("nn.Lambda", "derivative"), ("fsdpx.spawn", "fn"), ("fit", "count"), ("fit", "stop"),
    ("fit", "callbacks"),
}  # fmt: skip
"""Functions of users, whose errors are theirs."""


def make_trainer(comm: Any = None, **options: Any) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    given = {"loss": nn.CrossEntropyLoss(), "optimizer": optim.AdamW(lr=0.1), "comm": comm}
    return fsdpx.distribute(model, **{**given, **options})


def make_loader(comm: Any = None) -> Any:
    samples = data.ArrayDataset(np.ones((8, 4), np.float32), np.zeros(8, int))
    return data.DataLoader(samples, 4, rank=comm.rank if comm else 0, size=comm.size if comm else 1)


def run_on_trainer(method: str, comm: Any = None, **options: Any) -> Any:
    """Make a trainer and call a method of it. loader: for `fit`, unless it is what is odd."""
    trainer = make_trainer(comm)
    if method == "fit":
        options.setdefault("loader", make_loader(comm))
    return getattr(trainer, method)(**options)


X, Y = np.ones((4, 4), np.float32), np.zeros(4, int)
METHODS: dict[str, dict[str, Any]] = {
    "step": {"x": X, "y": Y},
    "accumulate": {"x": X, "y": Y},
    "evaluate": {"x": X, "y": Y},
    "predict": {"x": X},
    "forward": {"x": X},
    "parameters": {},
    "load_parameters": {"source": {}, "strict": False},
    "save": {"path": "saved"},
    "load": {"path": "kept"},
    "freeze": {},
    "fit": {"progress": False, "steps": 1},
}


def list_collective_calls(comm: Any = None) -> Iterator[Call]:
    """Calls that all ranks make together."""
    named = inspect.signature(fsdpx.distribute).parameters
    options = [name for name in named if name not in ("model", "rarely", "comm")]
    rare = [one.name for one in fields(fsdpx.RuntimeOptions)]
    yield Call("distribute", partial(make_trainer, comm), {}, parameters=[*options, *rare])
    for method, given in METHODS.items():
        named = inspect.signature(getattr(fsdpx.Trainer, method)).parameters.values()
        known = [one.name for one in named if one.kind not in REST and one.name not in ("self", "trainer")]
        yield Call(method, partial(run_on_trainer, method, comm), dict(given), parameters=known)


def list_functional_calls() -> Iterator[Call]:
    """Collectives of the functional API: MPI ranks compare what they call, thread ranks end with the first error."""
    for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "all_to_all"):
        function = getattr(fsdpx, name)
        yield Call(name, function, {"x": np.ones(4)}, parameters=[*inspect.signature(function).parameters])


def list_calls(names: Collection[str] = ()) -> Iterator[Call]:
    """The calls of all public names, or of `names` alone."""
    modules = {"nn": nn, "optim": optim, "optim.schedules": optim.schedules, "data": data, "fsdpx": fsdpx}
    for prefix, module in modules.items():
        for name in (f"{prefix}.{one}" for one in module.__all__):
            wanted = name in names if names else name not in INNER
            if wanted and (made := make_call(name, getattr(module, name.rpartition(".")[2]))) is not None:
                yield made
    for call in (*list_collective_calls(), *list_functional_calls()):
        if not names or call.name in names:
            yield call


def make_call(name: str, thing: Any) -> Call | None:
    """A valid call of a class or function of the library; None where none was found."""
    if not callable(thing) or inspect.isabstract(thing):
        return None
    try:
        named = inspect.signature(thing).parameters
    except (TypeError, ValueError):
        return None
    wanted = [one for one in named.values() if one.default is inspect.Parameter.empty and one.kind not in REST]
    given = EXAMPLES.get(name, {one.name: BY_NAME.get(one.name) for one in wanted})
    call = Call(name, thing, given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call.make()
        except Exception as error:
            NOT_CALLED[name] = f"{given}: {error!r}"[:200]
            return None
    return call


NOT_CALLED: dict[str, str] = {}


# -- odd calls ---------------------------------------------------------------------------------------------------------


class Endless(BaseException):
    """A call that did not come back."""


def find_raw_errors(call: Call) -> Iterator[str]:
    """Each call with one odd argument that raises another error than those of the library, or does not end."""
    for parameter in call.parameters:
        if (call.name, parameter) in USERS:
            continue
        for word, value in list_odd_values().items():
            problem = describe_problem(lambda p=parameter, v=value: call.make(**{p: v}))
            if problem:
                yield f"{call.name}({parameter}={word}): {problem}"


def find_uneven_errors(name: str, parameter: str, some: slice = slice(None)) -> Iterator[str]:
    """Calls in which rank 1 of two is given something odd, and not both ranks raise the same error. some: of all odd
    values."""
    for word, value in [*list_odd_values().items()][some] if (name, parameter) not in USERS else ():

        def run(comm: Any, value: Any = value) -> str:
            call = next(one for one in list_collective_calls(comm) if one.name == name)
            try:
                call.make(**({parameter: value} if comm.rank else {}))
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            return "returned"

        outcomes: list[str] = []
        problem = describe_problem(lambda run=run, found=outcomes: found.extend(fsdpx.spawn(run, 2, timeout=10.0)))
        if problem or len(set(outcomes)) > 1:
            yield f"{name}({parameter}={word}) on one rank: {problem or outcomes}"[:300]


def describe_problem(run: Callable[[], Any]) -> str:
    """What is wrong with how a call ends; "" if nothing is."""

    def stop(*_: Any) -> None:
        raise Endless

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS_PER_CALL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            run()
    except FsdpxError:
        return ""
    except Endless:
        return f"does not end within {SECONDS_PER_CALL} s"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:150]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return ""


def write_samples(folder: Path) -> None:
    """The files that valid calls read."""
    (folder / "text.txt").write_text(TEXT * 20)
    np.arange(200, dtype=np.uint16).tofile(folder / "tokens.bin")
    with contextlib.chdir(folder):
        make_trainer().save("kept")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("words", nargs="*", help="only calls whose name contains one of these")
    parser.add_argument("--ranks", action="store_true", help="the odd argument on one of two ranks alone")
    options = parser.parse_args()
    found = 0
    with tempfile.TemporaryDirectory() as folder:
        write_samples(Path(folder))
        with contextlib.chdir(folder):
            for call in list_collective_calls() if options.ranks else list_calls():
                if options.words and not any(word in call.name for word in options.words):
                    continue
                uneven = (find_uneven_errors(call.name, parameter) for parameter in call.parameters)
                for line in chain.from_iterable(uneven) if options.ranks else find_raw_errors(call):
                    found += 1
                    print(line, flush=True)
    print(f"{found} raw errors", file=sys.stderr)
    for name, why in NOT_CALLED.items():
        print(f"not called: {name} {why}", file=sys.stderr)
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
