"""What nobody trains or reads has no backward: nothing is made, sent, kept or run for it; all else stays the same."""

import itertools
from functools import lru_cache

import numpy as np
import pytest
from models import Same, distributed, make, own_part, part
from present import needs
from threads import on_ranks

from fsdpx import Mesh, nn, optim, spawn
from fsdpx.core.array import blas
from fsdpx.core.program import Slot
from fsdpx.testing import LayerContract, assert_close

TRUNKS = {
    "mlp": ("mlp", ["0.*"]),
    "norms": ("norms", ["0.*", "1.*"]),
    "graph": ("graph", ["up.*"]),
    "gpt": ("gpt", ["embed.position", "blocks.*"]),  # the tied embedding is trained
    "untied": ("untied", ["embed.*", "*blocks.0*"]),
    "bodies": ("untied", ["*attn*"]),
}
PLACES = {
    "one": (1, {}),
    "ddp": (2, {"strategy": "ddp"}),
    "fsdp": (2, {"strategy": "fsdp", "microbatches": 2}),
    "recompute": (2, {"strategy": "fsdp", "recompute": "all"}),
    "reproducible_chunks": (2, {"strategy": "fsdp", "reproducible_chunks": 4}),
    "tensor": (2, {"mesh": Mesh(tensor=2)}),
    "pipe": (2, {"mesh": Mesh(pipe=2), "microbatches": 2}),
    "zero-bubble": (2, {"mesh": Mesh(pipe=2), "microbatches": 2, "schedule": "zb-h1", "recompute": 2}),
    "zbv": (2, {"mesh": Mesh(pipe=2), "microbatches": 4, "schedule": "zbv"}),
}


def gradients(comm, case, frozen, later=False, **options):
    """Of one batch. later: frozen by `freeze`."""
    trainer = make(comm, case, **{"group_bytes": 0, **options}, frozen=() if later else frozen)
    if later:
        trainer.freeze(*frozen)
    batch = own_part(trainer.data_group, case, 8)
    if "reproducible_chunks" in options:  # whole steps only
        trainer.step(*batch)
        return trainer.parameters()
    trainer.accumulate(*batch)
    return trainer.gradients()


@lru_cache
def of_all(case, place):
    """The gradients of a trainer that makes them all."""
    ranks, options = PLACES[place]
    return spawn(lambda comm: gradients(comm, case, [], **options), ranks)[0]


# what is frozen decides for each unit, where it is trained for the program: each of both with several of the other
# `freeze` and `distribute(frozen=...)` run the same program: test_freezing_changes_the_program
WHERE = [
    (trunk, place)
    for (n, trunk), (m, place) in itertools.product(enumerate(TRUNKS), enumerate(PLACES))
    if ((n + m) % 2 == 0 or place == "tensor")
    and (place, trunk) != ("reproducible_chunks", "norms")  # BatchNorm works on whole batches, not on chunks
    and (place != "tensor" or trunk in ("gpt", "untied", "bodies"))  # there is something to cut
]


@pytest.mark.parametrize(("trunk", "place", "later"), [(*both, n % 2 == 0) for n, both in enumerate(WHERE)])
def test_the_others_have_the_same_gradients(trunk, place, later):
    """To the bit: those of a trainer that makes them all."""
    case, frozen = TRUNKS[trunk]
    ranks, options = PLACES[place]
    want = of_all(case, place)
    for got in spawn(lambda comm: gradients(comm, case, frozen, later, **options), ranks):
        moved = [name for name in got if not later or np.any(got[name])]
        assert moved
        if "reproducible_chunks" in options:
            before = spawn(lambda comm: make(comm, case, group_bytes=0, **options).parameters(), ranks)[0]
            moved = [name for name in got if not np.array_equal(got[name], before[name])]
        assert all(np.array_equal(got[name], want[name]) for name in moved)
        assert len(moved) < len(want)


def count_products(monkeypatch, *names):
    """The calls of these products from now on, by name."""
    calls = []
    for name in names:
        run = getattr(blas, name)
        monkeypatch.setattr(blas, name, lambda *a, name=name, run=run: (calls.append(name), run(*a))[1])
    return calls


@pytest.mark.parametrize("how", ["frozen", "freeze", "container"])
@pytest.mark.parametrize("group_bytes", [0, 1 << 20])
@on_ranks(1)
def test_products_of_a_frozen_trunk(comm, monkeypatch, how, group_bytes):
    """Four layers, of which the third one is trained: forward makes 4 products, backward one gradient of an input, of
    the last layer, and one of parameters."""
    names = ["0.*", "1.*", "3.*"]
    widths = itertools.pairwise((6, 7, 6, 7, 6) if group_bytes else (6,) * 5)
    model = nn.Sequential(*(nn.Linear(*ends) for ends in widths), frozen=names if how == "container" else ())
    frozen = names if how == "frozen" else ()
    trainer = distributed(model, comm, precision="float64", group_bytes=group_bytes, frozen=frozen)
    if how == "freeze":
        trainer.freeze(*names)
    calls = count_products(monkeypatch, "linear_forward", "linear_backward_params", "linear_backward")
    trainer.step(np.ones((4, 6)), np.ones((4, 6)))
    assert calls == ["linear_forward"] * 4 + ["linear_backward", "linear_backward_params"]


@on_ranks(2)
def test_freezing_changes_the_program(comm):
    """`freeze` and `distribute(frozen=...)` run the same step; after `unfreeze` it is the first one again."""
    trainer = make(comm, "mlp", "fsdp", group_bytes=0)
    batch = own_part(comm, "mlp", 8)
    first = str(trainer.program)
    trainer.step(*batch)
    trainer.freeze("0.*")
    assert str(trainer.program) == str(make(comm, "mlp", "fsdp", group_bytes=0, frozen=["0.*"]).program) != first
    trainer.step(*batch)
    trainer.freeze("0.*", "2.bias")
    trainer.accumulate(*batch)
    assert not trainer.inspect.engine.state.list_indices_of_filled_slots("saved")
    found = trainer.gradients()
    assert not np.any(found["0.weight"])
    assert not np.any(found["2.bias"])
    assert np.any(found["2.weight"])
    trainer.update()
    trainer.unfreeze("*")
    assert str(trainer.program) == first
    before = trainer.parameters()
    trainer.step(*batch)
    assert all(np.any(trainer.parameters()[name] != before[name]) for name in before)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
@on_ranks(2)
def test_a_model_without_anything_to_train(comm, strategy):
    trainer = make(comm, "untied", strategy, frozen=["*"])
    before = trainer.parameters()
    first, second = (trainer.step(*own_part(comm, "untied", 8)) for _ in range(2))
    assert Slot("part", 0) not in trainer.inspect.engine.state.store
    assert not [a for a in trainer.program.actions if a.op in ("B", "REDUCE", "UPDATE")]
    assert first == second
    assert_close(trainer.parameters(), before)


def test_the_gradient_of_the_inputs_passes_through_what_is_frozen():
    def run(comm, frozen):
        trainer = make(comm, "mlp", "fsdp", group_bytes=0, frozen=frozen)
        return trainer.backward(np.ones_like(trainer.forward(own_part(comm, "mlp", 8)[0])))

    want, got = (spawn(run, 2, frozen) for frozen in ([], ["*"]))
    assert all(np.array_equal(a, b) for a, b in zip(want, got, strict=True))


MODELS = {
    "linear": (lambda first: nn.Sequential(first(4, 5), nn.GELU(), nn.Linear(5, 3)), lambda: nn.Linear, (8, 4)),
    "conv": (lambda conv: nn.Sequential(conv(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)), lambda: nn.Conv2d, (8, 1, 4, 4)),
}


def train(comm, kind, whole=False, **options):
    """whole: the first layer makes the gradient of its input, although nobody reads it."""
    made, first, shape = MODELS[kind]
    slow = type("Whole", (first(),), {"backward_leaf": nn.Layer.backward_leaf})
    trainer = distributed(made(slow if whole else first()), comm, precision="float64", **options)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=shape), rng.normal(size=(shape[0], 3))
    mine = part(comm, 8)
    for _ in range(2):
        trainer.step(x[mine], y[mine])
    return trainer.parameters()


@pytest.mark.parametrize("kind", ["linear", pytest.param("conv", marks=needs("fields"))])
@pytest.mark.parametrize(("frozen", "ranks"), [([], 1), ([], 2), (["0.weight"], 2), (["0.*"], 1)])
def test_the_same_bits(kind, frozen, ranks):
    want = spawn(lambda comm: train(comm, kind, whole=True, frozen=frozen), ranks)[0]
    got = spawn(lambda comm: train(comm, kind, frozen=frozen), ranks)[0]
    assert all(np.array_equal(got[name], want[name]) for name in want)


def test_no_product_for_the_gradient_of_data(monkeypatch):
    """The layer behind makes both gradients in one call, the one at the data that of its parameters only."""
    calls = count_products(monkeypatch, "linear_backward_params", "linear_backward")
    spawn(lambda comm: train(comm, "linear"), 1)
    assert calls[-4:] == ["linear_backward", "linear_backward_params"] * 2  # before them kernels were warmed up


BLOCKS = {
    "block": (lambda: nn.TransformerBlock(8, 2), ["norm1.*"], 3 + 4),
    "mlp": (lambda: nn.TransformerBlock(8, 2), ["attn.*", "norm1.*", "norm2.*"], 1 + 2),
    "out": (lambda: nn.MultiHeadAttention(8, 2), ["qkv.*"], 0 + 1),
    "residual": (lambda: nn.Residual(nn.Linear(8, 8)), [], 0 + 1),
}
"""Whole units at the data: what is frozen in them, and the products of backward: gradients of inputs and of weights."""


@pytest.mark.parametrize("kind", BLOCKS)
def test_units_at_the_data_make_the_gradients_inside_of_them_only(kind, monkeypatch):
    made, frozen, products = BLOCKS[kind]

    def run(comm, leaf):
        layer = made()
        if not leaf:
            monkeypatch.setattr(type(layer), "backward_leaf", nn.Layer.backward_leaf)
        trainer = distributed(layer, comm, precision="float64", frozen=frozen)
        x = np.random.default_rng(0).normal(size=(2, 3, 8))
        calls = count_products(monkeypatch, "gemm", "linear_backward_params", "linear_backward")
        trainer.step(x, x + 1)
        monkeypatch.undo()
        return {"products": len(calls) + calls.count("linear_backward"), **trainer.parameters()}

    want, got = (spawn(run, 1, leaf)[0] for leaf in (False, True))
    assert got.pop("products") == products < want.pop("products")
    assert all(np.array_equal(got[name], want[name]) for name in want)


class Stop(Same):
    """x, without a gradient."""

    def backward_input(self, env, p, saved, dy):
        return None, ()


class Unread(nn.Composite):
    """A unit with a branch that nobody reads."""

    unit = True

    def __init__(self):
        self.inner, self.unread = nn.Linear(6, 6), nn.Linear(6, 3)

    def compose(self, x, z):
        y = self.inner(x)
        self.unread(nn.Tanh()(y))
        return y


class TestUnread(LayerContract):
    def make(self):
        return nn.Graph({"u": (Unread(), "x", "x"), "v": (nn.Tanh(), "u"), "w": (nn.Tanh(), "x")}, outputs="v")

    def inputs(self):
        return self.draw_normal(4, 6)


class Idle(nn.Composite):
    """A unit with a branch that nobody reads, and one without a gradient."""

    unit = True

    def __init__(self):
        self.inner, self.unread, self.held = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 6)
        self.stop = Stop()

    def compose(self, x):
        y = self.inner(x)
        self.unread(nn.Tanh()(y))
        return y + self.stop(self.held(x))


def model_with_idle(idle):
    branch = {"side": (nn.Linear(6, 5), "up"), "end": (nn.Linear(5, 5), "side"), "z": (nn.Linear(6, 2), "x")}
    nodes = {"up": (nn.Linear(6, 6), "x"), **(branch if idle else {})}
    nodes |= {"act": (nn.Tanh(), "up"), "out": (nn.Linear(6, 4), "act")}
    return nn.Graph(nodes, inputs=("x", "w") if idle else ("x",), outputs=("out",))


IDLE = ["side.weight", "side.bias", "end.weight", "end.bias", "z.weight", "z.bias"]


def train_with_idle(comm, idle, **options):
    options = {"optimizer": optim.Adam(lr=1e-2), "precision": "float64", "group_bytes": 0, "seed": 3, **options}
    trainer = distributed(model_with_idle(idle), comm, **options)
    rng, mine = np.random.default_rng(0), part(trainer.data_group, 12)
    x, y = rng.normal(size=(12, 6))[mine], rng.normal(size=(12, 4))[mine]
    begin = trainer.parameters()
    losses = [trainer.step((x, x) if idle else x, y) for _ in range(2)]
    return losses, begin, trainer.parameters()


@lru_cache
def train_without_idle(clip_norm):
    return spawn(lambda comm: train_with_idle(comm, False, clip_norm=clip_norm), 1)[0]


@pytest.mark.filterwarnings("ignore:no gradient reaches")
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (1, {}),
        (2, {"strategy": "ddp"}),
        (3, {"strategy": "fsdp", "microbatches": 2}),
        (2, {"group_bytes": 1 << 20, "clip_norm": 0.1}),
        (2, {"mesh": Mesh(pipe=2), "stages": [3, 3], "microbatches": 3}),
        (3, {"mesh": Mesh(pipe=3), "stages": ["up", "end", "act"], "schedule": "zb-h1", "microbatches": 3}),
        (2, {"recompute": "all"}),
        (2, {"reproducible_chunks": 4}),
    ],
    ids=["alone", "ddp", "fsdp", "one unit", "pipe", "split backward", "recompute", "chunks"],
)
def test_what_nobody_reads_changes_nothing(size, options):
    losses, _, want = train_without_idle(options.get("clip_norm"))
    for got, begin, end in spawn(lambda comm: train_with_idle(comm, True, **options), size):
        np.testing.assert_allclose(got, losses, rtol=1e-11)
        assert sorted(end) == sorted([*want, *IDLE])
        assert_close({name: end[name] for name in want}, want, 1e-11)
        assert all((begin[name] == end[name]).all() for name in IDLE)


@pytest.mark.parametrize("unit", [False, True])
def test_one_note_names_them(unit):
    def run(comm):
        chain = nn.Sequential({"a": nn.Linear(6, 6), "b": Idle() if unit else Stop(), "c": nn.Linear(6, 2)})
        trainer = distributed(chain, comm)
        for _ in range(3):
            trainer.step(np.ones((4, 6)), np.ones((4, 2)))
        trainer.accumulate(np.ones((4, 6)), np.ones((4, 2)))
        return trainer.gradients()

    names = ["b.unread.weight", "b.unread.bias", "b.held.weight", "b.held.bias"] if unit else ["a.weight", "a.bias"]
    with pytest.warns(RuntimeWarning) as seen:
        found = spawn(run, 2)[0]
    (text,) = [str(w.message) for w in seen]
    assert text == (
        f"no gradient reaches {', '.join(names)}: the loss does not depend on them, so they are trained with a "
        "gradient of zero: weight decay and momentum still move them, where PyTorch leaves them alone; leave their "
        "layers out, or freeze them (frozen=[...])"
    )
    assert [name for name, g in found.items() if not g.any()] == names


@on_ranks(2)
def test_frozen_ones_are_not_named(comm):
    chain = nn.Sequential({"a": nn.Linear(6, 6), "b": Stop(), "c": nn.Linear(6, 2)})
    trainer = distributed(chain, comm, frozen=["a.weight"])
    trainer.freeze("a.bias")
    trainer.step(np.ones((4, 6)), np.ones((4, 2)))
