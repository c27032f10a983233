"""A plugin for `mpirun -n 4 pytest tests`: the ranks run the tests marked `world` together, and rank 0 reports."""

import io
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from amount import THOROUGH

from fsdpx.core.comm import calls
from fsdpx.testing.communicator import ALL_DTYPES, CommunicatorContract

TRANSPORTS = ["node", "mpi"]
"""Shared memory of the host, and messages alone."""
SPINS_WITHOUT_CORE = 32
"""Number of polls before a rank sleeps, if ranks use all cores. With more, polling takes half of the time."""


SEEN_ON_THREE = tuple(f"tests/ext/{name}/" for name in ("asynchronous", "compression", "gpu", "moe", "observe"))
"""Extensions that behave alike on any number of ranks above one: their tests run on two and three."""


def in_turn(items: list[pytest.Item], size: int) -> list[pytest.Item]:
    """Deselect tests that other numbers of ranks run. Of the dtypes in the contract of communicators, each transport
    and number of ranks gets a different third. Tests above communicators use one of the two transports, and the other
    one with two more ranks. Tests of extensions and commands run on two, three and four ranks, and each on either one
    or five; those of `SEEN_ON_THREE` run on two ranks with one transport, and on three with the other.
    `--hypothesis-profile=thorough` runs all.

    The dtype determines the addition and the bytes per element, the number of ranks which rank has which elements, and
    the transport how bytes are sent. Each pair of these three still occurs: each dtype on each number of ranks, with a
    third of the transports, and each dtype with each transport, on a third of the numbers of ranks."""
    classes = list(dict.fromkeys(getattr(item, "cls", None) for item in items))
    names: dict[str, int] = {}
    kept = []
    for item in items:
        kind, parameters = getattr(item, "cls", None), getattr(getattr(item, "callspec", None), "params", {})
        several = kind is not None and issubclass(kind, CommunicatorContract) and "dtype" in parameters
        turn = (ALL_DTYPES.index(parameters["dtype"]) + classes.index(kind) + size) % 3 if several else 0
        if parameters.get("world") in TRANSPORTS and "tests/core/comm/" not in item.nodeid:
            others = [value for name, value in parameters.items() if name != "world"]
            place = names.setdefault(f"{item.nodeid.partition('[')[0]} {others}", len(names))
            turn = (TRANSPORTS.index(parameters["world"]) + place + size // 2) % 2
            if item.nodeid.startswith(SEEN_ON_THREE):
                turn = (TRANSPORTS.index(parameters["world"]) + place + size) % 2 if size in (2, 3) else 1
            elif size in (1, 5) and "tests/core/" not in item.nodeid:
                turn += (place // 2 + size // 4) % 2
        if THOROUGH or turn == 0:
            kept.append(item)
    return kept


class Ranks:
    """rank, size: of this process, from 0, and how many there are. mpi: whether it is one of MPI's. Other ranks than
    0 print what they have to say only if a test has failed there."""

    def __init__(self, rank: int, size: int, mpi: bool = True) -> None:
        self.rank, self.size, self.mpi = rank, size, mpi
        self.said = io.StringIO()
        self.failed = True  # unless the session comes to its end
        self.folder = Path(tempfile.mkdtemp(prefix=f"rank-{rank}-"))  # in a common one they remove each other's

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """pytest-mpi, if it is there, skips what is not for MPI. The reporter takes `sys.stdout` as it is now."""
        if hasattr(config.option, "with_mpi"):
            config.option.with_mpi = True
        config.option.basetemp = config.option.basetemp or str(self.folder / "tests")
        if self.rank:
            sys.stdout = self.said
        if self.size >= (os.cpu_count() or 1):  # waiting ranks should leave the cores to working ranks
            calls._SPINS_BEFORE_SLEEP = SPINS_WITHOUT_CORE

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        sys.stdout = sys.__stdout__
        for name in ("lfplugin", "nfplugin"):  # all would write the same files
            if self.rank and session.config.pluginmanager.has_plugin(name):
                session.config.pluginmanager.unregister(name=name)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """All other tests have thread ranks, or none, and belong to one process; jobs are shown as skipped."""
        here = [item for item in items if item.get_closest_marker("world") or item.get_closest_marker("jobs")]
        here = in_turn(here, self.size)
        config.hook.pytest_deselected(items=[item for item in items if item not in set(here)])
        items[:] = here

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """A failure of one rank is one of all; without MPI the launcher sees to that."""
        self.failed = bool(exitstatus)
        if not self.mpi:
            return
        from mpi4py import MPI

        session.exitstatus = max(MPI.COMM_WORLD.allgather(int(exitstatus)))

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """The reporter has come to its end."""
        if self.rank and self.failed:
            print(f"[rank {self.rank}]\n{self.said.getvalue()}", flush=True)
        shutil.rmtree(self.folder, ignore_errors=True)
