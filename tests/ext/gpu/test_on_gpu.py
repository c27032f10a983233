"""What only a GPU shows: products and training against the host. Without one these tests say so. Kernels:
test_kernels.py."""

import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from on_gpu import needs_gpu
from trials import job

from fsdpx import nn, optim, spawn
from fsdpx.ext.gpu.gemm import run_gemm_into

pytestmark = needs_gpu


@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-12), ("float32", 1e-5), ("bfloat16", 1e-5)])
def test_products_are_added_in_float32(dtype: str, bound: float) -> None:
    import cupy

    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    a, b = (np.random.default_rng(n).standard_normal(s).astype(kind) for n, s in enumerate([(257, 129), (129, 65)]))
    out = cupy.ones((257, 65), dtype="float64" if dtype == "float64" else "float32")
    run_gemm_into(out, cupy.asarray(a), cupy.asarray(b), accumulate=True)
    want = 1 + a.astype(float) @ b.astype(float)
    np.testing.assert_allclose(out.get(), want, rtol=bound, atol=20 * bound)
    run_gemm_into(out.T, cupy.asarray(b).T, cupy.asarray(a).T)
    np.testing.assert_allclose(out.get(), want - 1, rtol=bound, atol=20 * bound)


def train(comm: Any, **options: Any) -> list[float]:
    model = nn.GPT(61, 32, 2, 4, 16, dropout=0.1)
    loss, adam = nn.CrossEntropyLoss(), optim.AdamW(lr=1e-3)
    trainer = model.as_distributed(loss=loss, optimizer=adam, comm=comm, **options)
    text = np.random.default_rng(comm.rank).integers(0, 61, (4, 17))
    return [trainer.step(text[:, :-1], text[:, 1:]) for _ in range(4)]


@pytest.mark.parametrize(("precision", "bound"), [("float64", 1e-11), ("float32", 1e-4), ("bf16", 2e-2)])
def test_training_equals_the_host(precision: str, bound: float) -> None:
    want = spawn(lambda comm: train(comm, precision=precision), 1)[0]
    got = spawn(lambda comm: train(comm, precision=precision, device="cuda"), 1)[0]
    np.testing.assert_allclose(got, want, rtol=bound)


NCCL = """
import numpy as np, cupy, ml_dtypes
from mpi4py import MPI
from fsdpx.core.comm.calls import ReduceOp
from fsdpx.ext.gpu.nccl import NcclCommunicator
from fsdpx.core.comm.mpi.mpi import MpiCommunicator
ranks = NcclCommunicator(MpiCommunicator(MPI.COMM_SELF), 60.0)
assert ranks.link is None  # one rank needs none
ranks.link = ranks._create_nccl_communicator()
for name in ("float64", "float32", "bfloat16", "float16", "int64", "bool"):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    mine, whole = cupy.arange(1000).astype(dtype), cupy.zeros(1000, dtype)
    for call in (ranks.all_gather, ranks.reduce_scatter, ranks.all_to_all):
        whole[:] = 0
        call(mine, whole).wait()
        assert (mine == whole).all(), (name, call)
    for op in (ReduceOp.SUM, ReduceOp.MAX):
        ranks.all_reduce(whole, op).wait()
        assert (mine == whole).all(), (name, op)
    ranks.broadcast(whole, 0).wait()
    assert (mine == whole).all(), name
ranks.close()
print("right")
"""


def test_nccl_takes_what_is_asked_of_it(tmp_path: Path) -> None:
    """With one rank, which is what one GPU has room for: arguments, formats, streams and events are those of NCCL."""
    pytest.importorskip("cupy.cuda.nccl")
    done = job(tmp_path, NCCL, ranks=1)
    assert done.status == 0, done.err
    assert done.out.count("right") == 1


PROGRAM = """
import sys
sys.path[:0] = {path!r}
import fsdpx
from test_on_gpu import train
with fsdpx.init() as comm:
    losses = train(comm, precision="float64", device="cuda")
    if comm.rank == 0: print("losses", *losses, flush=True)
"""


CHUNKS = """
import sys
sys.path[:0] = {path!r}
import numpy as np
import cupy, fsdpx
from fsdpx.core.comm.mpi.mpi import MpiCommunicator
mpi = MpiCommunicator()
ours = [np.random.default_rng(rank).standard_normal(3_000_001).astype("float32") for rank in range(mpi.size)]
for turn in range(5):  # what does not wait is right now and then
    buf = cupy.asarray(ours[mpi.rank])
    buf *= 2
    mpi.all_reduce(buf).wait()
    buf /= 2
    whole = cupy.zeros(mpi.size * buf.size, dtype="float32")
    mpi.all_gather(buf, whole).wait()
    assert (whole.get().reshape(mpi.size, -1) == ours[0] + ours[1]).all(), turn
    swapped = cupy.zeros_like(buf)
    handles = [mpi.recv(swapped, 1 - mpi.rank), mpi.send(cupy.asarray(ours[mpi.rank]), 1 - mpi.rank)]
    for handle in handles:
        handle.wait()
    assert (swapped.get() == ours[1 - mpi.rank]).all(), turn
print("right")
"""


def test_large_arrays_go_through_the_host_in_chunks(tmp_path: Path) -> None:
    done = job(tmp_path, CHUNKS.format(path=sys.path), ranks=2)
    assert done.status == 0, done.err
    assert done.out.count("right") == 2


def test_ranks_of_mpi_share_the_gpu(tmp_path: Path) -> None:
    """Their arrays go through the host, or MPI takes them: the losses are those of thread ranks on the host."""
    want = spawn(lambda comm: train(comm, precision="float64"), 2)[0]
    done = job(tmp_path, PROGRAM.format(path=sys.path), ranks=2)
    assert done.status == 0, done.err
    (said,) = [line for line in done.out.splitlines() if line.startswith("losses")]
    np.testing.assert_allclose([float(word) for word in said.split()[1:]], want, rtol=1e-11)
