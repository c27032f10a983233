"""NaN and Inf stop a step before anything is updated: in batches, losses and gradients, in every strategy."""

import numpy as np
import pytest
from models import alike, distributed, part
from present import needs
from threads import on_ranks

import fsdpx
from fsdpx import Mesh, Precision, nn, optim, spawn
from fsdpx.errors import DataError, NumericsError
from fsdpx.testing import assert_close

X, Y = (np.random.default_rng(1).standard_normal((8, n)).astype(np.float32) for n in (5, 3))


class Overflow(nn.Layer):
    """The identity, whose gradient is Inf where its input is above 3."""

    def forward(self, env, p, x):
        return x, x > 3

    def backward_input(self, env, p, saved, dy):
        return np.where(saved, dy.dtype.type(np.inf), dy), None


def make(comm, norm=True, **options):
    layers = [nn.Linear(5, 7), *([nn.BatchNorm(7)] if norm else []), nn.Tanh(), nn.Linear(7, 3)]
    options = {"optimizer": optim.AdamW(lr=0.01), "group_bytes": 0, **options}
    return distributed(nn.Sequential(Overflow(), *layers), comm, **options)


def batch(trainer, x=X, y=Y):
    mine = part(trainer.data_group, 8)
    return x[mine], y[mine]


def spoilt(what, value):
    x, y = X.copy(), Y.copy()
    (x if what == "input" else y)[6, 2] = value  # of the last rank
    return x, y


PLACES = {
    "one": (1, {}),
    "ddp": (2, {"strategy": "ddp"}),
    "zero1": (3, {"strategy": "zero1", "microbatches": 2}),
    "zero2": (2, {"strategy": "zero2", "clip_norm": 1.0}),
    "fsdp": (3, {"strategy": "fsdp"}),
    "hybrid": (4, {"mesh": Mesh(replica=2)}),
    "pipe": (2, {"mesh": Mesh(pipe=2), "microbatches": 2, "norm": False}),
    "reproducible_chunks": (2, {"reproducible_chunks": 4, "norm": False}),
    "averaged": (2, {"average": fsdpx.EMA(0.5)}),
    "compressed": (2, {"compression": "int8", "norm": False}),
}


SPOILT = ("input", np.nan), ("target", np.nan), ("target", np.inf)


@pytest.mark.parametrize(
    ("place", "what", "value"),
    [
        *(("pipe", *bad) for bad in SPOILT), *(("fsdp", *bad) for bad in SPOILT),
        *((place, *SPOILT[n % 3]) for n, place in enumerate(PLACES) if place not in ("pipe", "fsdp", "compressed")),
        pytest.param("compressed", *SPOILT[0], marks=needs("compression")),
    ],
)  # fmt: skip
def test_a_step_of_a_bad_batch_changes_nothing(place, what, value):
    """All ranks hear which one has it; training goes on as if it had not been."""
    ranks, options = PLACES[place]

    def run(comm):
        trainer, other = make(comm, **options), make(comm, **options)
        for one in (trainer, other):
            one.step(*batch(one))
        with pytest.raises(NumericsError) as caught:
            trainer.step(*batch(trainer, *spoilt(what, value)))
        assert_close(trainer.parameters(), other.parameters())
        assert trainer.global_step == other.global_step == 1
        if place != "compressed":  # error feedback has seen the batch
            assert trainer.step(*batch(trainer)) == other.step(*batch(other))
            assert_close(trainer.parameters(), other.parameters())
        return str(caught.value)

    with np.errstate(all="ignore"):
        (text,) = {*spawn(run, ranks)}
    assert text.startswith("step 2: the loss is ")
    name = "input 'x'" if what == "input" else "the target"
    assert f"and nothing is updated with it: rank {0 if place == 'pipe' else ranks - 1}: {name} has 1 of" in text


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_gradient_that_is_not_finite_is_named(strategy, clip_norm):
    """The loss is finite. Ranks that do not know the norm look at what they would update with."""
    x = X.copy()
    x[0, 0] = 4.0

    def run(comm):
        first = nn.Sequential(nn.Linear(5, 5), Overflow(), nn.Linear(5, 3))
        trainer = distributed(first, comm, strategy=strategy, clip_norm=clip_norm, group_bytes=1 << 20)
        eye = {"0.weight": np.eye(5, dtype=np.float32), "0.bias": np.zeros(5, np.float32)}
        trainer.load_parameters({**trainer.parameters(), **eye})
        before = trainer.parameters()
        if alone:
            trainer.step(*batch(trainer, x))
            trainer.step(*batch(trainer, x))
        with pytest.raises(NumericsError) as caught:
            trainer.step(*batch(trainer, x))
        assert_close(trainer.parameters(), before)
        return str(caught.value)

    if alone := strategy == "fsdp" and clip_norm is None:  # the rank that has it raises, which ends the job
        with pytest.raises(NumericsError, match=r"the gradient of '0\..*With clip_norm=... all ranks raise before"):
            spawn(run, 2, timeout=20)
        return
    (text,) = {one.split(": rank")[0] for one in spawn(run, 2)}
    what = "the norm of the gradient is inf" if clip_norm else "a gradient is not finite"
    assert text == f"step 1: {what}, and nothing is updated with it"


@on_ranks(1)
def test_a_gradient_of_the_caller_is_looked_at(comm):
    trainer = make(comm)
    before = trainer.parameters()
    trainer.backward(np.full_like(trainer.forward(X), np.nan))
    with pytest.raises(NumericsError, match=r"step 1: a gradient is not finite, and nothing is .*: rank 0"):
        trainer.update()
    after = trainer.parameters()
    assert all(np.array_equal(after[n], before[n]) for n in after if "running" not in n)


def test_accumulate_refuses_and_forgets():
    def run(comm):
        trainer = make(comm)
        trainer.accumulate(*batch(trainer))
        with pytest.raises(NumericsError) as caught:
            trainer.accumulate(*batch(trainer, *spoilt("input", np.nan)))
        assert trainer.inspect.engine.state.gradient_source == ""
        other = make(comm)
        other.accumulate(*batch(other))
        other.zero_grad()
        for one in (trainer, other):
            one.accumulate(*batch(one))
            one.update()
        assert all(np.isfinite(a).all() for a in trainer.parameters().values())
        return str(caught.value)

    (text,) = {*spawn(run, 2)}
    assert text.startswith("step 1: the loss is nan, and nothing is updated with it: rank 1: input 'x' has 1 of")


@needs("asynchronous")
@on_ranks(1)
def test_ranks_at_their_own_speed_push_nothing_of_it(comm):
    trainer = make(comm, norm=False, strategy=fsdpx.AsyncSGD())
    before = trainer.parameters()
    with pytest.raises(NumericsError, match=r"step 1: the loss is nan, and nothing is .*: rank 0: input"):
        trainer.step(*spoilt("input", np.nan))
    assert_close(trainer.parameters(), before)
    assert np.isfinite(trainer.step(X, Y))


def test_a_step_that_is_skipped_leaves_running_statistics_alone():
    def run(comm):
        trainer = make(comm, precision=Precision(loss_scale="dynamic"))
        trainer.step(*batch(trainer))
        before = trainer.parameters()
        trainer.step(*batch(trainer, *spoilt("input", np.inf)))
        assert trainer.inspect.last_update.skipped
        assert_close(trainer.parameters(), before)

    with pytest.warns(RuntimeWarning, match="the loss of step 2 is nan, and the update was skipped: distribute"):
        spawn(run, 2)


def test_evaluation_gives_what_it_finds():
    assert np.isnan(spawn(lambda comm: make(comm).evaluate(*spoilt("input", np.nan)), 1)).all()


@needs("fields")
@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_nothing_is_relative_to_a_target_of_zeros(call):
    y = Y.copy()
    y[6] = 0

    def act(comm, **options):
        trainer = distributed(nn.Linear(5, 3), comm, loss=nn.RelativeL2(**options))
        return getattr(trainer, call)(*batch(trainer, X, y))

    assert alike(2, act).startswith(
        "DataError: rank 1: RelativeL2(): all of the target of sample 2 is 0, so no error is relative to it: give eps="
    )
    assert np.isfinite(spawn(lambda comm: act(comm, eps=1e-3), 2)).all()
    y[6] = [0, np.nan, 0]
    with pytest.raises(DataError, match="all of the target of sample 6 is 0"):
        spawn(lambda comm: act(comm, skipna=True), 1)
    y[6] = np.nan  # counts nothing
    assert np.isfinite(spawn(lambda comm: act(comm, skipna=True), 1)).all()
