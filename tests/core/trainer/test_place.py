"""What users call: where a rank is, run files, options and names of other libraries."""

import os
import re
import subprocess
import sys
from dataclasses import fields
from inspect import signature
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from present import needs
from threads import on_ranks
from trials import environment as variables_of_jobs
from trials import job, none_left

import fsdpx
from fsdpx import RuntimeOptions, nn, optim, spawn
from fsdpx.core.base import environment
from fsdpx.core.base import name_hints as words
from fsdpx.core.comm import Communicator, default_communicator
from fsdpx.core.comm.default_communicator import comparing_arguments
from fsdpx.core.comm.init import unwrap_message_backend
from fsdpx.core.program import StepChoices
from fsdpx.core.trainer.distribute import distribute
from fsdpx.core.trainer.initialize import _compute_local_rank, finalize
from fsdpx.errors import ConfigError

PLACES = """
import sys
import fsdpx
place = fsdpx.rank(), fsdpx.world_size(), fsdpx.local_rank()
assert "mpi4py" not in sys.modules
with fsdpx.init() as comm:
    assert place[:2] == (comm.rank, comm.size)
    assert place == (fsdpx.rank(), fsdpx.world_size(), fsdpx.local_rank())
    assert fsdpx.info()["backend"] == "node"
assert not fsdpx.is_initialized()
if comm.rank == 0: print(f"rank {comm.rank} of {fsdpx.world_size()}", fsdpx.info()["world"], flush=True)

import numpy as np
from mpi4py import MPI
from fsdpx import nn, optim

world = MPI.COMM_WORLD
half = world.Split(world.rank % 2)
if world.rank % 2 == 0:
    trainer = nn.Linear(6, 3).as_distributed(loss=nn.CrossEntropyLoss(), optimizer=optim.SGD(lr=0.1), comm=half)
    trainer.step(np.ones((2, 6)), np.array([0, 1]))
    found = fsdpx.info()
    places = fsdpx.rank(), fsdpx.world_size(), fsdpx.local_rank(), found["rank"], found["size"]
    places = *places, trainer.call_runner.rank
    print("at", world.rank, *places, flush=True)
else:
    print("at", world.rank, fsdpx.rank(), fsdpx.world_size(), fsdpx.local_rank(), flush=True)
world.Barrier()
"""


@pytest.mark.jobs
def test_places_before_init_and_of_half_of_the_ranks(tmp_path: Path) -> None:
    """Before init the launcher says, and MPI is not loaded; afterwards half of the ranks ask, and the others do not
    come."""
    done = job(tmp_path, PLACES, ranks=3)
    assert done.status == 0, done.err
    assert "rank 0 of 3 all ranks of MPI (MPI_COMM_WORLD)" in done.out
    said = [[int(word) for word in line.split()[1:]] for line in done.out.splitlines() if line.startswith("at ")]
    assert sorted(numbers[:3] + numbers[4:] for numbers in said) == [
        [0, 0, 3, 0, 3, 0], [1, 1, 3], [2, 2, 3, 2, 3, 1],
    ]  # fmt: skip
    assert sorted(numbers[3] for numbers in said) == [0, 1, 2]  # of the host
    note = "fsdpx: rank() is of all ranks of MPI (MPI_COMM_WORLD), 3 in number; the communicator given to distribute() "
    assert done.err.count(f"{note}has 2, and trainer.call_runner.rank is the rank there") == 1
    assert none_left(tmp_path)


def alone(folder: Path, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A process without a launcher of fsdpx, but with variables of another one."""
    command, env = [sys.executable, "-c", code], variables_of_jobs(**variables)
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)


def test_ranks_of_torchrun_do_not_train_alone_in_silence(tmp_path: Path) -> None:
    code = (
        "import fsdpx\n"
        "try: fsdpx.rank()\n"
        "except fsdpx.errors.LaunchError as error: print('LaunchError:', error)\n"
        "fsdpx.init()"
    )
    done = alone(tmp_path, code, RANK="1", WORLD_SIZE="2")
    assert done.returncode == 1
    for call, text in (("rank", done.stdout), ("init", done.stderr)):
        said = text.splitlines()[-1:]
        assert "LaunchError: RANK=1 and WORLD_SIZE=2 say that this process is one of 2" in "".join(said), call


def test_a_process_of_a_slurm_allocation_trains_alone_with_a_note(tmp_path: Path) -> None:
    code = "import fsdpx; print(fsdpx.init().size, fsdpx.rank())"
    for tasks, notes in (("1", 0), ("8", 1)):
        done = alone(tmp_path, code, SLURM_JOB_ID="7", SLURM_NTASKS=tasks, SLURM_PROCID="0")
        assert done.stdout == "1 0\n"
        assert done.stderr.count("fsdpx: this process is alone, in a Slurm job of 8 tasks") == notes


def test_a_launcher_that_does_not_say_which_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    fsdpx.finalize()  # what a test before has left open
    monkeypatch.setattr(default_communicator, "get_running_mpi", lambda: None)
    monkeypatch.setenv("FSDPX_EXPECT_SIZE", "4")
    with pytest.raises(ConfigError, match="FSDPX_EXPECT_SIZE does not say which rank of how many this is: call "):
        fsdpx.rank()
    monkeypatch.setenv("PMI_RANK", "3")
    monkeypatch.setenv("PMI_SIZE", "4")
    assert (fsdpx.rank(), fsdpx.world_size()) == (3, 4)
    with pytest.raises(ConfigError, match=r"local_rank is not known of all ranks that the launcher started: call "):
        fsdpx.local_rank()


def test_numbers_on_a_host_are_the_launchers_where_it_numbers_all_of_them() -> None:
    said = [("a", 1), ("b", 0), ("a", 0), ("b", None)]
    assert [_compute_local_rank(rank, said) for rank in range(4)] == [1, 0, 0, 1]  # Open MPI may number backwards
    half = [("a", 0), ("a", 2)]  # of a communicator of one's own
    assert [_compute_local_rank(rank, half) for rank in range(2)] == [0, 1]


@needs("launch")
def test_info_is_a_dict_and_its_text_a_table() -> None:
    found = fsdpx.info()
    assert isinstance(found, dict)
    assert (found["rank"], found["size"], found["local_rank"], found["backend"]) == (0, 1, 0, "local")
    assert found["device"] in ("cpu", "cuda")
    lines = str(found).splitlines()
    assert len(lines) == len(found)
    assert any(line.startswith("NumPy ") and np.__version__ in line for line in lines)


MODEL = nn.Linear(2, 2)
GIVEN: dict[str, Any] = {"loss": nn.MSELoss(), "optimizer": optim.SGD(lr=0.1)}


def test_with_closes_the_default_communicator_and_the_trainer() -> None:
    with fsdpx.init() as comm:
        assert fsdpx.is_initialized()
        with MODEL.as_distributed(**GIVEN) as trainer:
            assert fsdpx.init() is comm
            trainer.step(np.eye(2), np.eye(2))
        with pytest.raises(ConfigError, match="this trainer is closed"):
            trainer.step(np.eye(2), np.eye(2))
    assert not fsdpx.is_initialized()


@on_ranks(2)
def test_with_leaves_the_communicator_of_a_thread_rank_open(comm: Communicator) -> None:
    with fsdpx.init() as own:
        assert own is comm
    assert fsdpx.all_reduce(1.0) == 2.0


def test_after_an_exception_nothing_collective_is_called() -> None:
    """The other ranks would not come to it."""
    with pytest.raises(KeyError), fsdpx.init() as comm:  # noqa: PT012
        comm.leave = lambda: pytest.fail("closed")
        raise KeyError
    finalize()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("check", True, r"check \(rank 0: None; rank 1: True\)"),
        ("tune", False, r"tune \(rank 0: None; rank 1: False\)"),
        ("backend", "node", r"backend \(rank 0: None; rank 1: 'node'\)"),
        ("elastic", True, r"elastic \(rank 0: False; rank 1: True\)"),
    ],
)
def test_arguments_of_distribute_on_some_ranks_are_named(name: str, value: Any, words: str) -> None:
    def run(comm: Communicator) -> None:
        MODEL.as_distributed(**GIVEN, **({name: value} if comm.rank else {}))

    with pytest.raises(ConfigError, match=rf"ranks differ in {words}\. Give all ranks the same"):
        spawn(run, 2)


def test_what_ranks_agree_on_is_of_the_environment() -> None:
    found = environment.read_environment(
        {"FSDPX_CHECK": "yes", "FSDPX_NODE": "0", "FSDPX_TUNE": "again", "FSDPX_TIMEOUT": "7"}
    ).settings_required_equal_on_all_ranks
    assert found == {
        "FSDPX_CHECK": "1", "FSDPX_NODE": "0", "FSDPX_TUNE": "again", "FSDPX_WATCH": "1", "FSDPX_TIMEOUT": "7.0",
    }  # fmt: skip


def test_the_inner_call_does_not_hide_what_the_outer_one_given() -> None:
    with comparing_arguments(backend="mpi", check=True), comparing_arguments(backend=None) as inner:
        assert inner == {"backend": "None"}
        assert default_communicator.get_compared_arguments() == {"backend": "'mpi'", "check": "True"}


@pytest.mark.world
def test_variables_on_some_ranks_are_named(world: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    if world.size == 1 or "Gloo" in repr(unwrap_message_backend(world)):
        pytest.skip("needs two ranks of MPI")
    from mpi4py import MPI

    for name, value in (("CHECK", "1"), ("NODE", "0"), ("WATCH", "0"), ("TUNE", "0"), ("TIMEOUT", "300")):
        with monkeypatch.context() as patch:
            patch.delenv(f"FSDPX_{name}", raising=False)
            if world.rank == 1:
                patch.setitem(os.environ, f"FSDPX_{name}", value)
            with pytest.raises(ConfigError, match=rf"ranks differ in FSDPX_{name} \(.*rank 1: {value}.*mpiexec -x"):
                fsdpx.core.comm.open_world(comm=MPI.COMM_WORLD)


@pytest.mark.world
def test_a_communicator_given_on_some_ranks_is_named(world: Communicator) -> None:
    """Before there is a default communicator, and after."""
    if world.size == 1 or "Gloo" in repr(unwrap_message_backend(world)):
        pytest.skip("needs two ranks of MPI")
    from mpi4py import MPI

    given = {"comm": MPI.COMM_WORLD} if world.rank == 1 else {}
    before = default_communicator.get_default()
    default_communicator.set_default(None)
    words = r"ranks differ in comm \(.*rank 1: 'Intracomm'.*\)\. Give all ranks the same"
    with pytest.raises(ConfigError, match=words):
        fsdpx.init(**given)
    for _ in range(2):
        with pytest.raises(ConfigError, match=words):
            MODEL.as_distributed(**GIVEN, **given)
        fsdpx.init()
    fsdpx.finalize()
    default_communicator.set_default(before)


def test_a_value_and_its_fields_by_name_are_the_same_choice() -> None:
    def units(**options: object) -> int:
        return len(model.as_distributed(**GIVEN, **options).inspect.placement.layout.units)

    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    assert units() == 1
    assert units(runtime=RuntimeOptions(group_bytes=0)) == units(group_bytes="0MiB") == 3
    for choose in (RuntimeOptions, units):
        with pytest.raises(ConfigError, match="prefetch=-1: a number of pages"):
            choose(prefetch=-1)
    both = {"runtime": RuntimeOptions(group_bytes=0, check_finite=True), "group_bytes": 1 << 20}
    assert units(**both) == 1
    with pytest.raises(fsdpx.errors.NumericsError, match="input 'x'"):
        MODEL.as_distributed(**GIVEN, **both).step(np.full((2, 2), np.nan, "f4"), np.zeros((2, 2), "f4"))


def test_a_call_has_few_parameters_and_each_choice_is_declared_once() -> None:
    named = [*signature(fsdpx.distribute).parameters]
    assert len(named) <= 24
    assert not set(named) & {field.name for field in fields(RuntimeOptions)}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"stratgy": "ddp"}, r"distribute\(stratgy=\.\.\.\): no such option; did you mean 'strategy'\?"),
        ({"find_unused_parameters": True}, "here that is nothing: parameters without a gradient are found"),
        ({"micro_batch_size": 4}, "here that is microbatches=, the number of microbatches, not their size"),
        ({"qqqq": 1}, r"distribute\(qqqq=\.\.\.\): no such option: model, loss, optimizer"),
        ({"strategy": "FULL_SHARD"}, "unknown strategy 'FULL_SHARD': .*; here that is strategy=\"fsdp\""),
        ({"strategy": "ZeRO-3"}, 'here that is strategy="zero3"'),
        ({"strategy": "DDP"}, 'here that is strategy="ddp"'),
        ({"strategy": "ShardingStrategy.NO_SHARD"}, 'here that is strategy="ddp"'),
        ({"strategy": "hybird"}, r"did you mean 'hybrid'\?"),
        ({"group_byte": 0}, r"distribute\(group_byte=\.\.\.\): no such option; did you mean"),
        ({"runtime": {"tune": False}}, r"runtime=\{'tune': False\}: say fsdpx.RuntimeOptions\(...\)"),
    ],
)
def test_unknown_names_and_values_are_told_what_is_meant(given: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        fsdpx.distribute(MODEL, **{**GIVEN, **given})


def test_fit_knows_them_too() -> None:
    with pytest.raises(ConfigError, match=r"fit\(num_epochs=...\): no such option; here that is trainer.fit\(lo"):
        MODEL.as_distributed(**GIVEN).fit([], num_epochs=3)


LAUNCH, OFFLOAD = {"marks": needs("launch")}, {"marks": needs("offload")}


@pytest.mark.parametrize(
    ("call", "given", "odd", "line"),
    [
        ("init", (), {"init_method": "env://"}, r"; here that is fsdpx.init\(\), "),
        ("init", (), {"world_size": 4}, "; here that is mpiexec -n, or fsdpx run"),
        ("data.DataLoader", ([], 2), {"num_workers": 4}, "; here that is prefetch=, the number of batches"),
        ("Precision", (), {"param_dtype": "bf16"}, r"; here that is precision=fsdpx.Precision\(compute=...\)$"),
        ("Sharding", (), {"reshard_after_forward": False}, '; here that is strategy="fsdp" for True,'),
        ("Sharding", (), {"replicas": 2}, r"; did you mean 'replica'\?$"),
        ("Mesh", (), {"tp": 2}, r"; here that is mesh=fsdpx.Mesh\(tensor=...\)$"),
        ("Mesh", (2,), {"dp": 2}, r"; here that is mesh=fsdpx.Mesh\(replica=...\) to replicate the"),
        ("Mesh", (), {"pip": 2}, r"; did you mean 'pipe'\?$"),
        ("spawn", (print,), {"world_size": 2}, "; here that is size=$"),
        ("spawn", (print,), {"nprocs": 2}, "; here that is size=$"),
        ("spawn", (print, 2), {"args": (1,)}, ": fn, size, timeout, delays"),
        pytest.param("launch", ("train.py",), {"nproc_per_node": 2}, "; here that is per_node=$", **LAUNCH),
        pytest.param("LaunchConfig", (2,), {"nnodes": 2}, "; here that is nodes=$", **LAUNCH),
        pytest.param("OffloadConfig", ("d",), {"cpu_offload": True}, "; here that is off", **OFFLOAD),
        ("ElasticConfig", (), {"min_nodes": 2}, ": copies, every, ranks, resize$"),
    ],
)
def test_other_calls_know_them_too(call: str, given: Any, odd: dict[str, Any], line: str) -> None:
    (option,) = odd
    with pytest.raises(ConfigError, match=rf"^{call.removeprefix('data.')}\({option}=...\): no such option{line}"):
        attrgetter(call)(fsdpx)(*given, **odd)


def test_axes_in_a_text_are_known_too() -> None:
    with pytest.raises(ConfigError, match=r"^--mesh pp=2: the axes are .*; here that is mesh=fsdpx.Mesh\(pipe=...\)$"):
        fsdpx.Mesh.parse("pp=2")


@pytest.mark.parametrize("name", words.CALLS_ELSEWHERE)
def test_a_trainer_says_what_others_call_otherwise(name: str) -> None:
    trainer = MODEL.as_distributed(**GIVEN)
    with pytest.raises(AttributeError, match=re.escape(f"no attribute {name!r}; use {words.CALLS_ELSEWHERE[name]}")):
        getattr(trainer, name)


def test_options_that_differ_are_printed_alone() -> None:
    def run(comm: Any) -> None:
        MODEL.as_distributed(**GIVEN, comm=comm, seed=comm.rank, check_finite=comm.rank == 1)

    line = r"^ranks differ in options: rank 0 has seed=0, check_finite=False, rank 1 has seed=1, check_finite=True\n"
    with pytest.raises(ConfigError, match=line.replace(r"\n", "")) as caught:
        spawn(run, 2)
    assert "clip_norm" not in str(caught.value)


def test_an_optimizer_of_pytorch_is_named_with_its_counterpart() -> None:
    torch = pytest.importorskip("torch")
    weights = [torch.zeros(2, requires_grad=True)]
    theirs = torch.optim.AdamW(weights, lr=0.5, weight_decay=0.1)
    for given, line in (
        (theirs, r"^torch\.optim\.AdamW: use fsdpx\.optim\.AdamW\(lr=0\.5, weight_decay=0\.1\)$"),
        (torch.optim.lr_scheduler.CosineAnnealingLR(theirs, 9), r"^torch.*CosineAnnealingLR: .*schedules\.Cosine\("),
        (torch.optim.Rprop(weights), r"^torch\.optim\.Rprop is not in fsdpx: choose one of .*AdamW"),
    ):
        with pytest.raises(ConfigError, match=line):
            MODEL.as_distributed(loss=nn.MSELoss(), optimizer=given)


def test_the_page_of_names_has_the_whole_table() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "translations.md").read_text()
    for table in (words.NAMES_ELSEWHERE, words.CALLS_ELSEWHERE):
        by_equivalent: dict[str, list[str]] = {}
        for word, ours in table.items():
            by_equivalent.setdefault(ours, []).append(f"`{word}`")
        assert "\n".join(f"| {', '.join(them)} | {ours} |" for ours, them in by_equivalent.items()) in page


def test_a_choice_about_a_step_is_declared_once() -> None:
    """`StepChoices` declares it: recipes, placements and requests have it, `distribute` takes it, ranks compare it."""
    values = {"seed": 3, "clip_norm": 0.5, "reproducible_chunks": 4}
    assert [one.name for one in fields(StepChoices)] == [*values], "a value for each, other than the default"
    explained = [line.strip() for line in (distribute.__doc__ or "").splitlines()]
    for name, value in values.items():
        default = getattr(StepChoices(), name)
        assert signature(distribute).parameters[name].default == default
        assert any(line.startswith(f"{name} : ") for line in explained)

        def run(comm: Communicator, name: str = name, value: Any = value, default: Any = default) -> None:
            trainer = MODEL.as_distributed(**GIVEN, comm=comm, **{name: value})
            request = trainer._session.make_program_request("step", 1)
            assert getattr(request.choices, name) == getattr(trainer.inspect.placement.options, name) == value
            with pytest.raises(ConfigError, match=name):
                MODEL.as_distributed(**GIVEN, comm=comm, **{name: value if comm.rank else default})

        spawn(run, 2)
        for wrong in (-1, "many"):
            with pytest.raises(ConfigError, match=f"{name}="):
                MODEL.as_distributed(**GIVEN, **{name: wrong})
