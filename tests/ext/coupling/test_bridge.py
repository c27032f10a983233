"""Bridges between solver ranks and training ranks that are threads: received fields, waiting, and closing."""

from itertools import count
from threading import Event

import coupled
import numpy as np
import pytest
from coupled import MODES, SHAPE, check_snapshot, couple, make_side, send_step

import fsdpx
from fsdpx import nn, spawn
from fsdpx.core.comm import RankDied
from fsdpx.errors import CommTimeout, ConfigError, DataError, RankLost
from fsdpx.ext.coupling import streams
from fsdpx.ext.coupling.messages import pack_message, unpack_message

STEPS = 5


def send_steps(steps):
    """What a side does that only sends so many steps."""

    def send(bridge, grid, part):
        for step in range(steps):
            send_step(bridge, grid, step)

    return send


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sides", [(1, 1), (2, 1), (1, 2), (3, 2), (4, 3)])
def test_both_sides_receive_the_bits_that_the_other_one_sends(sides, mode):
    """Send fields to the trainer, and fields and weights back to the solver, between uneven and empty parts."""

    wait = mode != "latest"

    def solve(bridge, grid, part):
        network = nn.Conv2d(2, 2, 3).as_distributed(comm=part, precision="float64")
        return coupled.run_solver(bridge, grid, wait, STEPS, network.load_parameters), network.parameters()["bias"][0]

    def train(bridge, grid, part):
        network = nn.Conv2d(2, 2, 3).as_distributed(comm=part, precision="float64")

        def make_weights(number):
            values = network.parameters()
            values["bias"][...] = number
            network.load_parameters(values)
            return network if number % 2 else values

        return coupled.run_trainer(bridge, grid, wait, STEPS, make_weights)

    seed = 1 + MODES.index(mode) if sides == (4, 3) else 0
    found = spawn(lambda comm: couple(comm, sides[0], solve, train, seed, mode=mode), sum(sides), delays=seed)
    trained = found[-1]
    assert trained == (list(range(STEPS)) if wait else sorted(set(trained)))
    assert all(numbers == trained for numbers in found[sides[0] :])
    assert all(solved == (found[0][0], trained[-1]) for solved in found[: sides[0]])
    assert found[0][0] == trained if wait else set(found[0][0]) <= set(trained)


@pytest.mark.parametrize(("mode", "depth"), [("lockstep", None), ("queue", 1), ("queue", 3), ("queue", None)])
def test_the_solver_is_as_far_ahead_as_the_depth_allows(mode, depth, monkeypatch):
    """It waits in the send that follows, before anything was received."""
    sent = []
    ahead = {"lockstep": 0, "queue": depth or 2}[mode]
    waiting, wait_until = Event(), streams.wait_until

    def note_wait(comm, is_done, *more):
        if comm.rank == 0 and not is_done():
            waiting.set()
        wait_until(comm, is_done, *more)

    def solve(bridge, grid, part):
        for step in range(12):
            send_step(bridge, grid, step)
            sent.append(step)

    def train(bridge, grid, part):
        assert waiting.wait(30)
        assert len(sent) == ahead
        for received, _ in enumerate(bridge, 1):
            assert len(sent) <= received + ahead

    monkeypatch.setattr(streams, "wait_until", note_wait)
    spawn(lambda comm: couple(comm, 1, solve, train, mode=mode, depth=depth), 2, timeout=30)
    assert len(sent) == 12


def test_ranks_of_the_solver_that_are_steps_apart_send_the_same_snapshot():
    """Rank 0 has already passed the snapshot that the trainer requests, so the trainer requests a later one."""

    def run(comm):
        turn, trains = comm.subgroup(range(3)), comm.rank == 2
        bridge, grid, _ = make_side(comm, 2, mode="latest")
        found, step = [], 0
        for steps in [(3, 1), (1, 3), (1, 1), (5, 5)]:  # from both solver ranks in this round
            if trains:
                found.append(bridge.receive(wait=False))  # sends ASK or TAKE
            turn.barrier().wait()
            for _ in range(0 if trains else steps[comm.rank]):
                send_step(bridge, grid, step)
                step += 1
            turn.barrier().wait()
        if trains:
            found.append(bridge.receive(wait=False))
            check_snapshot(grid, found[-1])
        bridge.close()
        return found

    *waited, last = spawn(run, 3, timeout=30)[2]
    assert waited == [None] * 4
    assert last.number == 9  # position 4, plus the margin of 1 + 2 * 2, because rank 0 was two steps late


@pytest.mark.parametrize("mode", MODES)
def test_either_side_may_end_first(mode):
    def many(bridge, grid, part):
        send_steps(20)(bridge, grid, part)
        return mode == "latest" or bridge.agree_on_whether_other_side_closed()

    def one(bridge, grid, part):
        if mode != "latest":
            check_snapshot(grid, bridge.receive())

    assert spawn(lambda comm: couple(comm, 2, many, one, mode=mode), 4, timeout=30)[:2] == [True, True]

    def until_the_end(bridge, grid, part):
        first, others = bridge.receive(wait=False), [s.number for s in bridge]
        return first, others, bridge.receive(), bridge.agree_on_whether_other_side_closed()

    few, nothing = send_steps(0 if mode == "lockstep" else 2), send_steps(0)
    spawn(lambda comm: couple(comm, 2, few, nothing, mode=mode), 3, timeout=30)  # nothing is received
    found = spawn(lambda comm: couple(comm, 2, nothing, until_the_end, mode=mode), 3, timeout=30)[2]
    assert found == (None, [], None, True)


def test_the_last_weights_arrive_though_the_trainer_never_waits():
    def solve(bridge, grid, part):
        send_steps(50)(bridge, grid, part)  # no rank receives
        everyone[part.rank].barrier().wait()
        found = []
        while (weights := bridge.receive_weights()) is not None:
            found.append(float(weights["bias"][0]))
        return found, bridge.receive()

    def train(bridge, grid, part):
        for n in range(9):
            bridge.send_weights({"bias": np.full(2, n, np.float32)})
        everyone[2 + part.rank].barrier().wait()

    everyone = {}

    def run(comm):
        everyone[comm.rank] = comm.subgroup(range(4))
        return couple(comm, 2, solve, train, mode="latest")

    assert spawn(run, 4, timeout=30)[:2] == [([0.0, 8.0], None)] * 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dying", [0, 3])
def test_ranks_that_live_on_learn_of_a_death(dying, mode):
    def run(comm):
        trains = comm.rank >= 2
        bridge, grid, _ = make_side(comm, 2, mode=mode)
        for step in count():
            if comm.rank == dying and step == (0 if trains else 2):
                raise RankDied
            try:
                bridge.receive() if trains else send_step(bridge, grid, step)
            except RankLost as error:
                return str(error)

    found = spawn(run, 4, survive=True, timeout=30)
    assert found.pop(dying) is None
    assert all("has died" in text for text in found)


def test_wrong_arguments_are_the_same_error_on_all_ranks():
    def attempt(match, **given):
        def run(comm):
            part, side = comm.split(comm.rank), ["solver", "trainer"][comm.rank]
            grids = {"solver": coupled.solver_grid(part), "trainer": coupled.trainer_grid(part)}
            chosen = {side: grids[side]} | {k: v(part, grids, comm.rank) for k, v in given.items()}
            with pytest.raises(ConfigError, match=match):
                fsdpx.Bridge(comm, **chosen)

        spawn(run, 2, timeout=30)

    attempt("rank 0: pass solver= on solver ranks", trainer=lambda part, grids, rank: grids["trainer"])
    attempt("rank 0: pass solver= on solver ranks", solver=lambda *_: None)
    attempt("no rank passes trainer=", trainer=lambda *_: None, solver=lambda part, grids, rank: grids["solver"])
    attempt("rank 0: 3 is not a grid", solver=lambda part, grids, rank: None if rank else 3)
    attempt("training grid has ghost cells", trainer=lambda part, grids, rank: grids["solver"] if rank else None)
    attempt("mode='fast': choose 'lockstep'", mode=lambda *_: "fast")
    attempt("depth=0, mode='queue': .* at least 1", depth=lambda *_: 0)
    attempt("depth=2, mode='latest'", depth=lambda *_: 2, mode=lambda *_: "latest")
    attempt("rank 0 has mode='queue' and depth=None, and rank 1 mode='queue' and depth=3",
            depth=lambda part, grids, rank: 3 * rank or None)  # fmt: skip
    attempt(
        r"the solver's field has \(9, 7\) cells in layout 'yxc', the trainer's \(7, 9\) in layout 'xy'",
        trainer=lambda part, grids, rank: coupled.trainer_grid(part, layout="xy") if rank else None,
    )


def test_wrong_calls_say_what_is_wrong():
    def solve(bridge, grid, part):
        with pytest.raises(DataError, match=r"Bridge\.send: field 1 has shape \(4, 4, 2\), but this rank's part, in "):
            bridge.send(np.zeros((*SHAPE, 2)), np.zeros((4, 4, 2)))
        with pytest.raises(DataError, match="field 0 is an array of <U1: give numbers"):
            bridge.send(np.full(SHAPE, "a"))
        with pytest.raises(ConfigError, match="function"):
            bridge.send(np.zeros(SHAPE), callback=print)
        with pytest.raises(ConfigError, match="from training ranks to solver ranks"):
            bridge.send_weights({})
        bridge.send(np.zeros(SHAPE))
        bridge.close()
        bridge.close()
        with pytest.raises(ConfigError, match=r"Bridge\.send: this bridge is closed"):
            bridge.send(np.zeros(SHAPE))

    def train(bridge, grid, part):
        with pytest.raises(ConfigError, match="receives on solver ranks"):
            bridge.receive_weights()
        for wrong in ([1], 3):
            with pytest.raises(ConfigError, match="give a trainer, or a dict of arrays"):
                bridge.send_weights(wrong)
        # rejected calls do not count
        assert [(snapshot.number, len(snapshot.fields)) for snapshot in bridge] == [(0, 1)]
        assert repr(bridge).startswith("Bridge(trainer=Grid(")

    spawn(lambda comm: couple(comm, 1, solve, train, depth=9), 2, timeout=30)

    def demand_difference(says, send, seed=0):
        def refuse(bridge, grid, part):
            with pytest.raises(DataError, match=says):
                bridge.receive()

        spawn(lambda comm: couple(comm, 2, send, refuse, seed=seed), 3, timeout=30)

    def differ(bridge, grid, part):
        bridge.send(np.zeros((*grid.local_shape, 1 + part.rank)))

    demand_difference("rank 0 has sent field 0 as float64 with 1 channels, and rank 1 in another", differ, seed=3)

    for counts in ((1, 2), (2, 1), (1, 1)):

        def send(bridge, grid, part):
            bridge.send(*[np.zeros(grid.local_shape)] * counts[part.rank], step=part.rank)  # noqa: B023

        says = rf"rank 0 has sent {counts[0]} fields with the scalars .* and rank 1 {counts[1]} with .*'step': 1"
        demand_difference(says, send)

    told = Event()

    def wait_in_vain(bridge, grid, part):
        with pytest.raises(CommTimeout, match=r"rank 0 waited 0\.3 s for the other side of the bridge to receive"):
            bridge.send(np.zeros(grid.local_shape))
        told.set()

    def wait_for_error(bridge, grid, part):
        assert told.wait(30)

    spawn(lambda comm: couple(comm, 1, wait_in_vain, wait_for_error, mode="lockstep"), 2, timeout=0.3)


def test_messages_keep_every_kind_of_number():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kinds = ["float64", "float32", "float16", "complex64", "complex128", "int8", "uint16", "int64", "bool",
             ml_dtypes.bfloat16]  # fmt: skip
    arrays = [np.arange(12).reshape(3, 4).astype(kind).T[1:] for kind in kinds] + [np.zeros((0, 3)), np.array(2.5)]
    facts, found = unpack_message(pack_message({"step": 3, "t": 0.5, "name": "u"}, arrays))
    assert facts == {"step": 3, "t": 0.5, "name": "u"}
    for a, b in zip(found, arrays, strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
