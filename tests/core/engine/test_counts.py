"""Every parameter counts its own updates: frozen for a while, it goes on where `torch.optim` would."""

import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from itertools import pairwise

import numpy as np
import pytest
from bits import Bits
from models import distributed, part
from present import needs
from ranks import from_rank_0
from threads import on_ranks

import fsdpx
from fsdpx import Mesh, nn, optim, spawn
from fsdpx.errors import CheckpointError
from fsdpx.optim import ShardSegment, ShardSegments
from fsdpx.optim.optimizer import make_zero_slots
from fsdpx.testing import assert_close

WIDTHS = (6, 9, 7, 3)
X, Y = (np.random.default_rng(2).standard_normal((12, n)) for n in (WIDTHS[0], WIDTHS[-1]))
NAMES = [f"{i}.{kind}" for i in (0, 2, 4) for kind in ("weight", "bias")]


@dataclass(frozen=True)
class OwnAdam:
    """Adam as a user writes it, element by element: it knows nothing of other parameters."""

    lr: float = 0.02
    slots = ("mean", "square")

    def update(self, xp, p, g, slots, *, lr, step, segments, scale=1.0):
        slots["mean"] += (g * scale - slots["mean"]) * 0.1
        slots["square"] += ((g * scale) ** 2 - slots["square"]) * 0.05
        p -= lr * (slots["mean"] / (1 - 0.9**step)) / (xp.sqrt(slots["square"] / (1 - 0.95**step)) + 1e-6)


OPTIMIZERS = {
    "adam": optim.Adam(lr=0.02, weight_decay=0.1),
    "adamw": optim.AdamW(lr=optim.schedules.Linear(0.03, 9, 0.01), weight_decay=0.2, groups=optim.no_decay),
    "lamb": optim.LAMB(lr=0.05),
    "muon": optim.Muon(lr=0.03),
    "lion": optim.Lion(lr=0.01),
    "sgd": optim.SGD(lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "own": OwnAdam(),
}


def schedule(seed):
    """What is frozen in each step: something from the start, then anything."""
    rng = np.random.default_rng(seed)
    chosen = [["0.*", "4.bias"], ["2.weight"], ["*"], ["*.bias"], [], ["0.weight", "2.bias", "4.weight"]]
    return [chosen[0]] * 2 + [chosen[int(rng.integers(len(chosen)))] for _ in range(4)]


def make(comm, name, **options):
    first, second, last = (nn.Linear(*ends) for ends in pairwise(WIDTHS))
    model = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last)
    return distributed(model, comm, **{"optimizer": OPTIMIZERS[name], "precision": "float64", "seed": 3, **options})


def step(trainer, steps=1):
    mine = part(trainer.data_group, 12)
    for _ in range(steps):
        trainer.step(X[mine], Y[mine])


def train(trainer, frozen):
    for patterns in frozen:
        trainer.unfreeze("*")
        if patterns:
            trainer.freeze(*patterns)
        step(trainer)
    return trainer.parameters()


def gradients(p):
    """Of the mean squared error, by hand."""
    values = [X]
    for i in (0, 2, 4):
        z = values[-1] @ p[f"{i}.weight"].T + p[f"{i}.bias"]
        values.append(z if i == 4 else np.tanh(z))
    d, found = 2 * (values[-1] - Y) / Y.size, {}
    for i, (x, y) in zip((4, 2, 0), zip(values[2::-1], values[:0:-1], strict=True), strict=True):
        d = d if i == 4 else d * (1 - y * y)
        found |= {f"{i}.weight": d.T @ x, f"{i}.bias": d.sum(axis=0)}
        d = d @ p[f"{i}.weight"]
    return found


@lru_cache
def initial():
    return spawn(lambda comm: make(comm, "sgd").parameters(), 1)[0]


def matching(patterns):
    return {name for name in NAMES if any(fnmatchcase(name, pattern) for pattern in patterns)}


@lru_cache
def one_by_one(name, seed):
    """What PyTorch does: each parameter has a state and a count of its own, and no update while it is frozen. The rule
    of one whole parameter is that of the optimizer, which `tests/optim` compares with `torch.optim`."""
    optimizer, p = OPTIMIZERS[name], {n: a.copy() for n, a in initial().items()}
    whole = {n: ShardSegments((ShardSegment(n, 0, a.size, 0, a.size, a.shape),)) for n, a in p.items()}
    slots = {n: make_zero_slots(np, optimizer, whole[n], np.dtype("float64")) for n in p}
    counts = dict.fromkeys(p, 0)
    for step, frozen in enumerate(schedule(seed), 1):
        found = gradients(p)
        for n in p.keys() - matching(frozen):
            counts[n] += 1
            optimizer.update(
                np, p[n].reshape(-1), np.ascontiguousarray(found[n]).reshape(-1), slots[n],
                lr=optim.get_learning_rate(optimizer, step), step=counts[n], segments=whole[n],
            )  # fmt: skip
    return p


def compare(name, seed, ranks, **options):
    """On each rank the parameters are those of `one_by_one`."""
    found = spawn(lambda comm: train(make(comm, name, **options), schedule(seed)), ranks)
    assert_close(found, [one_by_one(name, seed)] * ranks, tolerance=1e-9)


PLACES = {
    "one": (1, {}),
    "ddp": (3, {"strategy": "ddp"}),
    "zero1": (2, {"strategy": "zero1"}),
    "zero2": (5, {"strategy": "zero2", "group_bytes": 0}),
    "fsdp": (3, {"strategy": "fsdp"}),
    "hybrid": (4, {"strategy": "hybrid", "mesh": Mesh(replica=2)}),
    "reproducible_chunks": (3, {"reproducible_chunks": 12}),
    "pipe": (2, {"mesh": Mesh(pipe=2), "microbatches": 2}),
    "clipped": (2, {"clip_norm": 1e6}),
    "averaged": (2, {"average": fsdpx.EMA(0.5)}),
}


def updating(at, place):
    """Return the optimizers whose rules differ where ranks have parts of parameters, in turns half of them elsewhere,
    and in turns one of the others, which update elements in the same way."""
    others, apart = ("adam", "lion", "sgd"), ("adamw", "lamb", "own", "muon")
    return [others[at % 3], *(apart if place in ("zero1", "zero2", "fsdp", "hybrid") else apart[at % 2 :: 2])]


@pytest.mark.parametrize(
    ("place", "name"), [(place, name) for at, place in enumerate(PLACES) for name in updating(at, place)]
)
def test_parameters_that_were_frozen_go_on_by_their_own_count(place, name):
    ranks, options = PLACES[place]
    compare(name, len(place), ranks, **options)


@pytest.mark.parametrize("name", ["adamw", "lamb", "own"])
def test_the_tensor_axis_does_not_change_it(name):
    plan = {"0": nn.sharding.ColumnParallel, "2": nn.sharding.RowParallel}
    compare(name, 1, 2, mesh=Mesh(tensor=2), tensor_plan=plan)


@needs("offload")
@pytest.mark.parametrize("name", ["adamw", "lamb", "muon"])
def test_state_on_disk_does_not_change_it(name, tmp_path):
    compare(name, 1, 2, offload=fsdpx.OffloadConfig(tmp_path, what="optimizer"), group_bytes=0)


@pytest.mark.parametrize(
    ("name", "there", "here"), [("adamw", 3, 2), ("lamb", 1, 3), ("muon", 3, 2), ("own", 1, 3), ("muon", 1, 3)]
)
def test_checkpoints_keep_the_counts(name, there, here, tmp_path):
    """At another number of ranks and strategy, saved while parameters are frozen."""
    frozen = schedule(4)

    def save(comm):
        trainer = make(comm, name, strategy="zero1")
        train(trainer, frozen[:3])
        trainer.save(tmp_path / "a")

    def load(comm):
        trainer = make(comm, name, group_bytes=0)
        trainer.freeze("2.*")  # what a checkpoint says replaces what was counted here
        trainer.load(tmp_path / "a")
        return train(trainer, frozen[3:])

    spawn(save, there)
    assert_close(spawn(load, here), [one_by_one(name, 4)] * here, tolerance=1e-9)


@on_ranks(1)
def test_a_checkpoint_says_nothing_of_counts_that_are_equal(comm, tmp_path):
    """So those that were written before counts were kept still load, and each parameter has the count of all steps."""
    trainer = make(comm, "adamw")
    train(trainer, [[]] * 2)
    trainer.save(tmp_path / "a")
    again = make(comm, "adamw")
    again.load(tmp_path / "a")
    assert_close(train(trainer, [[]] * 2), train(again, [[]] * 2))
    assert b"missed" not in (tmp_path / "a" / "state.safetensors").read_bytes()


@pytest.mark.parametrize("missed", [{"0.weight": 3}, {"0.weight": -1}, {"0.weight": 1.0}, ["0.weight"]])
def test_counts_that_cannot_be_are_refused(missed):
    from fsdpx.core.checkpoint.scalars import CheckpointScalars

    good = CheckpointScalars(2, 0, 0, 1.0, 0, False, (), "SGD", missed={"0.weight": 2})
    assert CheckpointScalars.from_json(good.to_json(), "here") == good
    with pytest.raises(CheckpointError, match="here: this state cannot be read"):
        CheckpointScalars.from_json(good.to_json().replace('{"0.weight":2}', json.dumps(missed)), "here")


def test_bits_with_chunks_and_16_bit_state_do_not_depend_on_ranks():
    def run(comm):
        return Bits(train(make(comm, "adamw", precision="bf16-true", reproducible_chunks=12), schedule(2)))

    assert spawn(run, 1)[0] == spawn(run, 3)[0]


def move_after(trainer, frozen, steps):
    """How far each element of a parameter goes in some steps after others, in which it was frozen."""
    trainer.freeze("0.weight")
    step(trainer, frozen)
    before = trainer.parameters()["0.weight"]
    trainer.unfreeze("0.weight")
    step(trainer, steps)
    return np.abs(trainer.parameters()["0.weight"] - before)


@on_ranks(2)
def test_the_first_update_of_16_bit_state_is_a_full_one(comm):
    """Adam moves every element by the learning rate in the first update, however late that is."""
    moved = move_after(make(comm, "adam", precision="bf16-true"), 10, 1)
    assert abs(moved.mean() / 0.02 - 1) < 0.05


@needs("asynchronous")
@pytest.mark.parametrize("name", ["adamw", "own"])
def test_ranks_at_their_own_speed_count_as_well(name, tmp_path):
    """With staleness 0 they do what all do together, also after a checkpoint."""

    def run(comm):
        trainer = make(comm, name, strategy=fsdpx.AsyncSGD(staleness=0))
        train(trainer, schedule(3)[:3])
        trainer.save(tmp_path / "a")
        again = make(comm, name, strategy=fsdpx.AsyncSGD(staleness=0))
        again.load(tmp_path / "a")
        return train(again, schedule(3)[3:])

    assert_close(spawn(run, 2), [one_by_one(name, 3)] * 2, tolerance=1e-9)


@needs("asynchronous")
@pytest.mark.parametrize("rounds", [0, 2])
@on_ranks(2)
def test_an_outer_step_counts_rounds(comm, rounds):
    """A parameter that was frozen for two rounds of two steps is moved by as much as in the first round of another."""
    strategy = fsdpx.LocalSGD(sync_every=2, outer_optimizer=optim.Adam(lr=0.01))
    np.testing.assert_allclose(move_after(make(comm, "sgd", strategy=strategy), 2 * rounds, 2), 0.01, rtol=1e-3)


def by_torch(name, seed):
    torch = pytest.importorskip("torch")
    kinds = {
        "adam": partial(torch.optim.Adam, lr=0.02, weight_decay=0.1),
        "adamw": partial(torch.optim.AdamW, lr=0.02, weight_decay=0.2),
        "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    }
    first, second, last = (torch.nn.Linear(*ends) for ends in pairwise(WIDTHS))
    theirs = torch.nn.Sequential(first, torch.nn.Tanh(), second, torch.nn.Tanh(), last).double()
    theirs.load_state_dict({n: torch.tensor(one) for n, one in initial().items()})
    optimizer = kinds[name](theirs.parameters())
    for frozen in schedule(seed):
        still = matching(frozen)
        for n, one in theirs.named_parameters():
            one.requires_grad_(n not in still)
        optimizer.zero_grad()
        if len(still) < len(NAMES):
            torch.nn.functional.mse_loss(theirs(torch.tensor(X)), torch.tensor(Y)).backward()
        optimizer.step()
    return {n: one.detach().numpy() for n, one in theirs.named_parameters()}


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
@pytest.mark.parametrize("seed", range(4))
def test_schedules_of_freezing_do_as_torch(name, seed, monkeypatch):
    if name == "adamw":
        monkeypatch.setitem(OPTIMIZERS, name, optim.AdamW(lr=0.02, weight_decay=0.2))
    found = spawn(lambda comm: train(make(comm, name), schedule(seed)), 2)
    assert_close(found, [by_torch(name, seed)] * 2, tolerance=1e-9)


@pytest.mark.world
@pytest.mark.mpi
@pytest.mark.parametrize("name", ["adamw", "lamb", "muon"])
def test_processes_count_as_one(world, name):
    with make(world, name, group_bytes=0, reproducible_chunks=12) as trainer:
        found = train(trainer, schedule(1))
    assert_close(found, from_rank_0(world, one_by_one, name, 1), tolerance=1e-9)
