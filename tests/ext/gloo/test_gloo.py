"""Ranks without MPI: the contract, how they meet, how they end.

The tests marked `world` run under `fsdpx run --backend gloo -n N -m pytest -m world tests/ext/gloo/test_gloo.py`."""

import importlib.util
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ports import free_port
from ranks import OVER_GLOO, carrier, together

import fsdpx
from fsdpx import nn, optim
from fsdpx.core.base import environment
from fsdpx.core.base.environment import RendezvousStore, copy_without_rank_variables, read_environment
from fsdpx.core.comm import Communicator, init
from fsdpx.errors import CommError, CommTimeout, ConfigError, LaunchError
from fsdpx.examples import models
from fsdpx.ext.gloo import rendezvous
from fsdpx.ext.gloo.open_gloo import open_gloo
from fsdpx.launch.launchers import find_launcher_to_use
from fsdpx.launch.options import LaunchConfig
from fsdpx.testing.communicator import CommunicatorContract

TESTS = Path(__file__).parents[2]
ROOT = TESTS.parent
without_mpi = pytest.mark.skipif(not OVER_GLOO, reason="for ranks without MPI")
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")


def in_jobs(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.jobs(needs_torch(test))


@pytest.fixture(scope="module")
def messages() -> Iterator[Communicator]:
    comm = carrier(60)
    yield comm
    comm.close()


@pytest.mark.world
@without_mpi
class TestContract(CommunicatorContract):
    """Messages alone; test_node.py has those who share memory as well."""

    @pytest.fixture(autouse=True)
    def _take(self, messages: Communicator) -> None:
        self.world = messages

    def run(self, body: Callable[[Communicator], Any]) -> None:
        together(self.world, self.world, body)


@pytest.mark.world
@without_mpi
class TestTheWorld:
    def test_it_is_found_and_shown(self, world: Communicator) -> None:
        shown = fsdpx.info()
        assert (shown["backend"], shown["rank"], shown["size"]) == ("gloo", world.rank, world.size)
        assert f"ranks without MPI (WORLD_SIZE), {world.size} ranks, who meet at FSDPX_STORE=" in shown["launcher"]
        assert repr(world).endswith("hosts=1) over GlooCommunicator")
        assert "mpi4py.MPI" not in sys.modules

    def test_memory_is_shared_with_torch(self) -> None:
        from fsdpx.ext.gloo.gloo import _as_byte_tensor

        for dtype in ("float32", "bfloat16", "float16", "uint64", "bool"):
            array = np.zeros(5, dtype)
            assert _as_byte_tensor(array).data_ptr() == array.ctypes.data

    def test_a_step_inside_a_host_sends_no_message(self, world: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
        from fsdpx.ext.gloo.gloo import GlooCommunicator

        trainer = models.make_mlp(1, 8).as_distributed(
            loss=nn.CrossEntropyLoss(), optimizer=optim.SGD(lr=0.1), strategy="fsdp"
        )
        x, y = np.ones((2, 8), np.float32), np.zeros(2, np.int64)
        for _ in range(3):  # the first ones get things ready
            trainer.step(x, y)
        sent, move = [], GlooCommunicator.start_call
        with monkeypatch.context() as patch:
            patch.setattr(GlooCommunicator, "start_call", lambda *given: sent.append(given[1].name) or move(*given))
            trainer.step(x, y)
        assert sent == []
        trainer.close()

    def test_what_it_cannot_do_is_refused_by_name(self, messages: Communicator) -> None:
        words = r"a window on GlooCommunicator.* use backend='node' or 'mpi', gloo inside"
        with pytest.raises(ConfigError, match=words):
            messages.window(8)
        words = r"ranks of .*GlooCommunicator.* cannot die or come back: use ranks of MPI"
        with pytest.raises(ConfigError, match=words):
            models.make_mlp(1, 2).as_distributed(loss=nn.CrossEntropyLoss(), optimizer=optim.SGD(lr=0.1), elastic=True)

    def test_a_wait_ends_with_the_name_of_what_it_waits_for(self, messages: Communicator) -> None:
        impatient: Any = messages.split(0, messages.rank)
        impatient.set_timeout(0.2)
        if messages.rank == 0:
            handle = impatient.recv(np.zeros(3), 1, 9, what="ACT1")
            with pytest.raises(CommTimeout, match=r"recv of ACT1 on rank 0 of \d is not complete after 0.2 s"):
                handle.wait()
        messages.barrier().wait()
        if messages.rank == 1:
            impatient.set_timeout(60)
            impatient.send(np.zeros(3), 0, 9).wait()
        if messages.rank == 0:
            impatient.set_timeout(60)
            handle.wait()
        impatient.close()


# -- jobs ----------------------------------------------------------------------------------------------------------


def job(folder: Path, ranks: int, *words: str, by: Sequence[str] = (), **variables: str) -> Any:
    """`words` for Python on ranks without MPI, which cannot even be imported. by: another launcher than `fsdpx run`."""
    (folder / "mpi4py").mkdir(exist_ok=True)
    (folder / "mpi4py" / "__init__.py").write_text("raise ImportError('this environment has no MPI')")
    own = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "OPENBLAS_NUM_THREADS": "1", **variables}
    start = by or ("-m", "fsdpx", "run", "--backend", "gloo", "-n", str(ranks), "--max-restarts", "0")
    return subprocess.run(
        [sys.executable, *start, *words], cwd=ROOT, env=copy_without_rank_variables() | own, capture_output=True,
        text=True, timeout=280, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@in_jobs
@pytest.mark.parametrize(
    ("ranks", "more", "chosen", "least"),
    [
        (3, ["core/comm/test_node.py"], "not PlainArrays and not InWindows and not InCommonMemory", 30),
        (4, ["ext/gpu/test_relay.py", "core/engine/test_world.py"], "mesh or relay", 5),
    ],
    ids=["3", "4"],
)
def test_contract_and_training_without_mpi(ranks, more, chosen, least, tmp_path) -> None:
    """Run tests that MPI ranks pass: the contract over messages and, on one number of ranks each, tests that build on
    it: windows on hosts with one and two ranks (classes whose ranks share one host send no message), GPU arrays through
    the host, training on a mesh of any two axes. chosen: for -k. least: minimum number of tests that pass."""
    files = ["ext/gloo/test_gloo.py", *more]
    words = ["-m", "world", "-k", chosen, "-p", "no:cacheprovider", "-p", "no:pytest_mpi", "-p", "no:xdist"]
    done = job(tmp_path, ranks, "-m", "pytest", *words, *(str(TESTS / file) for file in files))
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= least, done.stdout


@in_jobs
def test_messages_that_nobody_waits_for_do_not_spoil_the_end(tmp_path: Path) -> None:
    """Neither side sends; each end of a connection wakes the thread that waits at the other one. It is a race, so
    three pairs of ranks try it."""
    script = tmp_path / "script.py"
    script.write_text(
        "import numpy as np, fsdpx\ncomm = fsdpx.init()\ncomm.barrier().wait()\n"
        "others = [rank for rank in range(comm.size) if rank != comm.rank]\n"
        "handles = [comm.recv(np.zeros(3), other, tag) for other in others for tag in range(4)]\n"
        "comm.barrier().wait()\n"  # a rank that has ended would be missed by one that still asks it
    )
    done = job(tmp_path, 3, str(script), FSDPX_TRANSPORT="messages")
    assert (done.returncode, done.stderr) == (0, "")


@in_jobs
def test_gpt_has_the_hash_of_one_process_under_torchrun(tmp_path: Path) -> None:
    """`fsdpx run` starts the same ranks, which train in test_world.py."""
    words = (
        "-m fsdpx.examples.gpt --data fsdpx/core/comm --steps 2 --batch 8 --validate 2 --validation-batches 1 "
        "--no-tune --no-save --sample 0 --chunks 4 --hash"
    ).split()
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = [job(tmp_path, 1, *words, by=("-B",)), job(tmp_path, 2, *words, by=torchrun)]
    assert [one.returncode for one in done] == [0, 0], "\n".join(one.stderr for one in done)
    assert len({one.stdout.split("sha256 ")[1].split()[0] for one in done}) == 1


@in_jobs
@pytest.mark.parametrize(
    ("end", "ranks", "through", "status", "said"),
    [
        ("sys.exit(3)", 2, "windows", 3, r"rank 1 (has|on \S+) ended with (exit )?status 3"),
        ("os.kill(os.getpid(), 9)", 3, "messages", 137, "recv of news on rank [02] of 3: rank 1 has ended"),
        ("raise RuntimeError('out of fuel')", 2, "windows", 1, "RuntimeError: out of fuel"),
    ],
)
def test_a_rank_that_ends_is_named_and_ends_the_job(end, ranks, through, status, said, tmp_path) -> None:
    script = tmp_path / "script.py"
    wait = "comm.barrier().wait()" if through == "windows" else "comm.recv(np.zeros(3), 1, what='news').wait()"
    script.write_text(
        f"import os, sys, numpy as np, fsdpx\ncomm = fsdpx.init()\ncomm.barrier().wait()\n"
        f"if comm.rank == 1:\n    {end}\nelse:\n    {wait}\n"
    )
    began = time.monotonic()
    done = job(tmp_path, ranks, str(script), FSDPX_TIMEOUT="250")
    assert done.returncode == status, done.stderr
    assert re.search(said, done.stderr), done.stderr
    assert "rank 1" in done.stderr
    assert time.monotonic() - began < 120  # not a timeout


@in_jobs
def test_who_does_not_come_and_an_address_that_is_wrong_are_named(tmp_path: Path) -> None:
    """Each is one process alone, in which only this is tried."""
    here = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "FSDPX_START_TIMEOUT": "1"}
    missing = job(tmp_path, 1, "import fsdpx; fsdpx.init()", by=("-c",), RANK="0", **here)
    assert missing.returncode == 1
    where = f"MASTER_ADDR=127.0.0.1, MASTER_PORT={here['MASTER_PORT']}"
    assert f"rank 0 of 3 waited 1 s for ranks 1, 2 at {where}" in missing.stderr
    nobody = job(tmp_path, 1, "import fsdpx; fsdpx.init()", by=("-c",), RANK="1", **here)
    assert re.search(
        rf"LaunchError: rank 1 of 3 cannot meet the others at {where} \(no process has answered within 1 s: "
        r"\[Errno \d+\] Connection refused\): both name the host of rank 0",
        nobody.stderr,
    )


def rolls(*ranks: tuple[Any, ...], timeout: float = 0.5) -> list[Any]:
    """What becomes of ranks (rank, size, secret, local rank) that come to one store, each in a thread."""
    import torch.distributed as dist

    store, found = dist.HashStore(), list[Any]([None] * len(ranks))

    def come(k: int, rank: int, size: int, secret: bytes = b"", local: int | None = None) -> None:
        try:
            found[k] = rendezvous.Rendezvous(store, rank, size, timeout, RendezvousStore("here", 1), secret, local)
        except LaunchError as error:
            found[k] = str(error)

    threads = [threading.Thread(target=come, args=(k, *rank)) for k, rank in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rendezvous.opened_rendezvous.clear()
    return found


@needs_torch
def test_ranks_with_another_world_size_are_named() -> None:
    found = rolls((0, 2), (1, 3), timeout=30.0)
    assert "rank 0 has WORLD_SIZE=2, but rank 1 (process" in found[0]
    assert "has WORLD_SIZE=3: set the same on all ranks" in found[0]
    assert "rank 1 has WORLD_SIZE=3, but rank 0 (process" in found[1]


@needs_torch
def test_two_ranks_of_one_number_are_named_and_rank_as_the_first_of_a_node() -> None:
    assert any("Two ranks have the same RANK, or another job meets there" in str(one) for one in rolls((0, 2), (0, 2)))
    found = rolls((0, 8, b"", 0), (4, 8, b"", 0), (4, 8, b"", 1))
    named = [text for text in found if "RANK=4 is that of the first rank of a node" in text]
    assert len(named) == 1
    assert named[0].endswith("set RANK to $((RANK + LOCAL_RANK))")


@needs_torch
def test_who_does_not_know_the_secret_does_not_come() -> None:
    """Another job's rank is named; a stranger who was there first gives way to the rank itself."""
    import torch.distributed as dist

    found = rolls((0, 2, b"one secret of many"), (1, 2, b"another secret"))
    assert "who came as rank 1 does not know the FSDPX_SECRET of this job" in found[0]
    store = dist.HashStore()
    store.set("came/0", rendezvous.RankArrival(0, 1, 1, "h", None, "x").to_signed_text(b"guessed"))
    mine = rendezvous.Rendezvous(store, 0, 1, 5.0, RendezvousStore("here", 1), b"one secret of many")
    rendezvous.opened_rendezvous.clear()
    assert mine._arrivals[0].process == os.getpid()


@pytest.mark.parametrize(
    "said", [b"", b"\xff", b" [[[[", b" " + b"[" * 4000, b" [0, 1]", b' ["0", 2, 3, "h", null, "x"]', b"zz [0]", b" 7"]
)
def test_what_is_no_arrival_is_none(said: bytes) -> None:
    for secret in (b"", b"a secret that is long"):
        assert rendezvous.RankArrival.parse_signed(said, secret) is None


def test_a_secret_that_can_be_guessed_is_refused() -> None:
    assert environment.read_secret({}) == b""
    assert environment.read_secret({"FSDPX_SECRET": " 0123456789abcdef "}) == b"0123456789abcdef"
    with pytest.raises(LaunchError, match=r"FSDPX_SECRET has 5 characters, which can be guessed: at least 16"):
        environment.read_secret({"FSDPX_SECRET": "guess"})


def test_init_of_gloo_alone_is_a_world_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "FSDPX_EXPECT_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert open_gloo(init.CommunicatorRequest(read_environment({}))).size == 1
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match="RANK=1 and WORLD_SIZE=2 say that this process is one of 2"):
        open_gloo(init.CommunicatorRequest(read_environment({})))


@in_jobs
def test_a_stranger_who_comes_first_is_refused_and_nothing_of_his_is_run(tmp_path: Path) -> None:
    words = [str(TESTS / "ext" / "gloo" / "stranger.py"), str(tmp_path / "run"), "0123456789abcdef01"]
    done = job(tmp_path, 1, *words, by=("-B",))
    assert (done.returncode, (tmp_path / "run").exists()) == (0, False)
    assert "who came as rank 1 does not know the FSDPX_SECRET of this job" in done.stderr


@in_jobs
def test_the_death_of_rank_0_ends_ranks_that_were_started_by_hand(tmp_path: Path) -> None:
    """The store dies with it, and nothing tells the others that wait in shared memory but their watchdogs."""
    code = (
        "import os, fsdpx; comm = fsdpx.init(); comm.barrier().wait(); comm.rank or os.kill(os.getpid(), 9); "
        "comm.barrier().wait()"
    )
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3"}
    with ThreadPoolExecutor(3) as pool:
        done = [*pool.map(lambda rank: job(tmp_path, 1, code, by=("-c",), RANK=rank, **own), "012")]
    assert [one.returncode for one in done] == [-9, 1, 1]
    assert re.search(r"rank 0 (is gone|has ended)", done[1].stderr + done[2].stderr)


def test_without_pytorch_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    settings = read_environment({"RANK": "0", "WORLD_SIZE": "2", "FSDPX_STORE": "store"})
    with pytest.raises(ConfigError, match=r"backend='gloo' needs PyTorch, .*: pip install '\.\[gloo\]'"):
        rendezvous.join_rendezvous(settings)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LaunchError, match=r"needs PyTorch, which is not installed: pip install '\.\[gloo\]'"):
        find_launcher_to_use(LaunchConfig(2, backend="gloo"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"elastic": True}, "backend='gloo': all ranks end when one dies; leave elastic out, or start them by MPI"),
        ({"nodes": 2, "mpiexec": "mpirun"}, "on this host, without MPI; leave nodes and mpiexec out"),
    ],
)
def test_what_fsdpx_run_cannot_start_without_mpi_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        LaunchConfig(2, backend="gloo", **options)


def test_what_the_environment_does_not_say_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_import_torch_distributed", lambda: None)
    of_mpi = {"PMI_RANK": "0", "PMI_SIZE": "2"}
    for environ, words in (
        (of_mpi, "MASTER_ADDR and MASTER_PORT, or FSDPX_STORE, do not say where ranks meet"),
        ({"FSDPX_STORE": "store"}, "RANK and WORLD_SIZE do not say which of how many ranks this is"),
        ({"FSDPX_STORE": "store", "RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is not below WORLD_SIZE=2"),
    ):
        with pytest.raises(LaunchError, match=words):
            rendezvous.join_rendezvous(read_environment(environ))


@needs_torch
def test_an_address_that_no_rank_of_this_meeting_has_written_is_refused() -> None:
    """A stranger who reaches the store could otherwise stand between two ranks, and pass on what proves them."""
    from fsdpx.ext.gloo.gloo import SealedStore

    secret = b"one secret of many"
    one, other = rolls((0, 2, secret), (1, 2, secret), timeout=30.0)
    mine, theirs = SealedStore(one), SealedStore(other)
    mine.set("1/0", b"address")
    assert theirs.get("1/0") == b"address"
    earlier, _ = rolls((0, 2, secret), (1, 2, secret), timeout=30.0)
    SealedStore(earlier).set("1/0", b"address")
    for planted in (b"address", b"", b"x" * 40, one.store.get("1/0")[:-1] + b"x", earlier.store.get("1/0")):
        one.store.set("1/0", planted)
        with pytest.raises(CommError, match="is not from a rank that knows the FSDPX_SECRET of this job"):
            theirs.get("1/0")
    one.store.set("1/1", mine._rendezvous.compute_authentication_code("1/0", b"address") + b"address")
    with pytest.raises(CommError, match="a stranger has written it"):
        theirs.get("1/1")
