"""What dry runs tell of models that are frozen in part."""

import pytest

from fsdpx import Mesh, dry_run, nn, optim


def chain(layers, frozen, **options):
    """A dry run of so many equal layers, the first of which are frozen."""
    model, batch = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers))), ((16, 64), "float32")
    options = {"ranks": 2, "strategy": "fsdp", "group_bytes": 0, **options, "frozen": [f"{i}.*" for i in range(frozen)]}
    return dry_run(model, batch, batch, loss=nn.MSELoss(), optimizer=optim.SGD(lr=0.1), **options)


@pytest.mark.parametrize("group_bytes", [0, 1 << 20])
@pytest.mark.parametrize("recompute", [None, "all"])
def test_a_deeper_trunk_keeps_nothing_more(recompute, group_bytes):
    options = {"recompute": recompute, "group_bytes": group_bytes}
    assert chain(6, 4, **options).activations == chain(12, 10, **options).activations
    if recompute is None:
        assert chain(12, 10, **options).activations < chain(12, 0, **options).activations / 2


def test_a_trunk_is_gathered_once_and_its_stage_hears_nothing():
    whole, spared = chain(6, 0).report.traffic, chain(6, 4).report.traffic
    assert spared["shard", "all_gather"].calls < whole["shard", "all_gather"].calls
    assert spared["shard", "reduce_scatter"].calls == 2
    for schedule in ("1f1b", "zb-h1"):
        options = {"mesh": Mesh(pipe=2), "microbatches": 4, "schedule": schedule}
        first, last = (chain(6, 4, rank=rank, **options) for rank in (0, 1))
        assert ("pipe", "recv") not in first.report.traffic
        assert ("pipe", "send") not in last.report.traffic
        assert not {"B", "I", "W"} & {a.op for a in first.program.actions}
        for run in (first, last):
            ran, known = (
                {k: v.calls for k, v in counts.items() if k[0] == "pipe"}
                for counts in (run.report.traffic, run.report.predicted)
            )
            assert ran == known
