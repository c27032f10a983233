"""Forward and backward as CUDA graphs: the bits of a run without them, on a stand-in that writes down what is captured
and spoils memory that is given back."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import captures
import numpy as np
import pytest
from amount import in_full
from stand_in import Cublas, Cupy, Device

from fsdpx import Mesh, nn, optim, spawn
from fsdpx.array import kernels
from fsdpx.array.arena import SlabPlan
from fsdpx.comm.calls import Call
from fsdpx.comm.counted import Counted
from fsdpx.config import Offload
from fsdpx.cuda import gemm
from fsdpx.cuda.graphs import GraphMemory
from fsdpx.cuda.streams import Side, synchronise
from fsdpx.engine import replay
from fsdpx.engine.replay import restless
from fsdpx.errors import ConfigError
from fsdpx.nn.layer import Layer


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Cupy:
    made = Cupy(gpus=2)
    for name, module in made.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    found: dict[int, Cublas] = {}  # one for each thread, as handles are
    monkeypatch.setattr(gemm, "_library", lambda: found.setdefault(threading.get_ident(), Cublas()))
    Device(0).use()
    return made


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How much each graph that was launched has done."""
    found: list[int] = []
    launch = captures.Graph.launch

    def counted(graph: captures.Graph, stream: Any = None) -> None:
        found.append(len(graph.work))
        launch(graph, stream)

    monkeypatch.setattr(captures.Graph, "launch", counted)
    return found


def mlp() -> Layer:
    layers = nn.Linear(6, 8), nn.GELU(), nn.Residual(nn.Linear(8, 8)), nn.LayerNorm(8), nn.Linear(8, 3)
    return nn.Chain(*layers)


def gpt() -> Layer:
    return nn.GPT(11, 8, 2, 2, 5)


def llama() -> Layer:
    return nn.Llama(11, 8, 2, 2, 5, kv_heads=1)


def cnn() -> Layer:
    conv = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 2, 3, padding=1)
    return nn.Chain(*conv, nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))


def dropping() -> Layer:
    return nn.Chain(nn.Linear(6, 8), nn.GELU(), {"drop": nn.Dropout(0.3)}, nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def batch(model: Any, n: int, step: int, rank: int) -> tuple[Any, Any]:
    rng = np.random.default_rng((step, rank))
    if model in (gpt, llama):
        return rng.integers(0, 11, (n, 5)), rng.integers(0, 11, (n, 5))
    shape = (n, 2, 4, 4) if model is cnn else (n, 6)
    return rng.standard_normal(shape), rng.integers(0, 3, n)


def trainer_of(comm: Any, model: Any, graphs: bool, **options: Any) -> Any:
    given = {"precision": "float64", **options}
    adam, loss = optim.AdamW(lr=0.01), nn.CrossEntropy()
    return model().as_distributed(
        loss=loss, optimizer=adam, comm=comm, device="cuda", tune=False, cuda_graphs=graphs, **given
    )


def state_of(trainer: Any) -> dict[str, bytes]:
    return {name: np.asarray(a).tobytes() for name, a in trainer.parameters().items()}


def train(comm: Any, model: Any, graphs: bool, sizes: tuple[int, ...] = (8,) * 5, **options: Any) -> Any:
    data = options.pop("data", True)
    trainer = trainer_of(comm, model, graphs, **options)
    found = [trainer.step(*batch(model, n, i, comm.rank if data else 0)) for i, n in enumerate(sizes)]
    return found, state_of(trainer)


def same_bits(launched: list[int], ranks: int, model: Any, plain: bool = True, **options: Any) -> int:
    """Train with and without graphs; how many were launched."""
    with kernels.use("plain" if plain else "default"):
        want = spawn(lambda comm: train(comm, model, False, **options), ranks)
        assert not launched
        got = spawn(lambda comm: train(comm, model, True, **options), ranks)
    assert got == want
    count = len(launched)
    launched.clear()
    return count


PIPE = {"mesh": Mesh(pipe=2), "microbatches": 4, "data": False}


@in_full
@pytest.mark.parametrize(
    ("model", "ranks", "options", "graphs"),
    [
        (mlp, 1, {}, 2),
        (mlp, 2, {"strategy": "fsdp", "group_bytes": 1, "microbatches": 2}, 16),
        (mlp, 2, {"strategy": "ddp"}, 2),
        (mlp, 2, {"strategy": "zero2", "microbatches": 3}, 6),
        (mlp, 2, {"precision": "bf16"}, 2),
        (mlp, 2, {"clip_norm": 0.1, "recompute": "all", "group_bytes": 1}, 12),
        (mlp, 2, {"chunks": 4}, 4),
        (mlp, 2, {**PIPE, "schedule": "1f1b"}, 8),
        (mlp, 2, {**PIPE, "schedule": "zb-h1"}, 10),
        (gpt, 2, {"group_bytes": 1}, 2),
        (gpt, 1, {"microbatches": 2, "recompute": "attention"}, 4),
        (cnn, 2, {}, 4),
        (cnn, 1, {"microbatches": 2, "recompute": "all"}, 12),
    ],
)  # fmt: skip
def test_a_run_with_graphs_has_the_bits_of_one_without(
    cupy: Cupy, launched: list[int], model: Any, ranks: int, options: dict[str, Any], graphs: int
) -> None:
    # the first step has a program of its own kind, and the second warms up
    assert same_bits(launched, ranks, model, **options) == 3 * ranks * graphs


def test_kernels_in_cuda_c_and_products_are_replayed(cupy: Cupy, launched: list[int]) -> None:
    assert same_bits(launched, 1, mlp, plain=False, sizes=(4,) * 4, precision="float32") == 2 * 2
    assert same_bits(launched, 1, mlp, plain=False, sizes=(4,) * 4, precision="bf16") == 2 * 2


@in_full
@pytest.mark.parametrize(("model", "units"), [(gpt, 2 + 1), (llama, 2 + 2)])
def test_a_transformer_is_replayed_but_for_its_embedding(
    cupy: Cupy, launched: list[int], capsys: pytest.CaptureFixture[str], model: Any, units: int
) -> None:
    assert same_bits(launched, 1, model, plain=False, sizes=(2,) * 4, group_bytes=1) == 2 * 2 * units
    said = capsys.readouterr().err
    assert said.count("is computed without a graph") == said.count("layer 'embed") == 1


def test_what_draws_random_numbers_stays_as_it_is(
    cupy: Cupy, launched: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert same_bits(launched, 1, dropping, microbatches=2) == 3 * 2 * 4  # before it and behind it
    said = capsys.readouterr().err
    assert said.count("fsdpx: cuda_graphs: layer 'drop' is computed without a graph: draws random numbers\n") == 1


@in_full
def test_labels_of_an_embedding_are_looked_at_in_each_step(
    cupy: Cupy, launched: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    same_bits(launched, 1, gpt)
    assert "layer 'embed' is computed without a graph: cudaErrorStreamCaptureUnsupported" in capsys.readouterr().err


class Asking(nn.ReLU):
    """The mean over ranks."""

    replays = True

    def forward(self, env: Any, p: Any, x: Any) -> Any:
        y, saved = super().forward(env, p, x)
        flat = y.copy().reshape(-1)
        env.mesh.data.all_reduce(flat, what="mean").wait()
        return flat.reshape(y.shape) / env.mesh.data.size, saved


def test_what_speaks_with_other_ranks_stays_outside(
    cupy: Cupy, launched: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    def model() -> Layer:
        return nn.Chain(nn.Linear(6, 8), Asking(), nn.Linear(8, 3))

    assert same_bits(launched, 2, model) == 3 * 2 * 4
    assert "layer '1' is computed without a graph: speaks with other ranks" in capsys.readouterr().err


@in_full
def test_batches_of_another_size_run_as_ever_and_the_graphs_stay(cupy: Cupy, launched: list[int]) -> None:
    assert same_bits(launched, 1, mlp, sizes=(8, 8, 8, 8, 3, 8, 8)) == 2 * 4
    assert same_bits(launched, 1, mlp, sizes=(8, 8, 8, 3, 3, 3, 8, 5, 5, 5)) == 2 * (1 + 2 + 1)  # of two sizes at most


def one_by_one(comm: Any, graphs: bool, folder: Path) -> Any:
    """Steps, accumulation, evaluation, prediction, a save and a load in between."""
    trainer, found = trainer_of(comm, mlp, graphs, strategy="fsdp", group_bytes=1), list[Any]()
    for i in range(9):
        x, y = batch(mlp, 8, i, comm.rank)
        if i == 6:
            trainer.load(folder / str(graphs))
        if i % 3 == 2:
            trainer.accumulate(*batch(mlp, 8, 100 + i, comm.rank))
        found.append(trainer.step(x, y))
        if i == 4:
            trainer.save(folder / str(graphs))
        found.append(trainer.evaluate(*batch(mlp, 32, 50, comm.rank)))
        kept = trainer.predict(x)
        found.append(np.asarray(kept.get() if hasattr(kept, "get") else kept).tobytes())
    return found, state_of(trainer)


@in_full
def test_between_steps_all_else_is_as_ever(cupy: Cupy, launched: list[int], tmp_path: Path) -> None:
    with kernels.use("plain"):
        want = spawn(lambda comm: one_by_one(comm, False, tmp_path), 2)
        assert spawn(lambda comm: one_by_one(comm, True, tmp_path), 2) == want
    assert len(launched) >= 2 * 16


@pytest.fixture
def memories(monkeypatch: pytest.MonkeyPatch) -> list[GraphMemory]:
    """All that recordings have made."""
    made: list[GraphMemory] = []

    class Seen(GraphMemory):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(replay, "GraphMemory", Seen)
    return made


@in_full
def test_what_is_sent_is_no_memory_that_a_later_graph_writes(
    cupy: Cupy, memories: list[GraphMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, issue = list[bool](), Counted.issue

    def seen(comm: Counted, call: Call) -> Any:
        if call.verb == "send":
            sent.append(any(memory.owns(a) for memory in memories for a in call.arrays))
        return issue(comm, call)

    monkeypatch.setattr(Counted, "issue", seen)
    with kernels.use("plain"):
        spawn(lambda comm: train(comm, mlp, True, **PIPE), 2)
    assert len(memories) == 2
    assert sent == [False] * (5 * 4 * 2)


@in_full
def test_memory_does_not_grow_with_the_number_of_microbatches(cupy: Cupy, memories: list[GraphMemory]) -> None:
    with kernels.use("plain"):
        for count in (1, 2, 8):
            spawn(lambda comm, n=count: train(comm, mlp, True, (64 * n,) * 4, microbatches=n), 1)
    few, *more = [memory.nbytes for memory in memories]
    assert all(few <= some < 1.5 * few for some in more), (few, more)


@in_full
def test_graphs_are_made_anew_when_buffers_move(cupy: Cupy, launched: list[int]) -> None:
    def body(comm: Any, graphs: bool) -> Any:
        trainer = trainer_of(comm, mlp, graphs, group_bytes=1)
        for i in range(8):
            trainer.step(*batch(mlp, 8, i, comm.rank))
            if i == 4:  # a larger program has come: the slab lies elsewhere
                arena = trainer._session.state.arena
                arena.lend(SlabPlan({}, 2 * arena.slab_nbytes, 0))
        return state_of(trainer)

    with kernels.use("plain"):
        assert spawn(lambda comm: body(comm, True), 2) == spawn(lambda comm: body(comm, False), 2)
    assert len(launched) == 2 * 8 * (3 + 3)


class Counting(nn.Linear):
    """Does something of its own each time."""

    def forward(self, env: Any, p: Any, x: Any) -> Any:
        self.times = getattr(self, "times", 0) + 1
        return super().forward(env, p, x)


class Doubling(nn.Linear):
    replays = True

    def forward(self, env: Any, p: Any, x: Any) -> Any:
        y, saved = super().forward(env, p, x)
        return y * 2.0, saved

    def backward_input(self, env: Any, p: Any, saved: Any, dy: Any) -> Any:
        return super().backward_input(env, p, saved, dy * 2.0)

    def backward(self, env: Any, p: Any, g: Any, saved: Any, dy: Any) -> Any:
        return super().backward(env, p, g, saved, dy * 2.0)

    def backward_leaf(self, env: Any, p: Any, g: Any, saved: Any, dy: Any) -> None:
        super().backward_leaf(env, p, g, saved, dy * 2.0)


class Further(Doubling):
    def backward(self, env: Any, p: Any, g: Any, saved: Any, dy: Any) -> Any:
        return super().backward(env, p, g, saved, dy)


def test_code_of_others_says_whether_it_does_the_same_each_time() -> None:
    words = "{}.{} does not say that it always does the same (replays = True)"
    assert restless(nn.Chain(nn.Linear(2, 2), nn.ReLU())) is None
    assert restless(Doubling(2, 2)) is None
    assert restless(nn.Chain(nn.ReLU(), Counting(2, 2))) == words.format("Counting", "forward")
    assert restless(Further(2, 2)) == words.format("Further", "backward")  # what a class says is of its own methods
    assert restless(nn.Lambda(np.sin, np.cos)) == words.format("Lambda", "forward")


class Looking(nn.Linear):
    """Its backward shows the host a number, and takes apart what it has kept."""

    replays = True

    def forward(self, env: Any, p: Any, x: Any) -> Any:
        y, saved = super().forward(env, p, x)
        return y, [saved]

    def backward(self, env: Any, p: Any, g: Any, saved: Any, dy: Any) -> Any:
        held, factor = saved.pop(), 1.0
        while float(dy.sum()) > factor:
            factor *= 2
        return super().backward(env, p, g, held, dy * factor)


@pytest.mark.parametrize(("layer", "graphs"), [(Counting, 2 * 2), (Doubling, 2), (Looking, 1 + 2)])
def test_layers_of_others(cupy: Cupy, launched: list[int], layer: Any, graphs: int) -> None:
    made: list[Any] = []

    def model() -> Layer:
        made.append(layer(8, 8))
        return nn.Chain(nn.Linear(6, 8), made[-1], nn.Linear(8, 3))

    assert same_bits(launched, 1, model) == 3 * graphs
    if layer is Counting:
        assert made[0].times == made[1].times


def test_what_stands_in_the_way_is_said(cupy: Cupy, tmp_path: Path) -> None:
    def wrong(words: str, **options: Any) -> None:
        given = {"device": "cuda", "cuda_graphs": True, **options}
        with pytest.raises(ConfigError, match=words):
            mlp().as_distributed(loss=nn.CrossEntropy(), optimizer=optim.SGD(lr=0.1), **given)

    wrong("cuda_graphs=True is of device='cuda', and device='cpu'", device="cpu")
    wrong("cuda_graphs='yes': True or False", cuda_graphs="yes")
    wrong("check_finite=True shows what each layer gives to the host, which no graph holds", check_finite=True)
    wrong(r"Offload\(what='activations'\) keeps what layers gave while", offload=Offload(tmp_path, "activations"))


def test_a_layer_that_brings_numbers_from_the_host_is_not_captured(
    cupy: Cupy, launched: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    longer = {"rope_type": "dynamic", "factor": 2.0}  # angles of each length that is seen
    rotary = lambda: nn.Chain(  # noqa: E731
        {"turn": nn.Rotary(4, rope_scaling=longer, seq_len=4)}, nn.Flatten(), nn.Linear(6 * 4, 3)
    )
    x, y = np.random.default_rng(0).standard_normal((2, 6, 4)), np.array([0, 2])

    def body(comm: Any, graphs: bool) -> Any:
        trainer = trainer_of(comm, rotary, graphs)
        return [trainer.step(x, y) for _ in range(5)]

    with kernels.use("plain"):
        assert spawn(lambda comm: body(comm, True), 1) == spawn(lambda comm: body(comm, False), 1)
    assert len(launched) == 3 * 2
    assert "layer 'turn' is computed without a graph: takes numbers from the host" in capsys.readouterr().err
    for joins in ("concatenate", "stack"):
        with pytest.raises(replay.Uncapturable, match="takes numbers from the host"):
            getattr(replay._Namespace(cupy), joins)([cupy.ones(2), cupy.ones(2)])


def test_a_capture_refuses_what_the_host_waits_for(cupy: Cupy) -> None:
    memory, x = GraphMemory(), cupy.asarray(np.arange(4.0))
    for body in (lambda: float(x.sum()), x.get, synchronise, lambda: cupy.nonzero(x), Side().follow):
        with pytest.raises(captures.CUDARuntimeError, match="cudaErrorStreamCaptureUnsupported"):
            memory.captured(body)
    graph, y = memory.captured(lambda: x * 2.0)  # and the next one is as ever
    graph.launch()
    assert y.get().tolist() == [0, 2, 4, 6]


def test_a_graph_computes_again_into_the_same_memory(cupy: Cupy) -> None:
    memory, x = GraphMemory(), cupy.asarray(np.arange(4.0))
    graph, y = memory.captured(lambda: (x + 1.0) * 2.0)
    assert memory.owns(y)
    assert not memory.owns(x)
    assert memory.lasting(x) is x
    kept = memory.lasting(y)
    assert memory.lasting(y[:]) is kept
    for first in (0.0, 5.0):
        x[0] = first
        graph.launch()
        assert kept.get().tolist() == [2 * first + 2, 4, 6, 8]
    taken = memory.nbytes
    del y
    _, z = memory.captured(lambda: x * 3.0)  # what nobody holds is used again
    assert memory.owns(z)
    assert memory.nbytes == taken


def test_products_go_past_the_functions_of_cupy(cupy: Cupy) -> None:
    memory, (a, b) = GraphMemory(), (cupy.asarray(np.arange(6.0).reshape(s)) for s in ((2, 3), (3, 2)))
    for refused in (lambda: a @ b, lambda: cupy.matmul(a, b)):
        with pytest.raises(NotImplementedError, match="calling cuBLAS API during stream capture"):
            memory.captured(refused)
    into, scores = cupy.ones((2, 2)), cupy.zeros((2, 2, 3))
    graph, _ = memory.captured(lambda: gemm.gemm(into, a, b, accumulate=True))
    more, _ = memory.captured(lambda: gemm.batched(scores, cupy.stack([a.T.T] * 2)[:, :, :2], cupy.stack([a, a])))
    graph.launch()
    graph.launch()
    more.launch()
    assert into.get().tolist() == (1 + 2 * (a.get() @ b.get())).tolist()
    assert scores.get()[1].tolist() == (a.get()[:, :2] @ a.get()).tolist()
