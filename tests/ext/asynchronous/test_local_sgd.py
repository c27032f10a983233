"""Local training: replicas that train by themselves and meet at the end of a round, at once or fragment by fragment."""

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from amount import few
from bits import Bits, bits
from models import KNOWN, make, own_parts, train
from threads import on_ranks

import fsdpx
from fsdpx import LocalSGD, Mesh, data, nn, optim, spawn
from fsdpx.core.comm import Communicator
from fsdpx.core.comm.calls import TimedTransfer
from fsdpx.errors import CheckpointError, ConfigError, DesyncError
from fsdpx.testing import assert_close, find_difference

MEAN = optim.SGD(lr=1.0)
ALWAYS = LocalSGD(sync_every=1, outer_optimizer=MEAN)


def steps(trainer: fsdpx.Trainer, sizes: tuple[int, ...], seed: int = 5) -> list[float]:
    return [trainer.step(*batch) for batch in own_parts(trainer.data_group, "mlp", sizes, seed)]


def train_by_sgd(comm: Communicator, strategy: Any, mesh: Mesh | None = None) -> Any:
    """Losses and parameters."""
    return train(comm, "gpt", strategy, (11, 11, 3), mesh=mesh, optimizer=optim.SGD(lr=0.1))[:2]


@lru_cache
def train_synchronously() -> Any:
    return spawn(train_by_sgd, 1, "ddp")[0]


MESHES = [
    (1, None), (4, Mesh(replica=2, shard=2)), (5, None), (4, Mesh(replica=2, shard=1, pipe=2)),
    (4, Mesh(replica=2, shard=1, tensor=2)), (3, None),
]  # fmt: skip


@pytest.mark.parametrize(("size", "mesh"), few(MESHES, 2), ids=str)
def test_rounds_of_one_step_are_synchronous_training(size: int, mesh: Mesh | None) -> None:
    """With inner and outer SGD, also with parts of different size, of which some are empty."""
    losses, want = train_synchronously()
    for got_losses, got in spawn(train_by_sgd, size, ALWAYS, mesh, delays=size):
        np.testing.assert_allclose(got_losses, losses, rtol=1e-12)
        assert_close(got, want, 1e-12)


@pytest.mark.parametrize("delay", [0, 2])
def test_outer_gradients_go_through_a_codec(delay: int) -> None:
    """In a quarter of the bytes; what is lost of one is added to the next, so all of the way is right."""

    def run(comm: Communicator, codec: str | None) -> Any:
        local = LocalSGD(sync_every=4, outer_optimizer=MEAN, compression=codec, delay=delay)
        trainer = make(comm, "mlp", local, optimizer=optim.SGD(lr=0.1), precision="float32")
        before = trainer.parameters()
        steps(trainer, (8,) * 22)
        traffic = trainer.report().traffic
        sent = sum(n.bytes for (_, call), n in traffic.items() if call in ("reduce_scatter", "all_to_all"))
        return before, trainer.parameters(), sent

    (start, want, plain), (_, got, packed) = (spawn(run, 2, codec)[0] for codec in (None, "int8"))
    assert 0.25 < packed / plain < 0.28
    for name in want:
        assert np.linalg.norm(got[name] - want[name]) < 0.03 * np.linalg.norm(want[name] - start[name])


def by_hand(local: LocalSGD, replicas: int, sizes: tuple[int, ...], pages: list[list[str]]) -> dict[str, np.ndarray]:
    """The outer parameters of the same with as many trainers of one rank as there are replicas, brought together by
    hand. pages: the names of each fragment."""

    def run(comm: Communicator) -> dict[str, np.ndarray]:
        alone = [make(comm, "mlp", "ddp") for _ in range(replicas)]
        optimizer, velocity, under_way = local.outer_optimizer, dict[str, Any](), dict[int, Any]()
        outer = alone[0].parameters()
        rng, trained, count = np.random.default_rng(5), [[0] * replicas for _ in pages], [0] * len(pages)
        for step, n in enumerate(sizes, start=1):
            x, y = KNOWN["mlp"].batch(rng, n)
            for r, trainer in enumerate(alone):
                mine = slice(n * r // replicas, n * (r + 1) // replicas)
                trainer.step(x[mine], y[mine])
                for weights in trained:
                    weights[r] += mine.stop - mine.start
            own = [trainer.parameters() for trainer in alone]
            for f, names in enumerate(pages):
                lag = step - -(-local.sync_every * (f + 1) // len(pages))
                if lag >= 0 and lag % local.sync_every == 0:
                    shares = [w / sum(trained[f]) for w in trained[f]]
                    moved = {k: sum((outer[k] - p[k]) * w for p, w in zip(own, shares, strict=True)) for k in names}
                    under_way[f], trained[f] = moved, [0] * replicas
                if lag >= 0 and lag % local.sync_every == local.delay // 2:
                    count[f] += 1
                    for k, g in under_way.pop(f).items():
                        v = velocity[k] = optimizer.momentum * velocity.get(k, 0.0) + g
                        outer[k] = outer[k] - optimizer.lr(count[f]) * (g + optimizer.momentum * v)
                if lag >= 0 and lag % local.sync_every == local.delay:
                    for p, trainer in zip(own, alone, strict=True):
                        p |= {k: local.mix * p[k] + (1 - local.mix) * outer[k] for k in names}
                        trainer.load_parameters(p)
        return outer

    return spawn(run, 1)[0]


OUTER = optim.SGD(lr=lambda number: 0.7 / number, momentum=0.9, nesterov=True)


@pytest.mark.parametrize(
    "local", [LocalSGD(3, OUTER), LocalSGD(4, OUTER, fragments=2, delay=3, mix=0.25)], ids=["at once", "fragments"]
)
def test_diloco_is_its_definition(local: LocalSGD) -> None:
    """AdamW inside, whose state stays with each replica; Nesterov between, with a schedule of its own; parts of any
    size; outer parameters are what is looked at."""
    sizes = (9, 9, 7, 9, 4, 9, 9, 8, 9, 9, 9)

    def run(comm: Communicator, mesh: Mesh | None) -> Any:
        trainer = make(comm, "mlp", local, mesh=mesh)
        steps(trainer, sizes)
        rounds, pages = trainer.inspect.placement.sync_policy.round_schedule, trainer.inspect.placement.layout.pages
        return [[f.name for p in some for f in pages[p].fields] for some in rounds.fragments], trainer.parameters()

    found = [one for size, mesh in ((3, None), (6, Mesh(replica=3, shard=2))) for one in spawn(run, size, mesh)]
    want = by_hand(local, 3, sizes, found[0][0])
    for _, got in found:
        assert_close(got, want, 1e-12)


def test_between_rounds_nothing_is_sent() -> None:
    """One round sends what one step of data parallelism does, as predicted; a replica sees its own loss until then."""

    def run(comm: Communicator) -> tuple[list[float], int]:
        local = make(comm, "mlp", LocalSGD(sync_every=4, outer_optimizer=MEAN), optimizer=optim.SGD(lr=0.1))
        ddp = make(comm, "mlp", "ddp", optimizer=optim.SGD(lr=0.1))
        local.inspect.reset_counters()
        losses = steps(local, (8, 8, 8))
        assert local.report().traffic == {}
        assert local.report().predicted["replica", "reduce_scatter"].calls == len(local.inspect.placement.pages)
        losses += steps(local, (8,))
        report = local.report()
        moved = {key: count for key, count in report.traffic.items() if key[0] == "replica" and count.bytes > 1000}
        assert moved == report.predicted
        ddp.inspect.reset_counters()
        steps(ddp, (8,))
        assert sum(count.bytes for count in moved.values()) == ddp.report().traffic["replica", "all_reduce"].bytes
        return losses, len(moved)

    (first, kinds), (second, _) = spawn(run, 2)
    assert kinds == 2
    assert first[:3] != second[:3]
    assert first[3] == second[3]


@pytest.mark.parametrize(
    ("delay", "later"),
    [(0, [[], []]), (1, [["next0"], ["next1"]]), (2, [["delta0"], ["delta1"]]), (5, [["delta0"], ["delta1", "next0"]])],
)
def test_fragments_travel_at_times_of_their_own(delay: int, later: list[list[str]]) -> None:
    """Each page is sent once in a round. What is under way at a time is the same whether somebody looks or not. later:
    what that is after two steps, and after four."""
    local = LocalSGD(sync_every=6, fragments=3, delay=delay, mix=0.25)

    def run(comm: Communicator, looks: bool) -> tuple[list[str], list[float], dict[str, np.ndarray]]:
        trainer, seen, losses = make(comm, "mlp", local, group_bytes=0), list[str](), list[float]()
        flying: list[set[str]] = []
        trainer.inspect.engine.add_observer(lambda action: seen.append(f"{trainer.global_step + 1}{action}"))
        for batch in own_parts(trainer.data_group, "mlp", (8,) * 11):
            losses.append(trainer.step(*batch))
            store = trainer.inspect.engine.state.store
            flying.append({str(slot) for slot, value in store.items() if isinstance(value, TimedTransfer)})
            if looks:
                trainer.evaluate(*batch)
        assert looks or [sorted(flying[1]), sorted(flying[3])] == later
        return [text for text in seen if "DELTA" in text or "ADOPT" in text], losses, trainer.parameters()

    ranks = spawn(run, 2, False)
    (seen, _, want), *_ = ranks
    assert [text for text in seen if "DELTA" in text] == ["2DELTA0", "4DELTA1", "6DELTA2", "8DELTA0", "10DELTA1"]
    assert [text for text in seen if "ADOPT" in text][:3] == [f"{2 * p + 2 + delay}ADOPT{p}" for p in range(3)]
    for (_, losses, _), (_, same, got) in zip(ranks, spawn(run, 2, True), strict=True):
        assert_close(got, want)
        assert losses == same


KINDS = {
    "at once": (LocalSGD(sync_every=4), None),
    "fragments": (LocalSGD(sync_every=4, fragments=2, delay=3, mix=0.5), None),
    "compression": (LocalSGD(sync_every=4, delay=2, compression="int8"), optim.LAMB()),
}


@pytest.mark.parametrize(("local", "inner"), KINDS.values(), ids=KINDS)
def test_a_run_goes_on_as_if_nobody_had_stopped_it(tmp_path: Path, local: LocalSGD, inner: Any) -> None:
    """In the midst of a round and of a transfer, with the inner state of each replica; on other numbers of replicas the
    outer parameters and their momentum are the same, cut anew."""

    def run(comm: Communicator, mesh: Mesh, saves: bool = False) -> tuple[Bits, Bits]:
        """Of the checkpoint and of some steps after it."""
        trainer = make(comm, "mlp", local, mesh=mesh, group_bytes=0, optimizer=inner)
        if saves:
            steps(trainer, (8, 8, 6, 8, 8, 7))
            trainer.save(tmp_path / "a")
        else:
            trainer.load(tmp_path / "a")
        between = bits(trainer)
        steps(trainer, (8, 7, 8), seed=6)
        return between, bits(trainer)

    (saved, want), *_ = spawn(run, 4, Mesh(replica=2, shard=2), True)
    assert set(spawn(run, 4, Mesh(replica=2, shard=2))) == {(saved, want)}
    for mesh in (Mesh(replica=3, shard=1), Mesh(replica=1, shard=1)):
        ((again, _),) = set(spawn(run, mesh.size, mesh))
        assert again == saved

    def other(comm: Communicator) -> None:
        with pytest.raises(CheckpointError, match="it was saved in local training, and this trainer is not one of it"):
            make(comm, "mlp", "ddp").load(tmp_path / "a")
        trainer = make(comm, "mlp", "ddp")
        trainer.load_parameters(tmp_path / "a")
        assert bits(trainer) == saved
        wrong = make(comm, "mlp", LocalSGD(sync_every=5, fragments=2, delay=1), group_bytes=0, optimizer=inner)
        with pytest.raises(CheckpointError, match="the rounds of local training differ: every is 4 there and 5 here"):
            wrong.load(tmp_path / "a")

    spawn(other, 1)


def test_outer_state_is_cut_over_replicas() -> None:
    def run(comm: Communicator) -> tuple[dict[str, int], int]:
        trainer = make(comm, "mlp", "diloco", precision="float32")
        return trainer.report().memory, sum(page.size for page in trainer.inspect.placement.pages.values())

    for memory, size in spawn(run, 4):
        assert memory["outer parameters"] == 4 * size
        assert abs(memory["outer optimizer"] - size) <= 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync_every": 0}, "a number of steps, 1 or more"),
        ({"sync_every": 2, "fragments": 3}, "a number from 1 to the steps of a round, sync_every=2"),
        ({"sync_every": 4, "delay": 4}, "a number of steps below those of a round, sync_every=4"),
        ({"mix": 1.0}, "a number in [0, 1) is needed"),
        ({"outer_optimizer": optim.SGD}, "an optimizer is needed, such as optim.SGD(lr=1.0)"),
        ({"inner_strategy": "async"}, "what the ranks of one replica do, such as 'fsdp'"),
        ({"inner_strategy": "diloco"}, "what the ranks of one replica do, such as 'fsdp'"),
    ],
)
def test_rounds_that_cannot_be(options: dict[str, Any], message: str) -> None:
    """The last of the options is named."""
    *_, (name, value) = options.items()
    with pytest.raises(ConfigError, match=re.escape(f"LocalSGD({name}={value!r}): {message}")):
        LocalSGD(**options)


def test_an_unknown_codec_is_named() -> None:
    with pytest.raises(ConfigError, match="unknown codec 'int9'"):
        LocalSGD(compression="int9")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reproducible_chunks": 4},
         "local training with reproducible_chunks=4: results depend on the mesh; leave reproducible_chunks out"),
        ({"precision": fsdpx.Precision(loss_scale="dynamic")}, "a dynamic loss scale: replicas would skip different"),
        ({"precision": "bf16-true"}, "local training with 16-bit masters: outer steps are smaller than"),
        ({"average": fsdpx.EMA()}, r"average=EMA\(decay=0.999\): the outer parameters are already a mean"),
        ({"elastic": True}, "elastic ranks take every step together; leave elastic out, or choose 'hybrid'"),
        ({"strategy": LocalSGD(fragments=9)},
         r"LocalSGD\(fragments=9\): the model has 2 pages of parameters; a smaller gro"),
        ({"strategy": LocalSGD(inner_strategy="ddp"), "mesh": Mesh(shard=2)},
         "strategy 'ddp' wants a shard axis of width 1"),
    ],
)  # fmt: skip
@on_ranks(2)
def test_what_it_cannot_serve_is_refused_on_all_ranks(comm: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(comm, "mlp", **{"strategy": "diloco", "precision": "float32", **options})


@on_ranks(2)
def test_replicas_may_be_the_mesh_of_another_strategy(comm: Communicator) -> None:
    make(comm, "mlp", LocalSGD(inner_strategy="zero2"), mesh=Mesh(replica=2), precision="float32")


@on_ranks(2)
def test_bad_calls_are_named(comm: Communicator) -> None:
    words = "layer '1': it communicates with all ranks in every step; take one that does"
    with pytest.raises(ConfigError, match=words):
        make(comm, "norms", "diloco")
    words = r"ranks differ in synchronization: rank 0 has sync_every=8, .*, rank 1 has sync_every=9, "
    with pytest.raises(ConfigError, match=words):
        make(comm, "mlp", LocalSGD(sync_every=8 + comm.rank))
    trainer = make(comm, "mlp", LocalSGD(sync_every=2, outer_optimizer=MEAN))
    steps(trainer, (8,))
    with pytest.raises(ConfigError, match="freeze: replicas have different parameters after step 1; call it at"):
        trainer.freeze("0.*")
    x, y = KNOWN["mlp"].batch(np.random.default_rng(1), 4)
    with pytest.raises(DesyncError, match="ranks called different methods: rank 0: step; rank 1: evaluate"):
        trainer.step(x, y) if comm.rank == 0 else trainer.evaluate(x, y)
    trainer.step(x, y)
    trainer.freeze("0.*")
    before = trainer.parameters()
    steps(trainer, (8, 8))
    after = trainer.parameters()
    assert_close(after["0.weight"], before["0.weight"])
    assert find_difference(after["2.weight"], before["2.weight"]) is not None


def test_a_dry_run_counts_a_round() -> None:
    dry = fsdpx.dry_run(
        nn.Sequential(nn.Linear(8, 8)), ((4, 8), "float32"), ((4, 8), "float32"), ranks=4, loss=nn.MSELoss(),
        optimizer=optim.AdamW(), strategy=LocalSGD(sync_every=1),
    )  # fmt: skip
    assert dry.report.traffic["replica", "reduce_scatter"].bytes == 72 * 4 * 3 // 4
    assert {key: dry.report.traffic[key] for key in dry.report.predicted} == dry.report.predicted


def test_fit_saves_and_goes_on(tmp_path: Path) -> None:
    """In the midst of a round. Looking for preemption leaves the steps between without messages."""
    x, y = KNOWN["mlp"].batch(np.random.default_rng(3), 96)

    def run(comm: Communicator, steps: int, folder: str) -> Bits:
        trainer, calls = make(comm, "mlp", LocalSGD(sync_every=4)), list[int]()

        def count(trainer: fsdpx.Trainer, history: Any) -> None:
            calls.append(sum(count.calls for count in trainer.report().traffic.values()))

        saved = fsdpx.CheckpointConfig(tmp_path / folder, every=6)
        with data.DataLoader(data.ArrayDataset(x, y), 8, comm=trainer.data_group, shuffle=True) as loader:
            trainer.fit(loader, steps=steps, progress=False, checkpoints=saved, callbacks=[count])
        assert steps == 6 or folder == "parts" or calls[0] == calls[1] == calls[2] < calls[3] < calls[4] == calls[5]
        return bits(trainer)

    spawn(run, 2, 6, "parts")
    assert spawn(run, 2, 12, "parts") == spawn(run, 2, 12, "whole")


def test_loops_of_ones_own() -> None:
    """Accumulation, gradients that stay local for a while, and gradients of the caller: as in synchronous training."""

    def run(comm: Communicator, strategy: Any, mesh: Mesh | None = None) -> dict[str, np.ndarray]:
        trainer = make(comm, "mlp", strategy, optimizer=optim.SGD(lr=0.1), clip_norm=1e3, mesh=mesh)
        first, second, third, (x, y) = own_parts(trainer.data_group, "mlp", (7, 7, 7, 6))
        trainer.accumulate(*first)
        with trainer.no_sync():
            trainer.accumulate(*second)
        trainer.update()
        trainer.accumulate(*first)
        trainer.step(*third)
        rows = 6 / trainer.inspect.placement.axes.replica.size  # of the mean over a replica
        trainer.backward((trainer.forward(x) - y) / rows)
        trainer.update()
        return trainer.parameters()

    want = spawn(run, 1, "ddp")[0]
    for mesh in (Mesh(replica=3, shard=1), Mesh(replica=2, shard=2)):
        for got in spawn(run, mesh.size, ALWAYS, mesh):
            assert_close(got, want, 1e-12)
