"""Do the tests for GPUs pass, and how fast is fsdpx on one GPU, beside PyTorch? Prints a summary, writes JSON.

    python bench/gpu.py [--stages products GPT-2 ...] [--seconds 480] [--nccl PATH]
    python bench/gpu.py --tests

Stages run one after the other, each in a process of its own with a limit of time, and end together within `--seconds`;
results are written after each. What fails, or does not begin in time, is written down with its reason.

The stages: the rate of the product of two large matrices, of which shares are given; what kernels read and write per
second; how fast MPI moves arrays through the host; GPT-2 with 124 million parameters in bf16, in fsdpx, with replay, in
PyTorch with its own attention and fused AdamW, and compiled; models of fields, a residual net and tiny models, where
fsdpx, fsdpx with replay and PyTorch take turns; and 2 and 4 ranks that share the GPU under NCCL 2.30 or newer, against
the host. `--nccl` is the path of such a library, which is loaded before the one that CuPy finds.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

import numpy as np
from jobs import environ, finish, mpiexec, start
from records import arguments, lines, save

VOCAB, WIDTH, LAYERS, HEADS, TIME, ROWS = 50304, 768, 12, 12, 1024, 16
PARAMETERS = 124e6
SECONDS, SECONDS_OF_TESTS = 480, 440
SUMMARY_LINES = 40
ROOT = Path(__file__).parents[1]


def missing() -> str | None:
    """Why there is nothing to measure, or None."""
    from fsdpx.errors import ConfigError
    from fsdpx.ext.gpu.cupy_devices import list_gpu_pci_addresses

    try:
        list_gpu_pci_addresses()
    except ConfigError as error:
        return str(error)
    return None


def device() -> dict[str, Any]:
    """What it was measured on."""
    import cupy

    found = cupy.cuda.runtime.getDeviceProperties(0)
    versions = {"cupy": cupy.__version__, "driver": cupy.cuda.runtime.driverGetVersion()}
    return {"device": found["name"].decode(), "memory": found["totalGlobalMem"], **versions}


def timed(step: Callable[[], Any], finish: Callable[[], Any], warm: int, rounds: int) -> float:
    """Median seconds of `step`."""
    for _ in range(warm):
        step()
    finish()
    taken = []
    for _ in range(rounds):
        begin = time.perf_counter()
        step()
        finish()
        taken.append(time.perf_counter() - begin)
    return median(taken)


def products(quick: bool) -> dict[str, Any]:
    """TFLOP/s of square matrices in bfloat16."""
    import cupy
    import ml_dtypes

    from fsdpx.ext.gpu.gemm import run_gemm_into

    n = 1024 if quick else 8192
    a, b, out = (cupy.ones((n, n), dtype=ml_dtypes.bfloat16) for _ in range(3))
    seconds = timed(lambda: run_gemm_into(out, a, b), cupy.cuda.Device().synchronize, 3, 10)
    return {"peak": 2 * n**3 / seconds / 1e12}


def passes(quick: bool) -> dict[str, Any]:
    """GB/s of kernels, by what they must read and write, on activations of GPT-2 and on its parameters."""
    import cupy
    import ml_dtypes

    from fsdpx.core.array import kernels
    from fsdpx.optim.adam import adam

    rows = ROWS * TIME // (8 if quick else 1)
    x, w = cupy.ones((rows, 4 * WIDTH), dtype=ml_dtypes.bfloat16), cupy.ones(4 * WIDTH, dtype=ml_dtypes.bfloat16)
    state = [cupy.ones(int(PARAMETERS) // (8 if quick else 1), dtype=np.float32) for _ in range(4)]
    numbers = (1.0, 0.0, 0.9999, 0.1, 0.99, 0.01, 10.0, 1e-8, 1e-2)  # of AdamW's first step
    calls: dict[str, tuple[int, Callable[[], Any]]] = {
        "layer_norm": (2 * x.nbytes, lambda: kernels.layer_norm(cupy, x, w, w, 1e-5)),
        "gelu": (2 * x.nbytes, lambda: kernels.gelu(cupy, x, "tanh")),
        "add": (3 * x.nbytes, lambda: kernels.add(cupy, x, x)),
        "adam": (7 * state[0].nbytes, lambda: adam(cupy, tuple(state), numbers)),
    }
    finish = cupy.cuda.Device().synchronize
    return {name: nbytes / timed(call, finish, 2, 10) / 1e9 for name, (nbytes, call) in calls.items()}


def staging(quick: bool) -> dict[str, Any]:
    """GB/s of an array of this rank to itself by MPI, through the host: in chunks, and as a whole."""
    import cupy
    from mpi4py import MPI

    from fsdpx.core.comm import message_backend
    from fsdpx.core.comm.mpi.mpi import MpiCommunicator

    comm = MpiCommunicator(MPI.COMM_SELF)
    n = (16 if quick else 256) << 20
    source, target = cupy.ones(n, dtype="uint8"), cupy.zeros(n, dtype="uint8")

    def once() -> None:
        handles = [comm.recv(target, 0), comm.send(source, 0)]
        for handle in handles:
            handle.wait()

    rates = {}
    for name, chunk in (("chunks", message_backend.CHUNK_BYTES), ("whole", n)):
        message_backend.CHUNK_BYTES = chunk
        rates[name] = n / timed(once, cupy.cuda.Device().synchronize, 1, 5) / 1e9
    if not (target == source).all():
        raise ValueError("other bytes than were sent")
    return rates


def batch() -> tuple[np.ndarray, np.ndarray]:
    text = np.random.default_rng(0).integers(0, VOCAB, (ROWS, TIME + 1))
    return text[:, :-1].copy(), text[:, 1:].copy()


def gpt(quick: bool, replay: bool = False) -> dict[str, Any]:
    """In fsdpx."""
    import cupy

    from fsdpx import nn, optim

    before = cupy.cuda.runtime.memGetInfo()[0]
    model = nn.GPT(VOCAB, WIDTH, 2 if quick else LAYERS, HEADS, TIME)
    adam, loss = optim.AdamW(lr=1e-4), nn.CrossEntropyLoss()
    options = {"strategy": "ddp", "precision": "bf16", "device": "cuda", "replay": replay}
    trainer = model.as_distributed(loss=loss, optimizer=adam, **options)
    x, y = (cupy.asarray(a) for a in batch())
    losses: list[float] = []
    seconds = timed(lambda: losses.append(trainer.step(x, y)), cupy.cuda.Device().synchronize, 5, 3 if quick else 10)
    held = before - cupy.cuda.runtime.memGetInfo()[0]
    return {"tokens": ROWS * TIME / seconds, "memory": held, "losses": [losses[0], losses[-1]]}


def in_torch(quick: bool, compiled: bool) -> dict[str, Any]:
    """The same in PyTorch."""
    import torch
    from workloads import gpt_in_torch

    torch.set_float32_matmul_precision("high")
    model = gpt_in_torch(VOCAB, WIDTH, 2 if quick else LAYERS, HEADS, TIME).cuda()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    forward = torch.compile(model) if compiled else model
    x, y = (torch.from_numpy(a).cuda() for a in batch())

    def step() -> float:
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(forward(x).reshape(-1, VOCAB), y.reshape(-1))
        loss.backward()
        adam.step()
        adam.zero_grad(set_to_none=True)
        return float(loss)

    seconds = timed(step, torch.cuda.synchronize, 3, 3 if quick else 10)
    return {"tokens": ROWS * TIME / seconds, "memory": torch.cuda.max_memory_reserved()}


def turns(name: str, quick: bool) -> dict[str, Any]:
    """Milliseconds of a step in fsdpx, with replay, and in PyTorch with TF32, in turns; of the host alone, until it has
    issued a step; of the first two steps; MiB of graphs; and whether replay changes a bit of the losses."""
    import cupy
    import torch
    import workloads

    from fsdpx import optim
    from fsdpx.ext.gpu.replay import CudaGraphObserver

    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    model = workloads.Model(256, 10, rows=64) if name == "layers" else workloads.MODELS[name]
    x, y = workloads.batch(model)
    steps: dict[str, Callable[[], Any]] = {}
    losses: dict[str, list[float]] = {"fsdpx": [], "replay": []}
    for kind, found in losses.items():
        net, loss = workloads.in_fsdpx(model)
        options = {"loss": loss, "optimizer": optim.AdamW(lr=1e-3), "strategy": "ddp", "device": "cuda"}
        trainer = net.as_distributed(**options, replay=kind == "replay")
        ours = cupy.asarray(x), cupy.asarray(y)
        steps[kind] = lambda t=trainer, f=found, a=ours: f.append(t.step(*a))
    net, loss, _ = workloads.in_torch(model)
    net = net.cuda()
    adam = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    theirs = [torch.from_numpy(a).cuda() for a in (x, y)]

    def step() -> float:
        value = loss(net(theirs[0]), theirs[1])
        value.backward()
        adam.step()
        adam.zero_grad(set_to_none=True)
        return value.item()

    steps["PyTorch"] = step
    wait, taken = cupy.cuda.Device().synchronize, {kind: [] for kind in steps}
    begun: dict[str, list[float]] = {kind: [] for kind in steps}
    for kind, one in steps.items():
        for _ in range(5):
            begin = time.perf_counter()
            one()
            wait()
            begun[kind].append(1e3 * (time.perf_counter() - begin))
    (observer,) = (one for one in trainer.inspect.engine.observers if isinstance(one, CudaGraphObserver))
    for _ in range(3 if quick else 30):
        for kind, one in steps.items():
            wait()
            begin = time.perf_counter()
            one()
            issued = time.perf_counter() - begin
            wait()
            taken[kind].append((time.perf_counter() - begin, issued))
    columns = {kind: list(zip(*rows, strict=True)) for kind, rows in taken.items()}
    whole, host = ({kind: 1e3 * median(two[n]) for kind, two in columns.items()} for n in (0, 1))
    graphs = sum(one.memory.nbytes for one in observer.recordings.values()) / 2**20
    first = {kind: times[:2] for kind, times in begun.items()}
    more = {"graphs MiB": graphs, "not recorded": [*observer.reasons], "same bits": losses["fsdpx"] == losses["replay"]}
    return {"ms": whole, "host ms": host, "first ms": first, **more}


def ranks_on_one_gpu(quick: bool) -> dict[str, Any]:
    """What ranks of NCCL find that share the GPU, against the host: collectives, and losses of presets and axes."""
    import cupy
    from mpi4py import MPI

    from fsdpx.core.comm.mpi.mpi import MpiCommunicator
    from fsdpx.ext.gpu.nccl import NcclCommunicator

    host = MpiCommunicator(MPI.COMM_WORLD)
    ranks = NcclCommunicator(MpiCommunicator(MPI.COMM_WORLD.Dup()), 20.0)
    checks: dict[str, Callable[[], None]] = {
        f"{call} {dtype}": partial(_compare_collective, ranks, call, dtype)
        for dtype in ("float32", "bfloat16", "int64")
        for call in ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")
    }
    from fsdpx import Mesh

    presets: dict[str, Any] = {name: {"strategy": name} for name in ("ddp", "zero1", "zero2", "fsdp", "hybrid")}
    presets |= {axis: {"mesh": Mesh(**{axis: host.size})} for axis in ("pipe", "tensor")}
    checks |= {name: partial(_compare_training, host, ranks, options) for name, options in presets.items()}
    found: dict[str, str] = {}
    for name, check in checks.items():
        try:
            check()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:120]
        if any(host.all_gather_value(name in found)):  # ranks would not meet again
            found.setdefault(name, "failed on another rank")
            break
    version = cupy.cuda.nccl.get_version()
    return {"rank": host.rank, "nccl": version, "checks": [*checks], "wrong": found}


def _compare_collective(ranks: Any, call: str, name: str) -> None:
    import cupy
    import ml_dtypes

    n, dtype = ranks.size, np.dtype(getattr(ml_dtypes, name, name))
    every = [np.random.default_rng(rank).integers(-8, 8, 1000 * n).astype(dtype) for rank in range(n)]
    mine, parts = cupy.asarray(every[ranks.rank]), slice(1000 * ranks.rank, 1000 * (ranks.rank + 1))
    total = np.sum([one.astype(np.float64) for one in every], 0)
    if call == "all_gather":
        got, want = cupy.zeros(1000 * n * n, dtype), np.concatenate(every)
        ranks.all_gather(mine, got).wait()
    elif call == "reduce_scatter":
        got, want = cupy.zeros(1000, dtype), total[parts]
        ranks.reduce_scatter(mine, got).wait()
    elif call == "all_to_all":
        got, want = cupy.zeros(1000 * n, dtype), np.concatenate([one[parts] for one in every])
        ranks.all_to_all(mine, got).wait()
    else:
        got, want = mine, total if call == "all_reduce" else every[n - 1]
        (ranks.all_reduce(got) if call == "all_reduce" else ranks.broadcast(got, n - 1)).wait()
    np.testing.assert_array_equal(got.get().astype(np.float64), want.astype(np.float64))


def _compare_training(host: Any, ranks: Any, options: dict[str, Any], layers: int = 4) -> None:
    from fsdpx import nn, optim

    losses = []
    for comm, device in ((host, "cpu"), (ranks, "cuda")):
        model = nn.GPT(61, 32, layers, 4, 16)
        chosen = {"loss": nn.CrossEntropyLoss(), "optimizer": optim.SGD(lr=0.1), "precision": "float64", **options}
        trainer = model.as_distributed(comm=comm, device=device, **chosen)
        text = np.random.default_rng(trainer.inspect.placement.axes.data.rank).integers(0, 61, (4, 17))
        losses.append([trainer.step(text[:, :-1], text[:, 1:]) for _ in range(3)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-10)


@dataclass(frozen=True)
class Stage:
    """seconds: after which it is ended. ranks: of MPI that run it; 0 for a process without MPI."""

    run: Callable[[bool], dict[str, Any]]
    seconds: int
    ranks: int = 0


STAGES = {
    "products": Stage(products, 30),
    "kernels": Stage(passes, 40),
    "staging": Stage(staging, 40),
    "NCCL, 2 ranks": Stage(ranks_on_one_gpu, 60, ranks=2),
    "NCCL, 4 ranks": Stage(ranks_on_one_gpu, 60, ranks=4),
    "fsdpx": Stage(gpt, 58),
    "fsdpx, replay": Stage(partial(gpt, replay=True), 58),
    "PyTorch": Stage(partial(in_torch, compiled=False), 58),
    "PyTorch, compiled": Stage(partial(in_torch, compiled=True), 58),
    **{f"turns of {name}": Stage(partial(turns, name), 45) for name in ("unet2d", "unet3d", "fno2d", "cnn", "layers")},
}


def run_stage(name: str, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """What a job of its own found; why not, if it failed."""
    ranks, variables = STAGES[name].ranks, environ()
    command = [*(mpiexec(ranks) if ranks else [sys.executable]), __file__, "--stage", name]
    if ranks:  # NCCL 2.30 and newer let ranks share a GPU
        variables |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}
        variables |= {"LD_PRELOAD": str(options.nccl)} if options.nccl else {}
    return finish(start([*command, *(["--quick"] if options.quick else [])], variables), seconds)


def measure(options: argparse.Namespace) -> int:
    end = time.monotonic() + options.seconds
    found: dict[str, Any] = {}
    for name in options.stages:
        left = end - time.monotonic()
        begin = time.monotonic()
        if left < min(10, STAGES[name].seconds):
            found[name] = {"failed": f"did not begin within {options.seconds} s"}
            continue
        found[name] = run_stage(name, options, min(left, STAGES[name].seconds))
        found[name]["seconds"] = round(time.monotonic() - begin, 1)
        save("gpu", options, {**device(), "parts": found})
    print("\n".join(summarize(found)))
    return 0


def summarize(found: dict[str, dict[str, Any]]) -> list[str]:
    """What was found, in at most `SUMMARY_LINES` lines."""
    peak, gpts, turned, said = found.get("products", {}).get("peak"), [], [], []
    for name, one in found.items():
        if "tokens" in one:
            share = "" if peak is None else f"{6 * PARAMETERS * one['tokens'] / 1e12 / peak:.0%}"
            gpts.append([name, f"{one['tokens']:,.0f}", share, f"{one['memory'] / 2**30:.1f}"])
        elif "ms" in one:
            numbers = [f"{one[what][kind]:.2f}" for what in ("ms", "host ms") for kind in one[what]]
            gain = one["ms"]["PyTorch"] / min(one["ms"]["fsdpx"], one["ms"]["replay"])
            turned.append(
                [name, *numbers, f"{one['graphs MiB']:.0f}", f"{gain:.2f}", "yes" if one["same bits"] else "NO"]
            )
        elif "wrong" in one:
            bad = "; ".join(f"{what}: {why}" for what, why in one["wrong"].items())
            said.append(f"{name}: NCCL {one['nccl']}, {len(one['checks'])} checks, wrong: {bad or 'none'}")
        else:
            rest = {what: value for what, value in one.items() if what != "seconds"}
            numbers = [f"{k} {v:,.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in rest.items()]
            said.append(f"{name}: {', '.join(numbers)}")
    shown = []
    if gpts:
        shown += lines(["GPT-2 124M, bf16", "tokens/s", "of peak", "GiB"], gpts).splitlines()
    if turned:
        kinds = ("fsdpx", "replay", "PyTorch")
        head = [
            "ms of a step",
            *kinds,
            *(f"host: {kind}" for kind in kinds),
            "graphs MiB",
            "PyTorch / best",
            "same bits",
        ]
        shown += lines(head, turned).splitlines()
    shown += [line[:200] for line in said]
    left = len(shown) - SUMMARY_LINES
    return shown if left <= 0 else [*shown[: SUMMARY_LINES - 1], f"... {left + 1} lines more in the JSON file"]


def tests(options: argparse.Namespace) -> int:
    """The tests for GPUs: which passed, failed and were skipped."""
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "tests/ext/gpu", "tests/core/engine", "-m", "gpu", "-rs", "-n", "6"]
        limit = min(options.seconds, SECONDS_OF_TESTS)
        try:
            command += [f"--junitxml={report}"]
            done = subprocess.run(command, cwd=ROOT, timeout=limit, check=False, stdout=subprocess.PIPE, text=True)
        except subprocess.TimeoutExpired as error:
            said = error.stdout or ""
            print("\n".join((said if isinstance(said, str) else said.decode()).splitlines()[-SUMMARY_LINES + 1 :]))
            print(f"the tests were not done within {limit} s")
            return 1
        status = done.returncode
        print("\n".join(done.stdout.splitlines()[-SUMMARY_LINES + 2 :]))
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    kinds = {"failure": "failed", "error": "failed", "skipped": "skipped"}
    ends: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for case in cases:
        end = next((kinds[child.tag] for child in case if child.tag in kinds), "passed")
        ends[end].append(f"{case.get('classname')}::{case.get('name')}")
    print(", ".join(f"{len(names)} {end}" for end, names in ends.items()))
    if (why := missing()) is None:
        save("gpu-tests", options, {**device(), "ends": ends})
    else:
        print(f"nothing was run on a GPU: {why}")
    return 0 if status in (0, 5) else status


def main() -> int:
    parser = arguments(__doc__, rounds=1)
    parser.add_argument("--tests", action="store_true", help="the tests for GPUs instead")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=[*STAGES], help="only these")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="within which all stages end")
    parser.add_argument("--nccl", type=Path, help="libnccl.so.2 of NCCL 2.30 or newer, for ranks that share the GPU")
    parser.add_argument("--stage", choices=STAGES, help="only this, in this process")
    options = parser.parse_args()
    if options.stage:
        found = STAGES[options.stage].run(options.quick)
        if found.get("rank", 0) == 0:
            print(json.dumps(found))
        return 0
    if options.tests:
        return tests(options)
    if (why := missing()) is not None:
        print(f"nothing measured: {why}; skipped: {', '.join(options.stages)}")
        return 0
    return measure(options)


if __name__ == "__main__":
    sys.exit(main())
