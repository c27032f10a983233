"""Compressed gradients under every placement: bytes as predicted, replicas alike, and training that arrives."""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from amount import few
from bits import bits
from models import make, own_part, own_parts, part
from threads import on_ranks

import fsdpx
from fsdpx import Mesh, nn, optim, spawn
from fsdpx.core.base.messages import format_bytes
from fsdpx.core.checkpoint.local_shards import iterate_local_state_shards
from fsdpx.core.comm import Communicator
from fsdpx.errors import ConfigError
from fsdpx.examples.digits import draw_digits
from fsdpx.examples.models import make_digits_model

CODECS: dict[str, Callable[[], dict[str, Any]]] = {
    "int8": lambda: {"compression": "int8"},
    "unbiased": lambda: {"compression": fsdpx.Int8(unbiased=True)},
    "topk": lambda: {"compression": fsdpx.TopK(0.05)},
    "warming up": lambda: {"compression": fsdpx.TopK(0.05, warmup=1)},
    "powersgd": lambda: {"compression": fsdpx.PowerSGD(1)},
}
each = pytest.mark.parametrize("name", CODECS)
SEVERAL = ("int8", "topk", "powersgd")
quantised = pytest.mark.parametrize("name", ["int8", "unbiased"])
PLACES = [("ddp", 2, 3), ("zero1", 3, 3), ("zero2", 5, 1), ("fsdp", 3, 2), ("fsdp", 1, 1), ("hybrid", 4, 1)]
"""Strategy, ranks, microbatches. What a codec packs is independent of what is cut: each of both, and the kinds of
codecs with each."""
FEW = ("ddp", 2), ("fsdp", 1), ("hybrid", 4)


def run(comm: Communicator, name: str, strategy: Any, m: int = 1, count: int = 2, **options: Any) -> Any:
    options = {"precision": "float32", "group_bytes": 0, "optimizer": optim.SGD(lr=1e-2), **CODECS[name](), **options}
    trainer = make(comm, "mlp", strategy, microbatches=m, **options)
    batch = own_part(comm, "mlp", 12)
    first = float(trainer.step(*batch))
    trainer.inspect.reset_counters()
    return trainer, [first, *(float(trainer.step(*batch)) for _ in range(count))]


def count_predicted(report: Any) -> dict[Any, Any]:
    """What gradients and parameters cost, which a report predicts."""
    return {key: count for key, count in report.traffic.items() if key[0] != "world"}


@pytest.mark.parametrize(
    ("name", "strategy", "size", "m"),
    [(name, *place) for name in CODECS for place in PLACES if name in SEVERAL or place[:2] in FEW],
)
def test_counted_is_predicted_and_replicas_agree(name: str, strategy: str, size: int, m: int) -> None:
    def body(comm: Communicator) -> Any:
        trainer, losses = run(comm, name, strategy, m, 1)
        assert count_predicted(trainer.report()) == trainer.report().predicted
        return losses, bits(trainer)

    found = spawn(body, size)
    assert len({str(one) for one in found}) == 1
    assert found[0][0][-1] < found[0][0][0]


@each
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_dry_run_predicts_the_same(name: str, strategy: str) -> None:
    model = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 5))
    options = {"loss": nn.MSELoss(), "optimizer": optim.SGD(lr=1e-2), "strategy": strategy, **CODECS[name]()}
    report = fsdpx.dry_run(model, ((6, 12), "float32"), ((6, 5), "float32"), ranks=3, **options).report
    assert count_predicted(report) == report.predicted


@quantised
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@on_ranks(3)
def test_bytes_are_those_of_the_formula(comm: Communicator, name: str, strategy: str) -> None:
    """Per page and rank: what the packed parts of the others have, once, and for all ranks once more."""
    trainer, _ = run(comm, name, strategy, 1, 1)
    codec, pages = trainer.inspect.placement.get_codec_route(0).shard, trainer.inspect.placement.pages.values()
    whole = [[p.size * (r + 1) // 3 - p.size * r // 3 for r in range(3)] for p in pages]
    foreign = sum(codec.packed_bytes(n) for counts in whole for r, n in enumerate(counts) if r != comm.rank)
    moved = trainer.report().traffic
    axis = "replica" if strategy == "ddp" else "shard"
    assert moved[axis, "all_to_all"].bytes == foreign
    if strategy == "ddp":
        assert moved[axis, "all_gather"].bytes == foreign


def train_on_digits(size: int, model: nn.Layer, rows: int, count: int, **options: Any) -> list[float]:
    """The losses of `count` steps of `rows` digits each."""
    images, labels = draw_digits(16 * rows, seed=1)

    def body(comm: Communicator) -> list[float]:
        trainer = model.as_distributed(loss=nn.CrossEntropyLoss(), comm=comm, seed=2, tune=False, **options)
        parts = [(np.arange(rows) + rows * step)[part(comm, rows)] % len(labels) for step in range(count)]
        return [float(trainer.step(images[mine], labels[mine])) for mine in parts]

    return spawn(body, size)[0]


@lru_cache
def learn(codec: Any, strategy: str, size: int) -> float:
    options = {"compression": codec, "strategy": strategy, "optimizer": optim.AdamW(lr=4e-3)}
    return float(np.mean(train_on_digits(size, make_digits_model(), 32, 40, **options)[-8:]))


@pytest.mark.parametrize(("strategy", "size", "codec"), [("fsdp", 2, fsdpx.Int8(unbiased=True)), ("hybrid", 4, "int8")])
def test_digits_are_learnt_nearly_as_well(codec: Any, strategy: str, size: int) -> None:
    """The convolutional network of the example: after 40 steps the loss is within 15 % of plain training's."""
    mine, plain = learn(codec, strategy, size), learn("plain", "ddp", 1)
    assert mine < 1.15 * plain + 0.02, (mine, plain)


OPTIMIZERS = {"adam": optim.AdamW(lr=3e-2), "momentum": optim.SGD(lr=0.1, momentum=0.9), "sgd": optim.SGD(lr=1.0)}
SETTINGS: dict[str, tuple[Any, str, str, float]] = {
    "bf16": ("bf16", "adam", "adam", 0.01),
    "int8": ("int8", "adam", "adam", 0.01),
    "powersgd": (fsdpx.PowerSGD(4), "momentum", "momentum", 0.05),
    "topk": (fsdpx.TopK(0.01, warmup=50), "sgd", "momentum", 0.15),
}
"""Codec, optimizer, that of a training without codec, and how much less the loss may fall than there."""


@lru_cache
def learnt(codec: Any, optimizer: str) -> float:
    """How far the loss of one layer falls in 100 steps of digits."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 10))
    options = {"compression": codec, "strategy": "ddp", "optimizer": OPTIMIZERS[optimizer]}
    return math.log(10) - float(np.mean(train_on_digits(2, model, 64, 100, **options)[-16:]))


@pytest.mark.parametrize("name", few(SETTINGS, len(SETTINGS)))
def test_each_codec_learns_digits_with_its_settings(name: str) -> None:
    """Kinds of settings as docs/compression.md says, with steps as long as those without a codec."""
    codec, optimizer, beside, away = SETTINGS[name]
    mine, wanted = learnt(codec, optimizer), learnt("plain", beside)
    assert mine > (1 - away) * wanted, (mine, wanted)


AXES = {
    "pipe and shards": (Mesh(pipe=2, shard=2), "fsdp", ("int8",)),
    "pipe and replicas": (Mesh(pipe=2, replica=2, shard=1), "ddp", ("topk",)),
    "tensor and uneven shards": (Mesh(tensor=2, shard=3), "fsdp", ("topk",)),
    "tensor and replicas": (Mesh(tensor=3, replica=2, shard=1), "ddp", ("int8",)),
}


def on_mesh(comm: Communicator, axes: str, codec: Any) -> Any:
    """Losses of steps, every other one of two halves, and the bits of all parameters."""
    mesh, strategy, _ = AXES[axes]
    trainer = make(comm, "wide", strategy, mesh=mesh, group_bytes=600, precision="float32", compression=codec)
    losses = []
    for step, (x, y) in enumerate(own_parts(trainer.data_group, "wide", (6, 6, 6), seed=4)):
        if step % 2 and mesh.pipe == 1:
            half = len(x) // 2
            trainer.accumulate(x[:half], y[:half])
            trainer.accumulate(x[half:], y[half:])
            losses.append(trainer.update())
        else:
            losses.append(trainer.step(x, y))
    if codec != "plain":  # else pages hold both kinds, and are cut elsewhere
        shards = iterate_local_state_shards(trainer.inspect.engine.state)
        alike = {(p.name, p.start): np.asarray(p.array) for p in shards if p.spec.cut is None}
        for theirs in trainer.inspect.placement.axes.tensor.all_gather_object(alike):
            np.testing.assert_equal(theirs, alike)
    return losses, bits(trainer)


@pytest.mark.parametrize("axes", few(AXES, len(AXES)))
def test_on_any_mesh_ranks_agree_and_the_loss_is_close(axes: str) -> None:
    """Ranks of the tensor axis have the same of what is not cut, though blocks lie elsewhere in what is."""
    mesh, _, names = AXES[axes]
    plain, _ = spawn(on_mesh, mesh.size, axes, "plain")[0]
    for codec, bound in (("int8", 0.05) if name == "int8" else (fsdpx.TopK(0.1), 0.3) for name in names):
        found = spawn(on_mesh, mesh.size, axes, codec)
        assert len({str(one) for one in found}) == 1
        assert found[0][0][0] == pytest.approx(plain[0], rel=1e-5)
        np.testing.assert_allclose(found[0][0], plain, rtol=bound)


def test_codecs_by_name_pattern() -> None:
    """The first pattern that fits counts; parameters of one codec have pages of their own."""

    def body(comm: Communicator, codec: Any) -> Any:
        trainer = make(comm, "mlp", "zero1", precision="float32", compression=codec)
        trainer.step(*own_part(comm, "mlp", 6))
        place, pages = trainer.inspect.placement, trainer.inspect.placement.layout.pages
        kinds = {f.name: type(place.get_codec_route(page.index).shard).__name__ for page in pages for f in page.fields}
        moved = count_predicted(trainer.report())
        assert moved == trainer.report().predicted
        return kinds, sorted(call for _, call in moved), bits(trainer)

    kinds, calls, _ = spawn(body, 2, {"0.weight": "plain", "*.weight": "int8"})[0]
    assert kinds == {
        "0.weight": "NoCompression", "0.bias": "NoCompression", "2.weight": "Int8", "2.bias": "NoCompression",
        "4.weight": "Int8", "4.bias": "NoCompression",
    }  # fmt: skip
    assert calls == ["all_gather", "all_to_all", "reduce_scatter"]
    pairs = [("*.bias", "plain"), ("*", fsdpx.Int8())]
    assert spawn(body, 2, pairs) == spawn(body, 2, dict(pairs))
    for bad, words in {
        "compression: '9.*' matches no parameter": {"9.*": "int8"},
        r"compression=\['int8'\]: 'int8' is no pair of a name pattern and a codec": ["int8"],
        "unknown codec 'zip'": {"*": "zip"},
    }.items():
        with pytest.raises(ConfigError, match=bad):
            spawn(body, 2, words)


def test_between_replicas_alone() -> None:
    def body(comm: Communicator) -> Any:
        codec = fsdpx.HierarchicalCompression("int8")
        trainer, _ = run(comm, "int8", "hybrid", 1, 1, compression=codec, mesh=Mesh(replica=2, shard=2))
        kept = {row.key.name for row in trainer.inspect.engine.state.ledger if row.key.kind == "memory"}
        return {key for key in trainer.report().traffic if key[0] in ("shard", "replica")}, kept

    moved, kept = spawn(body, 4)[0]
    assert moved == {
        ("shard", "all_gather"), ("shard", "reduce_scatter"), ("replica", "all_to_all"), ("replica", "all_gather"),
    }  # fmt: skip
    assert kept == {"replica/error"}


def test_the_report_tells_bytes_saved_and_the_error_of_each_reduce() -> None:
    """The error is what was kept, beside what there was to send: here the first gradient alone."""

    def body(comm: Communicator, codec: Any) -> Any:
        trainer = make(comm, "mlp", "zero1", precision="float32", compression=codec, group_bytes=0)
        trainer.step(*own_part(comm, "mlp", 6))
        kept = {row.key.page: np.array(array) for row, array in trainer.inspect.engine.state.ledger.iterate_saved_rows()
                if row.key.kind == "memory"}  # fmt: skip
        names = {trainer.inspect.placement.format_page_name(p): p for p in trainer.inspect.placement.pages}
        sizes = {p: whole for (_, p), (whole, _) in trainer.inspect.engine.state.ledger.codec_error_norms.items()}
        return trainer.report(), {name: np.linalg.norm(kept[p]) / sizes[p] for name, p in names.items() if p in kept}

    report, errors = spawn(body, 2, "int8")[0]
    assert [one.page for one in report.reduces] == ["0.weight..0.bias", "2.weight..2.bias", "4.weight..4.bias"]
    assert sum(one.sent for one in report.reduces) == report.traffic["shard", "all_to_all"].bytes
    for one in report.reduces:
        assert (one.axis, one.codec) == ("shard", "Int8")
        assert 0.7 < 1 - one.sent / one.plain < 0.75
        assert one.error == pytest.approx(errors[one.page], rel=1e-5)
        assert 0.001 < one.error < 0.02
        line = next(line for line in str(report).splitlines() if line.strip().startswith(one.page))
        assert line.split() == [
            one.page, "shard", "Int8", *format_bytes(one.sent).split(), f"{100 * (1 - one.sent / one.plain):.1f}", "%",
            f"{one.error:.2g}",
        ]  # fmt: skip
    assert spawn(body, 2, "plain")[0][0].reduces == []
    unknown = spawn(body, 2, fsdpx.Int8(unbiased=True))[0][0].reduces
    assert all(np.isnan(one.error) for one in unknown)


@quantised
@on_ranks(4)
def test_what_is_kept_is_a_row_of_memory(comm: Communicator, name: str) -> None:
    trainer, _ = run(comm, name, "hybrid", 1, 1, mesh=Mesh(replica=2, shard=2))
    codec = trainer.inspect.placement.get_codec_route(0).shard
    sizes = [n for p in trainer.inspect.placement.pages.values() for n in (p.size, p.own_range.size)]
    wanted = sum(sum(codec.memory_sizes(n).values()) for n in sizes)
    assert trainer.report().memory["codec memory"] == 4 * wanted


class Misspelt(fsdpx.TopK):
    reshard_rules = {"error": "anew"}  # noqa: RUF012


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (lambda rank: {"compression": fsdpx.Int8(unbiased=rank == 1)},
         r"ranks differ in compression: rank 0 has .*feedback=True.*rank 1 has .*random=Tr"),
        (lambda rank: {"compression": "int8", "precision": "float16"},
         "codec Int8 keeps what it lost in units of the loss scale"),
        (lambda rank: {"compression": Misspelt(0.5)},
         r"Misspelt: reshard rule of 'error' is 'anew': choose 'sum', 'same' or 'reset'"),
    ],
    ids=["ranks that differ", "a dynamic loss scale", "a memory of which nobody knows what becomes of it"],
)  # fmt: skip
def test_codecs_that_cannot_serve_are_refused(options: Callable[[int], dict[str, Any]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        spawn(lambda comm: make(comm, "mlp", **{"precision": "float32", **options(comm.rank)}), 2)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"compression": "int8"}, "Int8"),
        ({"compression": fsdpx.PowerSGD(2)}, "PowerSGD"),
        ({"compression": {"*.bias": "plain", "*": "topk"}}, "TopK"),
        ({"compression": fsdpx.HierarchicalCompression("int8"), "strategy": "ddp"}, "Int8"),
        ({"precision": fsdpx.Precision(reduce="bf16")}, "Cast16"),
    ],
)
def test_codecs_that_round_are_refused_beside_chunks(options: dict[str, Any], name: str) -> None:
    words = f"reproducible_chunks=4: codec {name} rounds gradients before they are sent, so results depend on"
    with pytest.raises(ConfigError, match=words):
        spawn(lambda comm: make(comm, "mlp", reproducible_chunks=4, **{"precision": "float32", **options}), 2)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_powersgd_of_full_rank_is_plain_and_says_so(strategy: str, capfd: pytest.CaptureFixture[str]) -> None:
    found = [
        spawn(lambda comm, c=codec: run(comm, "topk", strategy, compression=c, precision="float64")[1], 3)[0]
        for codec in ("plain", fsdpx.PowerSGD(40))
    ]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-12)
    whole = "0.weight (40, 12), 2.weight (60, 40), 4.weight (5, 60)"
    assert "".join(capfd.readouterr()).count(f"PowerSGD(rank=40): no fewer bytes for {whole}: whole and exact") == 1


def test_powersgd_cuts_matrices_by_whole_rows() -> None:
    """In the sums over replicas a rank has a part of a matrix: its whole rows, and vectors around them."""

    def body(comm: Communicator) -> Any:
        trainer, _ = run(comm, "powersgd", "hybrid", mesh=Mesh(replica=2, shard=2))
        place = trainer.inspect.placement
        return [place.get_codec_route(p).replica.shapes for p in place.pages]

    shapes = spawn(body, 4)
    assert shapes[0][0] == ((21, 12), (8,))  # 40 x 12 weights and 40 biases, cut at 260
    assert shapes[1][0] == ((4,), (18, 12), (40,))


def test_powersgd_sends_two_messages_for_all_of_a_page() -> None:
    """All P with what travels whole, then all Q, however many matrices there are."""

    def body(comm: Communicator) -> Any:
        trainer, _ = run(comm, "powersgd", "ddp", count=1, group_bytes=1 << 20)
        return len(trainer.inspect.placement.pages), trainer.report().traffic["replica", "all_reduce"].calls

    assert spawn(body, 2)[0] == (1, 2)
