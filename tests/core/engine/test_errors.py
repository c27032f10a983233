"""Bad input gets a clear error, on all ranks alike, before anyone hangs; afterwards a trainer goes on."""

import itertools

import numpy as np
import pytest
from bits import bits
from models import CASES, STRATEGIES, Same, alike, distributed, make, mlp, own_part
from threads import on_ranks

import fsdpx
from fsdpx import FakeCommunicator, Mesh, Precision, Sharding, nn, optim, spawn
from fsdpx.core.engine.operations import OPERATIONS
from fsdpx.core.program import VERBS
from fsdpx.errors import CheckpointError, ConfigError, DataError, NumericsError, ShapeError
from fsdpx.testing import find_difference


def step(comm, *layers, rows=2, width=4, out=4, **options):
    """One of a new trainer, with a batch of ones."""
    distributed(nn.Sequential(*layers), comm, **options).step(np.ones((rows, width)), np.ones((rows, out)))


def test_parts_that_differ_in_features():
    widths = 12, 13, 12
    text = alike(3, lambda comm: step(comm, nn.ReLU(), nn.Tanh(), width=widths[comm.rank], out=widths[comm.rank]))
    assert text.startswith("DataError: the parts of the global batch differ in more than the number of samples")
    assert "rank 0 has float32[12], float32[12]" in text
    assert "rank 1 has float32[13], float32[13]" in text


def test_a_layer_that_does_not_fit():
    text = alike(2, lambda comm: step(comm, nn.Linear(4, 8), nn.Linear(9, 2), out=2))
    assert text.startswith("ShapeError")
    assert "'1'" in text
    assert "Linear(9, 2)" in text
    assert "'0'" in text


@pytest.mark.parametrize(
    ("case", "spoilt", "at", "value", "error", "text"),
    [
        ("gpt", 1, (1, 4), 31, "DataError", "label 31 at position (1, 4) is out of range: it must be from 0 to 30"),
        ("mlp", 0, (1, 3), np.nan, "NumericsError",
         "input 'x' has 1 of 24 elements NaN or Inf, the first is nan at flat index 15"),
    ],
    ids=["label", "nan"],
)  # fmt: skip
def test_only_one_rank_has_a_bad_batch(case, spoilt, at, value, error, text):
    def act(comm):
        batch = CASES[case].batch(np.random.default_rng(0), 2)
        if comm.rank == 2:
            batch[spoilt][at] = value
        make(comm, case, check_finite=case == "mlp").step(*batch)

    said = alike(3, act)
    assert said.startswith(f"{error}: rank 2: ")
    assert text in said


class PoisonForward(Same):
    """Turns outputs into NaN on rank 1."""

    def forward(self, env, p, x):
        return x * (np.nan if env.mesh.world.rank == 1 else 1), ()


class PoisonBackward(Same):
    """Turns gradients into NaN on rank 1."""

    def backward_input(self, env, p, saved, dy):
        return dy * (np.nan if env.mesh.world.rank == 1 else 1), ()


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (PoisonForward(), "the output of layer '1' in unit '1"),
        (PoisonBackward(), "the gradient of '0.weight' in unit '0'"),
    ],
)
def test_nan_inside_names_rank_unit_and_parameter(layer, text):
    layers = nn.Linear(4, 4), layer, nn.Linear(4, 4)
    with pytest.raises(NumericsError, match=f"^rank 1: .*{text}") as caught:
        spawn(lambda comm: step(comm, *layers, check_finite=True, group_bytes=0), 2, timeout=20)
    assert any("in action" in note for note in caught.value.__notes__)


def test_overflow_in_16_bits_is_named_with_its_unit_and_layer():
    def run(comm):
        model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.GELU())
        trainer = distributed(model, comm, check_finite=True, precision=Precision("fp16"))
        weights = {name: np.zeros_like(value) for name, value in trainer.parameters().items()}
        weights |= {"0.weight": np.full((4, 4), 300.0), "2.weight": np.full((4, 4), 30.0)}
        trainer.load_parameters(weights)
        trainer.step(np.ones((2, 4)), np.ones((2, 4)))

    text = r"the output of layer '2' in unit '0..3' has 8 of 8 elements.*, the first is inf at flat index 0"
    with pytest.raises(NumericsError, match=text):
        spawn(run, 2, timeout=20)


ADAMW_OF_PYTORCH = type("AdamW", (), {"__module__": "torch.optim.adamw"})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"strategy": "zero4"}, "unknown strategy 'zero4': choose one of ddp, zero1"),
        ({"strategy": 3}, "strategy is int: pass a name"),
        ({"precision": "fp8"}, "unknown precision 'fp8': choose one of float64"),
        ({"device": "tpu"}, "unknown device 'tpu': choose one of cpu"),
        ({"microbatches": 0}, "microbatches=0: a whole number, 1 or more"),
        ({"clip_norm": 0.0}, "clip_norm=0.0: a positive number"),
        ({"group_bytes": -1}, "group_bytes=-1"),
        ({"compression": "zip"}, "unknown codec 'zip': choose one of plain"),
        ({"frozen": ("*.wight",)}, "frozen: '*.wight' matches no parameter"),
        ({"mesh": Mesh(shard=3)}, "needs 3 ranks, but the world has 2"),
        ({"mesh": Mesh(shard=1, tensor=2)}, "a tensor axis of 2 ranks has nothing to cut in Sequential"),
        ({"strategy": "ddp", "mesh": Mesh(shard=2)}, "strategy 'ddp' wants a shard axis of width 1"),
        ({"strategy": Sharding(replica=3, shard=1)}, "replica 3 x shard 1 = 3, but 2 ranks"),
        ({"reproducible_chunks": 0}, "reproducible_chunks=0: a positive number"),
        ({"reproducible_chunks": 4, "microbatches": 2}, "each chunk is a microbatch, give only one of them"),
        ({"sequence": "ring"}, "sequence='ring': there is no tensor axis; say mesh=fsdpx.Mesh(tensor=2, ...)"),
        (
            {"tensor_plan": {"0": nn.sharding.ColumnParallel}},
            "tensor_plan={'0': <class 'fsdpx.nn.shard_specs.ColumnParallel'>}: there is no tensor axis",
        ),
        ({"stages": ["0", "2"]}, "stages=['0', '2']: there is no pipe axis"),
        (
            {"stages": [1, 1], "costs": {"*": 1.0}, "mesh": Mesh()},
            "stages and costs: stages sets how the model is split, but costs computes the split; give only one",
        ),
        ({"recompute": "some"}, "recompute='some': choose 'all', 'attention', a number k"),
        ({"recompute": 0}, "recompute=0: choose"),
        ({"optimizer": optim.AdamW}, "an object is needed, AdamW(...)"),
        ({"optimizer": "adamw"}, "optimizer='adamw': an object is needed, optim.AdamW(lr=...)"),
        ({"optimizer": lambda p: p}, "an object is needed, one of fsdpx.nn or fsdpx.optim"),
        ({"optimizer": "adam_v"}, "an object is needed, one of fsdpx.nn or fsdpx.optim"),
        ({"mesh": "pipe=2"}, "mesh='pipe=2': fsdpx.Mesh(...) is needed, such as fsdpx.Mesh.parse('pipe=2')"),
        ({"clip_norm": "1"}, "clip_norm='1': a positive number"),
        ({"seed": 1.5}, "seed=1.5: a whole number"),
        ({"seed": None}, "seed=None: a whole number"),
        ({"group_bytes": "1XB"}, "group_bytes='1XB': a number of bytes is needed, such as 1048576, '1MiB' or '2GB'"),
        ({"microbatches": True}, "microbatches=True"),
        ({"microbatches": 2.0}, "microbatches=2.0: a whole number, 1 or more"),
        ({"recompute": True}, "recompute=True: choose 'all', 'attention', a number k"),
        ({"recompute": 1.0}, "recompute=1.0: choose 'all', 'attention', a number k"),
        ({"check_finite": "False"}, "check_finite='False': True or False"),
        ({"check_finite": None}, "check_finite=None: True or False"),
        ({"check": 1}, "check=1: True, False, or None"),
        ({"tune": "no"}, "tune='no': True, False, or None"),
        ({"progress": "thread"}, "distribute(progress=...): no such option"),
        ({"frozen": 5}, "frozen=5: a list of name patterns is needed"),
        ({"frozen": None}, "frozen=None: a list of name patterns is needed"),
        ({"frozen": ["0.*", 5]}, "frozen=['0.*', 5]: a list of name patterns is needed"),
        ({"compression": 3}, "compression=3 is no Codec"),
        ({"mesh": 4}, "mesh=4: fsdpx.Mesh(...) is needed"),
        ({"frozen": "0.*"}, "a list of name patterns is needed, ['0.*']"),
        ({"precision": []}, "unknown precision []"),
        ({"reproducible_chunks": 2, "compression": "bf16"}, "reproducible_chunks=2: codec Cast16 rounds gradients"),
        ({"loss": "cross_entropy"}, "loss='cross_entropy': an object is needed, nn.CrossEntropyLoss()"),
        ({"loss": mlp}, "an object is needed; the page custom-layer of the documentation shows how to write one"),
        ({"loss": mlp}, "wrap a function of PyTorch in a torch.nn.Module with forward(output, target)"),
        ({"optimizer": ADAMW_OF_PYTORCH}, "ConfigError: torch.optim.AdamW: use fsdpx.optim.AdamW("),
    ],
)
def test_options_that_cannot_work(options, text):
    said = alike(2, lambda comm: make(comm, "mlp", **options))
    assert said.startswith(("ConfigError", "MeshError"))
    assert text in said


def test_unknown_backend():
    fsdpx.finalize()  # other tests may have left one open
    with pytest.raises(ConfigError, match="unknown backend 'smoke'"):
        mlp().as_distributed(loss=nn.MSELoss(), optimizer=optim.SGD(lr=1), backend="smoke")
    assert not fsdpx.is_initialized()


@pytest.mark.parametrize(
    ("x", "y", "text"),
    [
        (np.ones((3, 12)), np.ones((2, 5)), "the target has 2 samples, the inputs have 3"),
        (np.float64(1.0), np.ones((2, 5)), "input 'x' is a single number"),
        (np.array(["a"]), np.ones((1, 5)), "input 'x' of dtype <U1 cannot be trained on"),
        (np.ones((1, 12)), np.array(["a"]), "the target of dtype <U1 cannot be trained on"),
        (np.ones((1, 12)), np.ones((1, 5), complex), "the target of dtype complex128 cannot be trained on"),
        ((np.ones((3, 12)),) * 2, np.ones((3, 5)), None),
        ({"z": np.ones((3, 12))}, np.ones((3, 5)), "the model's inputs are x, the batch has z"),
        (np.ones((3, 12)), np.ones((3, 4)), "(3, 4)"),
    ],
)
def test_batches_that_cannot_be_used(x, y, text):
    said = alike(2, lambda comm: make(comm, "mlp").step(x, y))
    assert said.startswith(("DataError: rank 0:", "ShapeError: rank 0:"))
    assert text is None or text in said


def test_calls_out_of_order():
    trainer = make(FakeCommunicator(), "mlp")
    with pytest.raises(ConfigError, match="backward: call forward first"):
        trainer.backward(np.ones((2, 5)))
    with pytest.raises(ConfigError, match="update: there are no gradients"):
        trainer.update()
    with pytest.raises(ConfigError, match="gradients: there are none"):
        trainer.gradients()


def test_load_parameters_names_what_is_wrong():
    trainer = make(FakeCommunicator(), "mlp")
    good = trainer.parameters()
    with pytest.raises(CheckpointError, match=r"^load_parameters: missing: 0\.bias"):
        trainer.load_parameters({k: v for k, v in good.items() if k != "0.bias"})
    with pytest.raises(CheckpointError, match="not in the model: extra"):
        trainer.load_parameters({**good, "extra": np.ones(1)})
    with pytest.raises(CheckpointError, match=r"of the wrong shape: 0\.bias is \(3,\) instead of \(40,\)"):
        trainer.load_parameters({**good, "0.bias": np.ones(3)})


def test_an_error_inside_a_layer_names_layer_action_and_rank():
    class Broken(Same):
        def forward(self, env, p, x):
            if getattr(env.xp, "holds_no_data", False) or env.mesh.world.rank == 0:
                return x, ()
            raise RuntimeError("out of coffee")

    with pytest.raises(RuntimeError, match="out of coffee") as caught:
        spawn(lambda comm: step(comm, nn.Linear(4, 4), Broken()), 2, timeout=20)
    notes = "\n".join(caught.value.__notes__)
    assert "in forward of layer '1'" in notes
    assert "on rank 1, in action F0.0 (unit '0..1')" in notes


FORWARDS = {"no pair": lambda x: 2.0 * x, "nothing": lambda x: None, "no result": lambda x: (None, ())}


class Twice(nn.Layer):
    """2 x, in one of several wrong ways."""

    def __init__(self, way):
        self.way = way

    def forward(self, env, p, x):
        if self.way == "an array of numpy":
            return np.stack([x, x]).sum(axis=0), ()
        if self.way in FORWARDS:
            return FORWARDS[self.way](x)
        return x * (np.float64(2) if self.way == "a number of numpy" else 2.0), ()

    def backward_input(self, env, p, saved, dy):
        if self.way == "no pair in backward":
            return dy
        return dy * (np.float64(2) if self.way == "a number of numpy in backward" else 2.0), ()


NO_PAIR = "does not fit: forward gives an array, not (result, saved). It got (2, 4) float32 from layer"
IN_64_BITS = "returns float64 where the model computes in float32: make constants Python floats"


@pytest.mark.parametrize(
    ("way", "path", "error", "text"),
    [
        ("an array of numpy", "1", "ConfigError", "calls numpy itself: use env.xp"),
        ("an array of numpy", "1.body.1", "ConfigError", "calls numpy itself: use env.xp"),
        ("a number of numpy", "1", "ConfigError", IN_64_BITS),
        ("a number of numpy", "1.body.1", "ConfigError", IN_64_BITS),
        ("no pair", "1", "ShapeError", NO_PAIR),
        ("nothing", "1", "ShapeError", "does not fit: forward gives None, not (result, saved). It got"),
        ("no result", "1", "ConfigError", "returns NoneType where an array is needed"),
    ],
)
def test_a_layer_at_fault_is_named_and_not_its_neighbor(way, path, error, text):
    layer = Twice(way) if path == "1" else nn.Residual(nn.Sequential(nn.Linear(4, 4), Twice(way)))
    said = alike(2, lambda comm: step(comm, nn.Linear(4, 4), layer, nn.LayerNorm(4)))
    assert said.startswith(f"{error}: rank 0: layer '{path}' Twice({way!r}) {text}")


PIPE = {"mesh": Mesh(pipe=2), "schedule": "zb-h1", "stages": [2, 1]}


@pytest.mark.parametrize("options", [{}, PIPE], ids=["ddp", "zb-h1"])
@pytest.mark.parametrize(
    ("way", "error", "text"),
    [
        ("no pair in backward", ShapeError, r"backward_input gives an array, not \(dx, kept\)"),
        ("a number of numpy in backward", ConfigError, r"Twice\(.*\): backward returns float64 for a dy of float32"),
    ],
)
def test_a_layer_whose_backward_gives_something_else_is_named(way, error, text, options):
    with pytest.raises(error, match=text) as caught:
        spawn(lambda comm: step(comm, nn.Linear(4, 4), Twice(way), nn.LayerNorm(4), rows=8, **options), 2, timeout=20)
    assert "layer '1' Twice" in f"{caught.value}{getattr(caught.value, '__notes__', '')}"


@pytest.mark.parametrize(
    ("change", "found"), [(lambda dy: dy.astype(np.float64), "float64[2, 4]"), (lambda dy: None, "NoneType")]
)
def test_a_loss_whose_gradient_has_another_format_is_named(change, found):
    class Wide(nn.MSELoss):
        def backward(self, env, saved, seed):
            return change(super().backward(env, saved, seed))

    assert alike(1, lambda comm: step(comm, nn.Linear(4, 4), loss=Wide())) == (
        f"ConfigError: Wide(): backward returns {found} for an output of float32[2, 4]; "
        "nn.Loss: the gradient has the shape and dtype of y"
    )


def test_shape_error_is_a_value_error():
    assert issubclass(ShapeError, ValueError)
    assert issubclass(DataError, ValueError)


def test_a_model_that_is_no_layer():
    with pytest.raises(ConfigError, match=r"a layer such as nn\.Sequential"):
        fsdpx.distribute([nn.Linear(2, 2)], loss=nn.MSELoss(), optimizer=optim.SGD(lr=1))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", lambda r: r),
        ("clip_norm", lambda r: 1.0 + r),
        ("optimizer", lambda r: optim.SGD(lr=1.0 + r)),
        ("strategy", lambda r: ("ddp", "fsdp", "fsdp")[r]),  # is named, and not the meshes
    ],
)
def test_ranks_that_ask_for_different_things(name, value):
    text = alike(3, lambda comm: make(comm, "mlp", **{name: value(comm.rank)}))
    what = name if name in ("optimizer", "strategy") else "options"
    assert text.startswith(f"ConfigError: ranks differ in {what}: rank 0 has ")
    assert "rank 1 has" in text


def test_loaders_of_different_length_are_named():
    batch = CASES["mlp"].batch(np.random.default_rng(0), 2)
    text = alike(2, lambda comm: make(comm, "mlp").fit([batch] * (2 + comm.rank), progress=False))
    assert "rank 0 has no batch: its loader has come to its end" in text


def test_fit_without_batches_ends():
    def text(loader):
        return alike(1, lambda comm: make(comm, "mlp").fit(loader, epochs=10**9, progress=False))

    assert text([]).endswith("fit: the loader gives no batch in epoch 1")
    once = "; a generator or iterator serves one epoch only"
    assert text(iter([])).endswith(f"fit: the loader gives no batch in epoch 1{once}")
    batch = CASES["mlp"].batch(np.random.default_rng(0), 2)
    assert text(batch for _ in range(2)).endswith(f"fit: the loader gives no batch in epoch 2{once}")
    assert "fit(steps=0): a whole number, at least 1" in alike(1, lambda comm: make(comm, "mlp").fit([], steps=0))


def test_calls_that_cannot_be_mixed():
    def run(comm, act):
        trainer = make(comm, "mlp", reproducible_chunks=2 if act == "chunks" else None)
        x, y = CASES["mlp"].batch(np.random.default_rng(0), 4)
        if act == "step":
            with trainer.no_sync():
                trainer.step(x, y)
        if act == "mix":
            trainer.accumulate(x, y)
            trainer.backward(np.ones_like(trainer.forward(x)))
        trainer.forward(x)
        trainer.backward(np.ones((4, 3)))

    assert "step inside no_sync" in alike(1, lambda c: run(c, "step"))
    assert "use one of them; call update between, or zero_grad where" in alike(1, lambda c: run(c, "mix"))
    assert "forward: with chunks the engine cuts the batch itself" in alike(1, lambda c: run(c, "chunks"))
    assert "dy has shape (4, 3), the output of forward has (4, 5)" in alike(1, lambda c: run(c, "shape"))


@pytest.mark.parametrize("dy", [None, 3.0, np.ones((2, 3)), (np.ones((2, 3)),), [np.ones((2, 3))] * 3])
def test_gradients_that_are_not_those_of_all_outputs(dy):
    def act(comm):
        two = {"a": (nn.Linear(4, 3), "x"), "b": (nn.Linear(4, 2), "x")}
        trainer = distributed(nn.Graph(two, inputs=("x",), outputs=("a", "b")), comm, loss=None)
        trainer.forward(np.ones((2, 4)))
        trainer.backward(dy)

    assert alike(1, act) == "DataError: backward: the model has 2 outputs: dy must be a tuple of as many arrays"


@pytest.mark.parametrize(
    "call", [lambda t: t.freeze("0.*"), lambda t: t.generate([1], 2), lambda t: t.update()], ids=["fr", "gen", "up"]
)
def test_a_closed_trainer_says_so(call):
    trainer = distributed(nn.GPT(9, 8, 1, 2, 4), loss=nn.CrossEntropyLoss())
    trainer.accumulate(np.ones((1, 4), int), np.ones((1, 4), int))
    trainer.close()
    with pytest.raises(ConfigError, match=r"^(freeze|generate|update): this trainer is closed$"):
        call(trainer)


def test_arguments_that_differ_between_ranks_are_told():
    def made(comm):
        return distributed(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)), comm)

    text = alike(2, lambda comm: made(comm).forward(np.ones((2, 4)), training=comm.rank == 0))
    assert text.endswith("rank 0 has float32[4]; rank 1 has float32[4], training=False")
    text = alike(2, lambda comm: made(comm).parameters(names=[["0.bias"], ["0.weight"]][comm.rank]))
    assert "rank 0: parameters(names=['0.bias']); rank 1: parameters(names=['0.weight'])" in text


def call(trainer, kind, x, y):
    return getattr(trainer, kind)(x, y) if kind in ("step", "accumulate", "evaluate") else getattr(trainer, kind)(x)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_a_batch_without_targets_leaves_no_trace(strategy):
    """Gradients that are accumulated survive one that is evaluated, too."""

    def run(comm, bad):
        trainer = make(comm, "gpt", strategy, group_bytes=0)
        x, y = own_part(comm, "gpt", 6)

        def refuse(*kinds):
            for kind in kinds if bad else ():
                with pytest.raises(DataError, match="no target of the global batch counts"):
                    call(trainer, kind, x, np.full_like(y, -100))

        refuse("step", "evaluate", "accumulate")
        trainer.step(x, y)
        trainer.accumulate(x, y)
        refuse("evaluate")
        trainer.step(x, y)
        return bits(trainer)

    assert spawn(run, 2, True) == spawn(run, 2, False)


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        *(("step", strategy) for strategy in STRATEGIES), ("accumulate", "ddp"), ("accumulate", "zero2"),
        *((kind, strategy) for kind in ("evaluate", "predict", "forward") for strategy in ("zero1", "fsdp")),
        ("accumulate", "fsdp"), ("evaluate", "zero2"), ("forward", "ddp"),
    ],
)  # fmt: skip
def test_an_exception_at_any_action_leaves_no_trace(strategy, kind):
    """Every action of the program fails once, on all ranks alike; then the trainer steps like a fresh one."""

    def run(comm, breaks):
        trainer = make(comm, "mlp", strategy, group_bytes=0)
        batch = own_part(comm, "mlp", 4)
        at = 0
        while breaks and _break_at(trainer, kind, *batch, at):
            at += 1
        if breaks and kind in ("step", "accumulate"):
            return None  # the last round ran through and changed the trainer
        trainer.step(*batch)
        return bits(trainer)

    want = None if kind in ("step", "accumulate") else spawn(run, 2, False)[0]
    assert spawn(run, 2, True) == [want] * 2


class Planned(Exception): ...


def _break_at(trainer, kind, x, y, at):
    """Run `kind` with its action number `at` failing; False when there is no such action."""
    actions = itertools.count()

    def fail(action):
        if next(actions) == at:
            raise Planned(str(action))

    before = trainer.parameters()
    trainer.inspect.engine.add_observer(fail)
    try:
        call(trainer, kind, x, y)
    except Planned:
        updates = kind == "step" and find_difference(trainer.parameters(), before) is not None
        assert not {slot.kind for slot in trainer.inspect.engine.state.store} - {"shard", "slots", "stats"}
        return not updates
    finally:
        trainer.inspect.engine.remove_observers(*trainer.inspect.engine.added_observers)
    return False


def test_every_verb_has_an_operation():
    assert set(OPERATIONS) == set(VERBS)


@on_ranks(2)
def test_a_refused_batch_leaves_no_mark(comm):
    """Whatever comes next begins anew: the three calls, or nothing to update."""
    trainer = make(comm, "mlp", "ddp")
    x, y = CASES["mlp"].batch(np.random.default_rng(0), 4)
    with pytest.raises((DataError, ValueError)):
        trainer.step(x[:, :5], y)
    with pytest.raises(ConfigError, match="update: there are no gradients"):
        trainer.update()
    trainer.backward(np.ones_like(trainer.forward(x)))
    trainer.update()
    trainer.forward(x)
    with pytest.raises(DataError, match="dy has shape"):
        trainer.backward(np.ones((4, 3)))
    trainer.step(x, y)


def test_labels_and_indices_are_named_as_they_were_given():
    x, y = np.ones((2, 3), np.float32), np.ones(2)
    trainer = distributed(nn.Linear(3, 2), loss=nn.CrossEntropyLoss())
    with pytest.raises(DataError, match=r"labels must be whole numbers, got float32 \(given as float64\)$"):
        trainer.step(x, y)
    with pytest.raises(DataError, match=r"labels must be whole numbers, got float32$"):
        trainer.step(x.astype(float), y.astype(np.float32))
