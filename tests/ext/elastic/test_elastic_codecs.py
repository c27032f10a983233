"""What codecs keep on elastic ranks: moved when they leave and join, copied, and as it was where a step is repeated."""

import numpy as np
import pytest
from bits import bits
from jobs_threads import BATCHES, Kill, Killer, make

from fsdpx import ElasticConfig, Mesh, spawn
from fsdpx.core.checkpoint.local_shards import CodecMemoryName, iterate_codec_memory_to_write

OPTIONS = {"compression": "int8", "reproducible_chunks": None, "precision": "float32"}


def owed(trainer):
    """What codecs of all ranks owe, each element weighed by its place."""
    mine = 0.0
    for piece in iterate_codec_memory_to_write(trainer.inspect.engine.state) if trainer.call_runner.is_training else ():
        name = CodecMemoryName.parse(piece.name)
        assert name is not None
        assert name.memory == "error"
        places = np.concatenate([np.arange(*run) for block in piece.iterate_blocks(1 << 30) for run in block.runs])
        mine += float(np.sum(np.cos(places + len(name.tensor)) * piece.array, dtype=np.float64))
    return sum(trainer.call_runner.world.all_gather_object(mine))


@pytest.mark.parametrize("mesh", [None, Mesh(replica=None, shard=2)])
def test_ranks_leave_and_join_and_nothing_is_lost(mesh):
    """fsdp and hybrid: also on one rank alone, which pays back in its next step."""

    def body(comm):
        trainer = make(comm, "fsdp", mesh=mesh, elastic=ElasticConfig(ranks=2, every=1), **OPTIONS)
        found = []
        for number, (x, y) in enumerate(BATCHES):
            before = owed(trainer)
            sizes = {1: 4, 2: 2, 3: 4} if mesh else {1: 4, 2: 3, 3: 1}
            if number in sizes:
                trainer.call_runner.resize_to(sizes[number])
                found.append((before, owed(trainer)))
            trainer.step(x, y)
        return found, owed(trainer), bits(trainer)

    ranks = spawn(body, 4, survive=True, timeout=60)
    assert len({str(one) for one in ranks}) == 1
    pairs, end, _ = ranks[0]
    for before, after in pairs:
        assert before == pytest.approx(after, rel=1e-5)
        assert abs(before) > 1e-6
    assert (end == 0) is (mesh is None)


@pytest.mark.parametrize(("strategy", "at"), [("fsdp", "UPDATE1"), ("ddp", "NORM")])
def test_a_dead_rank_leaves_what_it_owed(strategy, at):
    """Rank 1 dies in the third step, after it counts or before. The others end with the bits of 4 ranks of which one
    left where they took up again: what was owed there is there, and nothing of the broken step. Under ddp there are no
    copies, and what rank 1 owed is lost."""

    def body(comm, kills, leave):
        trainer = make(comm, strategy, elastic=ElasticConfig(every=1), **OPTIONS)
        trainer.inspect.engine.add_observer(Killer(comm.rank, kills))
        for number, (x, y) in enumerate(BATCHES):
            if number == leave:
                for key, array in trainer.call_runner._coordinator._position.before.items():
                    assert key.kind == "memory"
                    array *= comm.rank != 1 or strategy == "fsdp"
                trainer.call_runner.resize_to(3)
            trainer.step(x, y)
        return owed(trainer), bits(trainer), trainer.call_runner.recoveries[0].step

    struck = [end for end in spawn(body, 4, [Kill(1, at, 2)], -1, survive=True, timeout=60) if end is not None]
    assert len(struck) == 3
    calm = spawn(body, 4, [], struck[0][2], survive=True, timeout=60)
    assert {str(one) for one in struck} == {str(one) for one in calm}
