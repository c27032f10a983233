"""The process of a solver is as it was: before a trainer, between its steps, and after it, whatever ends it."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from trials import environment, job, none_left

from fsdpx import spawn
from fsdpx.core.base import hooks

GUEST = """
import gc, locale, logging, os, random, signal, sys, threading, warnings
import numpy as np

def pools():
    from threadpoolctl import threadpool_info
    return [(pool["filepath"], pool["num_threads"]) for pool in threadpool_info() if "numpy" in pool["filepath"]]

def process():
    \"\"\"All that a library may change in a process.\"\"\"
    umask = os.umask(0)
    os.umask(umask)
    root = logging.getLogger()
    return {
        "excepthook": sys.excepthook, "threading": threading.excepthook, "exit": sys.exit, "_exit": os._exit,
        "signals": {int(number): signal.getsignal(number) for number in signal.valid_signals()},
        "unraisable": sys.unraisablehook, "display": sys.displayhook,
        "environment": dict(os.environ), "umask": umask, "folder": os.getcwd(), "filters": list(warnings.filters),
        "showwarning": warnings.showwarning, "root": (root.level, list(root.handlers)), "errors": np.geterr(),
        "locale": locale.setlocale(locale.LC_ALL), "random": random.getstate(), "trace": sys.gettrace(),
        "numpy": str(np.random.get_state()), "print": np.get_printoptions(), "gc": (gc.isenabled(), gc.get_threshold()),
        "recursion": sys.getrecursionlimit(), "switch": sys.getswitchinterval(), "stdout": sys.stdout,
        "stderr": sys.stderr, "path": list(sys.path), "argv": list(sys.argv),
        "threads": pools(),
    }

def unlike(before, now):
    return [name for name in before if before[name] != now[name]]
"""
HOOKS = """
import fsdpx.core.base.messages
import threadpoolctl  # for `pools`: importing it sets a variable of OpenMP
from mpi4py import MPI
def hook(*_): pass
sys.excepthook = hook
before = process()
import fsdpx
from fsdpx import nn, optim
assert unlike(before, process()) == [], unlike(before, process())

def make(comm=MPI.COMM_WORLD, **options):
    return nn.Linear(3, 2).as_distributed(loss=nn.MSELoss(), optimizer=optim.SGD(lr=0.1), comm=comm, **options)

ours = {"excepthook", "threading", "exit", "_exit"}
x, y = np.ones((2, 3)), np.ones((2, 2))
one = make()
one.step(x, y)
found = unlike(before, process())
assert set(found) <= ours, found
one.close()
assert unlike(before, process()) == [], unlike(before, process())
for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):  # made one after the other, closed in any order
    several = [make() for _ in range(3)]
    for number in order:
        assert sys.excepthook is not hook
        several[number].step(x, y)
        several[number].close()
    assert unlike(before, process()) == [], unlike(before, process())
with make() as trainer:
    trainer.step(x, y)
assert unlike(before, process()) == [], unlike(before, process())
trainer = make()
trainer.step(x, y)
del trainer
gc.collect()
assert unlike(before, process()) == [], unlike(before, process())
try:
    make(microbatches=0)
except fsdpx.errors.ConfigError:
    pass
assert unlike(before, process()) == [], unlike(before, process())

trainer = make()  # the solver sets a hook over ours
def later(*_): pass
sys.excepthook = later
trainer.close()
assert (sys.excepthook, sys.exit) == (later, before["exit"])
sys.excepthook = hook

trainer = make(comm=None)  # the default communicator opens with the trainer
assert sys.excepthook is not hook
trainer.close()
assert unlike(before, process()) == [], unlike(before, process())
fsdpx.init()  # the solver wants a job that ends with each rank
assert (sys.excepthook is hook) == (
    MPI.COMM_WORLD.size == 1 and not fsdpx.core.base.environment.read_environment().launcher
)
fsdpx.finalize()
assert unlike(before, process()) == [], unlike(before, process())
print("as before", flush=True)
"""


@pytest.mark.jobs
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_process_is_as_before_once_its_trainers_are_gone(tmp_path: Path, ranks: int) -> None:
    done = job(tmp_path, GUEST + HOOKS, ranks=ranks)
    assert done.out == "as before\n" * ranks, done.err
    assert none_left(tmp_path)


CHAINED = """
import sys, threading, pathlib
import numpy as np
def write_last_checkpoint(*_):
    from mpi4py import MPI
    pathlib.Path(f"last-{MPI.COMM_WORLD.rank}").touch()
    HOW
sys.excepthook = write_last_checkpoint
threading.excepthook = write_last_checkpoint
import fsdpx
from fsdpx import nn, optim
trainer = nn.Linear(3, 2).as_distributed(loss=nn.MSELoss(), optimizer=optim.SGD(lr=0.1))
def fail(): raise ValueError("of the solver")
if fsdpx.rank() == 1: WHERE
for _ in range(10**9): trainer.step(np.ones((2, 3)), np.ones((2, 2)))
"""


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("where", "how", "status"),
    [("fail()", "pass", 1), ("fail()", "sys.exit(7)", 7), ("threading.Thread(target=fail).start()", "1 / 0", 1)],
)
def test_the_solvers_hook_runs_and_then_the_job_ends(tmp_path: Path, where: str, how: str, status: int) -> None:
    done = job(tmp_path, CHAINED.replace("HOW", how).replace("WHERE", where), ranks=2)
    assert done.status == status, done.err
    assert none_left(tmp_path)
    assert (tmp_path / "last-1").exists()
    assert not (tmp_path / "last-0").exists()
    assert "[rank 1/" in done.err
    assert "ValueError: of the solver" in done.err
    assert ("the program's own excepthook failed" in done.err) == (how == "1 / 0")


class Place:
    """Something with a hook."""


class Comm:
    rank = 0


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with the hook f, which `hold` puts in place."""
    made = ModuleType("theirs")
    made.f = lambda: ["theirs"]  # type: ignore[attr-defined]
    hook = hooks.Hook(made, "f", lambda former: lambda: ["ours", *former()])
    monkeypatch.setattr(hooks, "_hooks", [hook])
    monkeypatch.setattr(hooks, "_holders", {})
    return made


def test_a_hook_is_in_place_while_somebody_holds_it(module: Any) -> None:
    before, (a, b), comm = module.f, (Place(), Place()), Comm()
    hooks.install_process_hooks_while_alive(a, comm)
    hooks.install_process_hooks_while_alive(b, comm)
    hooks.install_process_hooks_while_alive(a, comm)
    assert (module.f(), hooks.find_communicator_to_abort()) == (["ours", "theirs"], comm)
    hooks.release_hooks_of_owner(a)
    assert module.f() == ["ours", "theirs"]
    del b
    assert (module.f, hooks.find_communicator_to_abort()) == (before, None)
    hooks.release_hooks_of_owner(a)
    assert module.f is before


def test_a_hook_that_is_set_over_ours_stays(module: Any) -> None:
    before, a, comm = module.f, Place(), Comm()
    hooks.install_process_hooks_while_alive(a, comm)
    under = module.f
    over = module.f = lambda: ["over", *under()]
    hooks.install_process_hooks_while_alive(b := Place(), comm)  # ours comes first again, and once
    assert module.f() == ["ours", "over", "theirs"]
    hooks.release_hooks_of_owner(a)
    hooks.release_hooks_of_owner(b)
    assert module.f is over
    assert module.f() == ["over", "theirs"]
    module.f = under  # as it puts back what it found
    hooks.install_process_hooks_while_alive(a, comm)
    assert module.f() == ["ours", "theirs"]
    hooks.release_hooks_of_owner(a)
    assert module.f is before


def test_an_exception_holds_hooks_as_long_as_it_lives(module: Any) -> None:
    before, comm = module.f, Comm()
    try:
        with hooks.releasing_hooks_after_block():
            hooks.install_process_hooks_while_alive(comm, comm)
            raise ValueError
    except ValueError:
        assert module.f() == ["ours", "theirs"]
        assert hooks.find_communicator_to_abort() is comm
    assert module.f is before
    hooks.install_process_hooks_while_alive(a := Place(), comm)
    with hooks.releasing_hooks_after_block():  # who held before holds after
        hooks.install_process_hooks_while_alive(a, comm)
        hooks.install_process_hooks_while_alive(comm, comm)
    assert module.f() == ["ours", "theirs"]
    hooks.release_hooks_of_owner(a)
    assert module.f is before


@pytest.mark.jobs
def test_a_thread_rank_that_ends_the_process_is_named(tmp_path: Path) -> None:
    program = "import os, fsdpx\nfsdpx.spawn(lambda comm: comm.rank == 1 and os._exit(3), 2)\n"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 3
    assert "fsdpx: os._exit(3) by [rank 1] of 2 thread ranks: the process ends" in done.stderr


def test_exits_are_as_before_after_a_spawn() -> None:
    before = os._exit
    assert spawn(lambda comm: os._exit is not before, 2) == [True, True]
    assert os._exit is before


LOGS = """
import io, logging
theirs = logging.StreamHandler(io.StringIO())
logger = logging.getLogger("fsdpx")
logger.addHandler(theirs)
logger.setLevel(logging.WARNING)
import fsdpx.core.base.messages
assert (logger.handlers, logger.level, logger.propagate) == ([theirs], logging.WARNING, True)
"""


@pytest.mark.jobs
def test_a_logger_that_the_program_has_set_up_stays_so() -> None:
    done = subprocess.run([sys.executable, "-c", LOGS], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
