"""Processes that are killed in the middle of each verb: the others hear of it, come together and go on."""

import pytest
from jobs_ulfm import ROOT, job

pytestmark = pytest.mark.jobs


PROGRAM = """
import os, signal, sys, threading, time
from pathlib import Path
import numpy as np
from mpi4py import MPI
from fsdpx.core.comm.init import open_fault_tolerant_communicator
from fsdpx.core.comm.communicator import can_survive
from fsdpx.errors import RankLost

SIZE = 1 << 16
DEADLY = 3  # which call of a verb

def die():
    note = Path(f"dies-{born}")
    note.write_text(str(time.time()))
    note.rename(f"died-{born}")
    os.kill(os.getpid(), signal.SIGKILL)

def since():
    return 1000 * (time.time() - max(float(note.read_text()) for note in Path().glob("died-*")))

def swap(comm):
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    return [comm.recv(np.ones(SIZE), left), comm.send(np.ones(SIZE), right)]

whole, part = lambda comm: np.ones(SIZE * comm.size), lambda: np.ones(SIZE)
ISSUED = {
    "all_gather": lambda comm: [comm.all_gather(part(), whole(comm))],
    "reduce_scatter": lambda comm: [comm.reduce_scatter(whole(comm), part())],
    "all_reduce": lambda comm: [comm.all_reduce(part()), comm.all_reduce(part(), algorithm="ring")],
    "messages": swap,
}
BLOCKING = {
    "split": lambda comm: comm.split(comm.rank % 2).close(),
    "all_gather_object": lambda comm: comm.all_gather_object("x" * 1000),
    "agree": lambda comm: comm.agree_on_flags(1) or agreed_on_a_loss(),
    "shrink": lambda comm: comm.shrink(),
}

def agreed_on_a_loss():
    raise RankLost("agreed")

def call(comm, verb, deadly, victims):
    victim, late = comm.rank in victims, comm.rank == min(set(range(comm.size)) - victims)
    if verb in ISSUED:
        handles = ISSUED[verb](comm)
        if victim and deadly:
            die()
        for handle in handles:
            handle.wait()
        return None
    if victim and deadly:
        threading.Timer(0.005, die).start()
    while deadly and late and len(comm.get_failed_ranks()) < len(victims):  # the others, who die too, wait for this one
        MPI.COMM_SELF.Iprobe(0)  # MPI hears of deaths while it makes progress
    return BLOCKING[verb](comm)

comm = open_fault_tolerant_communicator()
assert can_survive(comm)
comm.timeout = 20.0
born, history = comm.rank, []
for stage in sys.argv[1:]:
    verb, who = stage.split(":")
    victims = {int(rank) % comm.size for rank in who.split(",")}
    expected, times = comm.size - len(victims), 0
    if verb == "shrink":
        comm.revoke()
        comm = call(comm, verb, True, victims)
    else:
        try:
            while True:
                call(comm, verb, times == DEADLY, victims)
                times += 1
        except RankLost as error:
            if comm.rank in victims:
                die()  # it was told of the other victim before its own call came
            print(f"heard {since():.0f} ms {verb} {error}", flush=True)
            assert times >= DEADLY - 1  # who dies has all of a call that others have begun, perhaps not ended
        comm.revoke()
        assert comm.agree_on_flags(7) == 0
        comm = comm.shrink()
    ones = np.ones(2)
    comm.all_reduce(ones).wait()
    history.append((verb, comm.size, int(ones[0]), comm.all_gather_object(born)))
    assert comm.size == expected, (comm.size, expected)
    assert comm.agree_on_flags(6) == 6
comm.close()
print("history", history, flush=True)
"""

VERBS = ("all_gather", "split", "all_reduce", "agree", "reduce_scatter", "all_gather_object", "messages", "shrink")
VICTIMS = ("0", "-1", "0,-1")


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("verbs", [VERBS[:4], VERBS[4:]], ids="first second".split())
def test_survivors_of_kills_in_each_verb_go_on(tmp_path, verbs, turn):
    stages = [f"{verb}:{VICTIMS[(turn + i) % 3]}" for i, verb in enumerate(verbs)]
    done = job(tmp_path, PROGRAM, 2 + sum(stage.count(",") + 1 for stage in stages), *stages)
    print(done.out)
    assert done.status == 0, done.err
    assert "Traceback" not in done.err
    histories = done.lines("history")
    assert len(histories) == 2, done.err
    assert len(set(histories)) == 1
    heard = [float(line.split()[0]) for line in done.lines("heard")]
    assert len(heard) >= 3
    assert max(heard) < 10_000


STRAY = """
import os, signal, sys
import numpy as np
from fsdpx.core.comm.init import open_fault_tolerant_communicator
from fsdpx.errors import CommError, RankLost
comm = open_fault_tolerant_communicator()
inner = comm.subgroup([0, 1] if comm.rank < 2 else [2]).subgroup([0, 1] if comm.rank < 2 else [0])
if comm.rank == 2:
    comm.barrier().wait()
    os.kill(os.getpid(), signal.SIGKILL)
if comm.rank == 0:
    comm.barrier().wait()
    handle = inner.recv(np.ones(3), 1, what="ACT3")
else:
    comm.barrier().wait()
    del inner
    handle = comm.recv(np.ones(3), 2, what="ACT4")
try:
    handle.wait()
except RankLost as error:
    print("said", comm.rank, error, flush=True)
comm.revoke()
assert comm.agree_on_flags(1) == 0
print("left", comm.shrink().size, comm.get_failed_ranks(), flush=True)
inner = None
comm.close()
"""


def test_revoke_reaches_who_waits_in_groups(tmp_path):
    """Rank 0 waits in a group of a group for rank 1, who has let go of it, and hears of rank 2."""
    done = job(tmp_path, STRAY, 3)
    assert done.status == 0, done.err
    assert sorted(done.lines("said")) == [
        "0 recv of ACT3 on rank 0 of 2: another rank has revoked this communicator because a rank has died",
        "1 recv of ACT4 on rank 1 of 3: rank 2 has died",
    ]
    assert done.lines("left") == ["2 (2,)"] * 2


CONTRACT = """
import sys
import pytest
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
options = ["--with-mpi", "-p", "no:cacheprovider", "--rootdir", sys.argv[1], "--basetemp", f"tests-{rank}"]
chosen = f"{sys.argv[1]}/tests/core/comm/test_mpi.py::TestWithoutDeaths"
status = int(pytest.main([*options, "-c", f"{sys.argv[1]}/setup.cfg", chosen]))
print("status", status, flush=True)
"""


def test_the_contract_where_ranks_survive(tmp_path):
    done = job(tmp_path, CONTRACT, 3, str(ROOT))
    assert done.status == 0, done.err
    assert done.lines("status") == ["0"] * 3, done.out
