"""Settings that some ranks have and others have not are named in the first message, before any of them matters."""

import os
from typing import Any

import pytest

import fsdpx
from fsdpx import environment, nn, optim, spawn
from fsdpx.comm import Communicator, default
from fsdpx.comm.guarded import with_arguments
from fsdpx.comm.opening import carrier_of
from fsdpx.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("check", True, r"check \(rank 0: None; rank 1: True\)"),
        ("tune", False, r"tune \(rank 0: None; rank 1: False\)"),
        ("backend", "node", r"backend \(rank 0: None; rank 1: 'node'\)"),
        ("elastic", True, r"elastic \(rank 0: False; rank 1: True\)"),
    ],
)
def test_arguments_of_distribute_on_some_ranks_are_named(name: str, value: Any, words: str) -> None:
    def run(comm: Communicator) -> None:
        given = {name: value} if comm.rank else {}
        nn.Linear(2, 2).as_distributed(loss=nn.MSE(), optimizer=optim.SGD(lr=0.1), **given)

    with pytest.raises(ConfigError, match=rf"ranks differ in {words}\. Give all ranks the same"):
        spawn(run, 2)


def test_what_ranks_agree_on_is_of_the_environment() -> None:
    found = environment.read(
        {"FSDPX_CHECK": "yes", "FSDPX_NODE": "0", "FSDPX_TUNE": "again", "FSDPX_TIMEOUT": "7"}
    ).agreed
    assert found == {
        "FSDPX_CHECK": "1", "FSDPX_NODE": "0", "FSDPX_TUNE": "again", "FSDPX_WATCH": "1", "FSDPX_TIMEOUT": "7.0",
    }  # fmt: skip


def test_the_inner_call_does_not_hide_what_the_outer_one_given() -> None:
    with with_arguments(backend="mpi", check=True), with_arguments(backend=None) as inner:
        assert inner == {"backend": "None"}
        assert fsdpx.comm.guarded.given_to_call() == {"backend": "'mpi'", "check": "True"}


@pytest.mark.world
def test_variables_on_some_ranks_are_named(world: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    if world.size == 1 or "Gloo" in repr(carrier_of(world)):
        pytest.skip("needs two ranks of MPI")
    from mpi4py import MPI

    for name, value in (("CHECK", "1"), ("NODE", "0"), ("WATCH", "0"), ("TUNE", "0"), ("TIMEOUT", "300")):
        with monkeypatch.context() as patch:
            patch.delenv(f"FSDPX_{name}", raising=False)
            if world.rank == 1:
                patch.setitem(os.environ, f"FSDPX_{name}", value)
            with pytest.raises(ConfigError, match=rf"ranks differ in FSDPX_{name} \(.*rank 1: {value}.*mpiexec -x"):
                fsdpx.comm.world(comm=MPI.COMM_WORLD)


@pytest.mark.world
def test_a_communicator_given_on_some_ranks_is_named(world: Communicator) -> None:
    """Before there is a default communicator, and after."""
    if world.size == 1 or "Gloo" in repr(carrier_of(world)):
        pytest.skip("needs two ranks of MPI")
    from mpi4py import MPI

    given = {"comm": MPI.COMM_WORLD} if world.rank == 1 else {}
    before = default.current()
    default.put(None)
    words = r"ranks differ in comm \(.*rank 1: 'Intracomm'.*\)\. Give all ranks the same"
    with pytest.raises(ConfigError, match=words):
        fsdpx.init(**given)
    for _ in range(2):
        with pytest.raises(ConfigError, match=words):
            nn.Linear(2, 2).as_distributed(loss=nn.MSE(), optimizer=optim.SGD(lr=0.1), **given)
        fsdpx.init()
    fsdpx.finalize()
    default.put(before)
