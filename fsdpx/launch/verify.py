"""`verify`: check, tensor by tensor, that training on N ranks gives the same parameters as training in a single
process."""

import argparse
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from fsdpx import nn, optim
from fsdpx.core.base.config import PRESETS, resolve_sharding
from fsdpx.core.base.dataclass import dataclass, replace
from fsdpx.core.base.messages import format_count, reporting_if_slow, wrap_for_terminal
from fsdpx.core.base.option_names import PrecisionName, ScheduleName, SequenceMode, Strategy
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.local import make_single_rank_communicator
from fsdpx.core.comm.mesh import Mesh
from fsdpx.core.program import SCHEDULES
from fsdpx.core.state.gradients import get_chunks_of_rank
from fsdpx.core.trainer.initialize import init
from fsdpx.core.trainer.recipe import DistributionChoices
from fsdpx.core.trainer.trainer import Trainer
from fsdpx.errors import ConfigError
from fsdpx.ext.observe.record import RankRecord, ValueRecorder
from fsdpx.launch.diff import find_first_tensor_difference
from fsdpx.launch.show import format_mesh, parse_recompute, require_axes_for_options
from fsdpx.nn.tensor_plan import SEQUENCES
from fsdpx.testing.compare import find_difference

__all__ = ["verify", "verify_training_on_communicator"]

TOLERANCE = {"float64": 1e-12, "float32": 1e-5}
VOCAB, SEQ_LEN = 61, 12
FULL_BATCH, LAST_BATCH = 13, 3  # the last batch is small, to test ranks that get no samples

TrainingResult = tuple[list[float], dict[str, Any], str]


@dataclass(frozen=True)
class VerifySize:
    """Size of the small GPT that is trained. It has enough layers for the pipeline stages of the mesh, and enough
    heads and tokens per sample for the tensor axis."""

    width: int = 24
    layers: int = 2
    heads: int = 3
    seq_len: int = SEQ_LEN

    @classmethod
    def for_mesh(cls, mesh: Mesh | None) -> "VerifySize":
        """Return the model size to use on a mesh. None stands for a mesh without pipeline and tensor axes."""
        if mesh is None:
            return cls()
        pipe, tensor = mesh.width_of("pipe"), mesh.width_of("tensor")
        heads = max(4, tensor)
        return cls(6 * heads, max(4, 2 * pipe), heads, -(-SEQ_LEN // tensor) * tensor)


@dataclass(frozen=True)
class VerifyCase:
    """Options of one training run that is compared with training in a single process.

    Attributes
    ----------
    strategy, precision, schedule, sequence, microbatches : as for `fsdpx.distribute`
    mesh : the mesh; if None, the default mesh of the strategy
    recompute : the command-line value of --recompute
    chunks : number of chunks into which the batch is divided for reproducible results, which must then be
        bit-identical; if None, results need only agree within a tolerance
    steps : number of training steps
    """

    strategy: Strategy
    precision: PrecisionName
    mesh: Mesh | None = None
    schedule: ScheduleName | None = None
    sequence: SequenceMode | None = None
    recompute: str | None = None
    chunks: int | None = None
    microbatches: int | None = None
    steps: int = 6

    @property
    def tolerance(self) -> float:
        """Largest allowed relative difference. It is 0 if results must be bit-identical. This is the case with
        reproducible chunks, unless a tensor axis splits sums."""
        exact = self.chunks is not None and (self.mesh is None or self.mesh.width_of("tensor") == 1)
        return 0.0 if exact else TOLERANCE[self.precision]

    @property
    def single_process_case(self) -> "VerifyCase":
        """The reference case: the same training in a single process."""
        return VerifyCase("ddp", self.precision, chunks=self.chunks, steps=self.steps)

    def __str__(self) -> str:
        """Return a label with the mesh, schedule, sequence mode and recomputation, omitting any that are not set."""
        parts = [] if self.mesh is None else [format_mesh(self.mesh)]
        parts += [self.schedule or "1f1b"] if self.mesh is not None and self.mesh.width_of("pipe") > 1 else []
        parts += [] if self.sequence is None else [f"sequence {self.sequence}"]
        parts += [] if self.recompute is None else [f"recompute {self.recompute}"]
        return "".join(f", {part}" for part in parts)


def verify(args: argparse.Namespace) -> int:
    """Compare training on all ranks with training in a single process. Return 0 if all tensors agree, else 1. Invalid
    arguments raise an error before the ranks connect to each other. Collective."""
    if args.strategy != "all":
        resolve_sharding(DistributionChoices(args.strategy).strategy_within_replica(1), 1)
    _list_precisions(args.precision)
    return verify_training_on_communicator(init("mpi" if args.no_node else None), args)


def verify_training_on_communicator(comm: Communicator, args: argparse.Namespace) -> int:
    """Run `verify` on the ranks of `comm`. Return 0 if all tensors agree, else 1. Collective."""
    good = True
    cases = list_cases(args, comm.size)
    for number, case in enumerate(cases, 1):
        good &= _train_and_compare_case(comm, case, VerifySize.for_mesh(case.mesh), f"{number}/{len(cases)}")
    return 0 if good else 1


def list_cases(args: argparse.Namespace, ranks: int) -> list[VerifyCase]:
    """Return one case for each combination of the requested strategies, precisions, schedules and sequence modes."""
    strategies: list[Any] = list(PRESETS) if args.strategy == "all" else [args.strategy]
    formats = _list_precisions(args.precision)
    mesh = None if args.mesh is None else Mesh.parse(args.mesh)
    require_axes_for_options(mesh, args.schedule, args.sequence)
    schedules: list[Any] = list(SCHEDULES) if args.schedule == "all" else [args.schedule]
    sequences: Sequence[Any] = SEQUENCES if args.sequence == "all" else (args.sequence,)
    return [
        VerifyCase(
            strategy, precision, None if mesh is None else fill_in_mesh_widths(mesh, strategy, ranks), schedule,
            sequence, args.recompute, args.chunks, args.microbatches, args.steps,
        )
        for strategy, precision, schedule, sequence in product(strategies, formats, schedules, sequences)
    ]  # fmt: skip


def _list_precisions(precision: str) -> list[Any]:
    formats = list(TOLERANCE) if precision == "all" else [precision]
    if not set(formats) <= set(TOLERANCE):
        raise ConfigError(f"--precision {precision}: choose float64, float32 or all")
    return formats


def fill_in_mesh_widths(mesh: Mesh, strategy: Strategy, ranks: int) -> Mesh:
    """Return the mesh with the width of each axis filled in. For "ddp", the whole data axis becomes the replica
    axis."""
    full = mesh.fill_from_strategy(DistributionChoices(strategy, mesh).strategy_within_replica(ranks), ranks)
    if strategy in PRESETS and PRESETS[strategy].shard == 1:
        return replace(full, replica=full.width_of("data"), shard=1)
    return full


def _train_and_compare_case(comm: Communicator, case: VerifyCase, size: VerifySize, number: str) -> bool:
    """Train one case, and compare the results with training in a single process. Print the outcome, and return whether
    the results agree. `number` is the number of the case, such as "1/6". Collective."""
    verdict, printed = None, ""
    with reporting_if_slow(comm.rank == 0, f"training case {number}", None) as count:
        count("with all ranks")
        losses, got, text = _train_case(comm, case, size)
        if comm.rank == 0:
            count("in one process")
            one_losses, want, _ = _train_in_one_process(case.single_process_case, size)
            verdict = _compare_tensors(want, got, one_losses, losses, case.tolerance)
            what = f"{case.strategy} {case.precision}, {format_count(comm.size, 'rank')}{case}{text}"
            printed = f"{'OK' if verdict[0] else 'DIFFERS'}  {what}: {verdict[1]}"
    if comm.rank == 0:
        print(wrap_for_terminal(printed), flush=True)
    good = bool(comm.all_gather_value(verdict)[0][0])
    if not good:
        _retrain_and_print_first_difference(comm, case, size)
    return good


def _retrain_and_print_first_difference(comm: Communicator, case: VerifyCase, size: VerifySize) -> None:
    """Train again while recording all values, and print the first value that differs from training in a single
    process. Collective."""
    everyone = comm.all_gather_value(_train_and_record(comm, case, size))
    if comm.rank == 0:
        print(
            find_first_tensor_difference(
                [_train_and_record(make_single_rank_communicator(), case.single_process_case, size)],
                everyone,
                case.tolerance,
            ),
            flush=True,
        )


def _train_and_record(comm: Communicator, case: VerifyCase, size: VerifySize) -> RankRecord:
    """Train while recording all computed values, and return this rank's record. Collective."""
    trainer = _make_small_gpt_trainer(comm, case, size)
    recorder = ValueRecorder(trainer.inspect.engine, case.steps)
    for x, y in _iterate_batches(trainer.data_group, case.steps, case.chunks, size.seq_len):
        trainer.step(x, y)
    trainer.close()
    return recorder.kept


@cache
def _train_in_one_process(case: VerifyCase, size: VerifySize) -> TrainingResult:
    return _train_case(make_single_rank_communicator(), case, size)


def _train_case(comm: Communicator, case: VerifyCase, size: VerifySize) -> TrainingResult:
    """Train one case, and return (losses, full parameters, text). If the case uses reproducible chunks, the text
    contains a fingerprint of the parameters; otherwise, it is empty. Collective."""
    trainer = _make_small_gpt_trainer(comm, case, size)
    losses = [
        trainer.step(x, y) for x, y in _iterate_batches(trainer.data_group, case.steps, case.chunks, size.seq_len)
    ]
    text = "" if case.chunks is None else f", chunks {case.chunks}, sha256 {trainer.inspect.compute_fingerprint()[:16]}"
    parameters = trainer.parameters()
    trainer.close()
    return losses, parameters, text


def _make_small_gpt_trainer(comm: Communicator, case: VerifyCase, size: VerifySize) -> Trainer:
    """Return the trainer of a small GPT with tied weights and gradient clipping. The model has dropout unless results
    must be bit-identical."""
    exact = case.chunks is not None
    model = nn.GPT(VOCAB, size.width, size.layers, size.heads, size.seq_len, tie=True, dropout=0.0 if exact else 0.1)
    return model.as_distributed(
        loss=nn.CrossEntropyLoss(),
        optimizer=optim.AdamW(lr=1e-3, eps=1e-6) if case.precision == "float64" else optim.SGD(lr=0.05, momentum=0.9),
        strategy=case.strategy,
        mesh=case.mesh,
        comm=comm,
        precision=case.precision,
        microbatches=1 if exact else _count_microbatches(case),
        reproducible_chunks=case.chunks,
        clip_norm=0.5,
        group_bytes=4096,
        seed=7,
        schedule=case.schedule or "1f1b",
        sequence=case.sequence,
        recompute=parse_recompute(case.recompute),
    )


def _count_microbatches(case: VerifyCase) -> int:
    pipe = 1 if case.mesh is None else case.mesh.width_of("pipe")
    return 2 * pipe if case.microbatches is None else case.microbatches


def _iterate_batches(comm: Communicator, steps: int, chunks: int | None, seq_len: int) -> Iterator[tuple[Any, Any]]:
    """Yield this rank's samples of each global batch, as (inputs, targets). The global batches do not depend on the
    number of ranks. If `chunks` is None, the last global batch is smaller than the others."""
    rng = np.random.Generator(np.random.Philox(11))
    for step in range(steps):
        rows = 2 * chunks if chunks else FULL_BATCH if step < steps - 1 else LAST_BATCH
        tokens = rng.integers(0, VOCAB, (rows, seq_len + 1))
        tokens[:, 1::5] = -100 if step % 2 else tokens[:, 1::5]  # in odd steps, include labels that the loss ignores
        if chunks:
            mine, each = get_chunks_of_rank(chunks, comm.rank, comm.size), rows // chunks
            part = slice(mine.start * each, mine.stop * each)
        else:
            part = slice(rows * comm.rank // comm.size, rows * (comm.rank + 1) // comm.size)
        yield np.abs(tokens[part, :-1]) % VOCAB, tokens[part, 1:]


def _compare_tensors(
    want: dict[str, Any], got: dict[str, Any], want_losses: list[float], got_losses: list[float], tolerance: float
) -> tuple[bool, str]:
    """Return whether all tensors and losses agree within `tolerance`, and a line of text about the largest difference.
    Differences are relative to the largest element of a tensor."""
    ours = {"the losses": np.array(got_losses), **{name: got[name] for name in want}}
    worst = find_difference(
        ours, {"the losses": np.array(want_losses), **want}, -1.0
    )  # with a tolerance of -1 every element counts as different, so the worst one is returned
    error, where = (0.0, "the losses") if worst is None else (worst.relative, worst.tensor)
    if error > tolerance:
        return False, f"{where} differs by {error:.2e} relative, more than {tolerance:g}"
    return True, f"largest relative difference {error:.2e} ({where}), allowed {tolerance:g}"
