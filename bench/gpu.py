"""How fast is fsdpx on one GPU, beside PyTorch? And do the tests for GPUs pass? Prints a table, writes one JSON.

    python bench/gpu.py
    python bench/gpu.py --tests

GPT-2 with 124 million parameters in bf16, beside PyTorch as it is, with its own attention and fused AdamW, and
compiled; the rate of the product of two large matrices, of which shares are given; and what kernels read and write per
second, and how fast MPI moves arrays through the host. Each part is a process of its own that may take 58 seconds; what
fails is written down with its reason.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

import numpy as np
from records import arguments, lines, save

VOCAB, WIDTH, LAYERS, HEADS, TIME, ROWS = 50304, 768, 12, 12, 1024, 16
PARAMETERS = 124e6
SECONDS_OF_PART, SECONDS_OF_TESTS = 58, 440  # eight parts end within eight minutes
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


def gpt(quick: bool) -> dict[str, Any]:
    """In fsdpx."""
    import cupy

    from fsdpx import nn, optim

    before = cupy.cuda.runtime.memGetInfo()[0]
    model = nn.GPT(VOCAB, WIDTH, 2 if quick else LAYERS, HEADS, TIME)
    adam, loss = optim.AdamW(lr=1e-4), nn.CrossEntropyLoss()
    options = {"strategy": "ddp", "precision": "bf16", "device": "cuda"}
    trainer = model.as_distributed(loss=loss, optimizer=adam, **options)
    x, y = (cupy.asarray(a) for a in batch())
    losses: list[float] = []
    seconds = timed(lambda: losses.append(trainer.step(x, y)), cupy.cuda.Device().synchronize, 3, 3 if quick else 10)
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


PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "products": products,
    "kernels": passes,
    "staging": staging,
    "fsdpx": gpt,
    "PyTorch": lambda quick: in_torch(quick, compiled=False),
    "PyTorch, compiled": lambda quick: in_torch(quick, compiled=True),
}


def part(name: str, quick: bool) -> dict[str, Any]:
    """What a process of its own found; why not, if it failed."""
    command = [sys.executable, __file__, "--part", name, *(["--quick"] if quick else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_OF_PART)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done within {SECONDS_OF_PART} s"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no reason given"])[-1]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(options: argparse.Namespace) -> int:
    found = {name: part(name, options.quick) for name in PARTS}
    peak = found["products"].get("peak")
    rows = []
    for name in ("fsdpx", "PyTorch", "PyTorch, compiled"):
        one = found[name]
        if "tokens" not in one:
            rows.append([name, one["failed"], "", ""])
            continue
        share = "" if peak is None else f"{6 * PARAMETERS * one['tokens'] / 1e12 / peak:.0%}"
        rows.append([name, f"{one['tokens']:,.0f}", share, f"{one['memory'] / 2**30:.1f}"])
    print(lines(["GPT-2 124M, bf16", "tokens/s", "of peak", "GiB"], rows))
    print(f"peak of products: {peak} TFLOP/s; GB/s: kernels {found['kernels']}, through the host {found['staging']}")
    save("gpu", options, {**device(), "parts": found})
    return 0


def tests(options: argparse.Namespace) -> int:
    """The tests for GPUs: which passed, failed and were skipped."""
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "tests/ext/gpu", "tests/core/engine", "-m", "gpu", "-rs", "-n", "6"]
        try:
            status = subprocess.run(
                [*command, f"--junitxml={report}"], cwd=ROOT, timeout=SECONDS_OF_TESTS, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            print(f"the tests were not done within {SECONDS_OF_TESTS} s")
            return 1
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
    parser.add_argument("--part", choices=PARTS, help="only this, in this process")
    options = parser.parse_args()
    if options.part:
        print(json.dumps(PARTS[options.part](options.quick)))
        return 0
    if options.tests:
        return tests(options)
    if (why := missing()) is not None:
        print(f"nothing measured: {why}; skipped: {', '.join(PARTS)}")
        return 0
    return measure(options)


if __name__ == "__main__":
    sys.exit(main())
