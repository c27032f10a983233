"""A mesh on the command line: parsed, filled by the strategy, refused with a reason."""

import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import fsdpx
from fsdpx import Mesh
from fsdpx.comm import Communicator
from fsdpx.comm.mesh import AXES
from fsdpx.config import PRESETS
from fsdpx.errors import ConfigError, FsdpxError, MeshError
from fsdpx.launch.show import check_axes, mesh_text, parse_recompute
from fsdpx.launch.verify import lay


@given(st.dictionaries(st.sampled_from(AXES), st.integers(1, 40)).filter(len), st.sampled_from(["", " "]))
@settings(derandomize=True, database=None, deadline=None, max_examples=examples(40))
def test_what_is_written_is_read(widths: dict[str, int], blank: str) -> None:
    text = f",{blank}".join(f"{axis}{blank}={blank}{width}" for axis, width in widths.items())
    assert Mesh.parse(text) == Mesh(**widths)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pipes=2", "--mesh pipes=2: the axes are pipe, replica, shard, tensor, for example pipe=2,tensor=2"),
        ("", "--mesh : the axes are pipe"),
        ("pipe=2,", "--mesh pipe=2,: the axes are pipe"),
        ("pipe=0", "--mesh pipe=0: pipe=0 must be a number of ranks, at least 1"),
        ("pipe", "--mesh pipe: pipe= must be a number of ranks, at least 1"),
        ("tensor=two", "tensor=two must be a number of ranks"),
        ("pipe=2,pipe=2", "--mesh pipe=2,pipe=2: pipe is named twice"),
    ],
)
def test_mistakes_name_what_was_written(text: str, message: str) -> None:
    with pytest.raises(MeshError) as caught:
        Mesh.parse(text)
    assert message in str(caught.value)


@pytest.mark.parametrize("strategy", PRESETS)
@pytest.mark.parametrize("text", ["pipe=2", "tensor=2", "replica=2", "shard=2,tensor=2", "pipe=2,tensor=4"])
def test_filled_as_the_engine_fills_it(text: str, strategy: str) -> None:
    """Or refused for the same reason."""

    def there(comm: Communicator) -> str:
        from fsdpx import nn, optim

        model = nn.GPT(31, 16, 2, 4, 8)
        options = {"loss": nn.CrossEntropy(), "optimizer": optim.SGD(lr=0.1), "strategy": strategy}
        trainer = model.as_distributed(mesh=Mesh.parse(text), comm=comm, device="shape", **options)
        return str(trainer.inspect.placement.axes.mesh)

    def outcome(made: object) -> str:
        try:
            return str(made())  # type: ignore[operator]
        except FsdpxError as error:
            return str(error)

    want = outcome(lambda: there(fsdpx.FakeCommunicator(0, 8)))
    if "wants a shard axis" not in want:  # that a mesh contradicts the strategy is the engine's to say
        assert outcome(lambda: Mesh.parse(text).filled(strategy, 8)) == want


def test_strategies_without_shards_have_all_data_ranks_as_replicas() -> None:
    assert lay(Mesh.parse("shard=2,pipe=2,tensor=2"), "ddp", 8) == Mesh(replica=2, shard=1, pipe=2, tensor=2)
    assert lay(Mesh.parse("shard=2,pipe=2,tensor=2"), "zero2", 8) == Mesh(shard=2, pipe=2, tensor=2)
    assert lay(Mesh.parse("pipe=2"), "hybrid", 8) == Mesh(replica=2, shard=2, pipe=2)
    assert mesh_text(lay(Mesh.parse("pipe=2"), "ddp", 8)) == "pipe=2 x replica=4"
    assert mesh_text(Mesh(shard=1)) == "one rank"


@pytest.mark.parametrize(
    ("text", "schedule", "sequence", "message"),
    [
        (None, "zbv", None, "--schedule zbv: the mesh has no pipe axis; say --mesh pipe=2"),
        ("tensor=2", "all", None, "--schedule all: the mesh has no pipe axis"),
        ("pipe=2", "all", "ring", "--sequence ring: the mesh has no tensor axis; say --mesh tensor=2"),
        (None, None, "all", "--sequence all: the mesh has no tensor axis"),
    ],
)
def test_what_would_mean_nothing_is_refused(
    text: str | None, schedule: str | None, sequence: str | None, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_axes(None if text is None else Mesh.parse(text), schedule, sequence)
    assert message in str(caught.value)


def test_recompute_is_a_number_or_a_word() -> None:
    assert [parse_recompute(text) for text in (None, "all", "2", "512MiB")] == [None, "all", 2, "512MiB"]
