"""Train a byte-level GPT on real text: the main example of the documentation.

    mpiexec -n 4 python -m fsdpx.examples.gpt --strategy fsdp --size tiny --steps 300
    mpiexec -n 4 python -m fsdpx.examples.gpt --mesh pipe=2,tensor=2 --sequence parallel --recompute all
    mpiexec --with-ft ulfm -n 4 python -m fsdpx.examples.gpt --elastic --chunks 32 --chaos "kill 0@2000"   # Open MPI

By default, the text is the source code of Python's standard library, which every machine has. Each run writes a folder
in runs/; `--resume` continues the newest run."""

import argparse
import math
import sys
from collections.abc import Sequence
from typing import Any

import fsdpx
from fsdpx import CheckpointConfig, data, nn, optim
from fsdpx.core.base import environment
from fsdpx.core.base.messages import format_count
from fsdpx.errors import ConfigError
from fsdpx.examples._cli import nonnegative_int, positive_int, run_main
from fsdpx.examples.models import SIZES, make_gpt
from fsdpx.ext.observe.folder import RunFolder, agree_on_run_folder_and_last_arguments
from fsdpx.launch.run_results import format_summary_line, save_and_print_results
from fsdpx.models.generation.terminal import TerminalStream, decode_bytes
from fsdpx.testing.chaos import inject_faults, parse_faults


def make_parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m fsdpx.examples.gpt", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    p.add_argument("--data", default=None, help="a file or folder of text (default: Python's standard library)")
    p.add_argument("--strategy", default="fsdp", help="ddp, zero1, zero2, zero3, fsdp, hybrid, local_sgd or diloco")
    p.add_argument("--mesh", default=None, help="widths of axes, such as pipe=2,tensor=2; also replica and shard")
    p.add_argument(
        "--schedule", default="1f1b", help="pipeline schedule: gpipe, 1f1b, interleaved, zb-h1, zb-h2, zbv, or a file"
    )
    p.add_argument("--sequence", default=None, help="over the tensor axis: parallel, ulysses or ring")
    p.add_argument("--recompute", default=None, help="all, attention, k (every k-th unit), or bytes such as 512MiB")
    p.add_argument("--size", default="tiny", choices=SIZES, help="model size")
    p.add_argument("--steps", type=positive_int, default=300, help="optimizer steps")
    p.add_argument("--batch", type=positive_int, default=32, help="sequences of the global batch, over all data ranks")
    p.add_argument(
        "--microbatches",
        "--accumulate",
        type=positive_int,
        help="per data rank and step (default: 1; in a pipeline 4 per rank)",
    )
    p.add_argument("--dtype", default="float32", help="float64, float32, bf16, bf16-true or fp16")
    p.add_argument(
        "--chunks", type=positive_int, help="equal parts of the batch for bit-identical results at any world size"
    )
    p.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    p.add_argument("--clip", type=float, default=1.0, help="largest global gradient norm")
    p.add_argument("--dropout", type=float, default=0.0)
    p.add_argument("--seed", type=nonnegative_int, default=0)
    p.add_argument("--validate", type=positive_int, default=100, help="steps between validations")
    p.add_argument("--validation-batches", type=positive_int, default=8, help="batches per validation")
    p.add_argument("--elastic", action="store_true", help="continue when ranks die, leave or join (docs: elastic)")
    p.add_argument("--copies", type=nonnegative_int, default=1, help="copies of each rank's state on other ranks")
    p.add_argument("--ranks", type=positive_int, default=None, help="ranks that train at first; the others wait")
    p.add_argument("--resize", default=None, help="file with the number of ranks that should train")
    p.add_argument("--chaos", default="", help="faults to inject, such as 'kill 2@900, stop 0@1500' (rank@action)")
    p.add_argument("--run", default=None, help="folder of the run (default: runs/gpt-DATE-TIME)")
    p.add_argument("--resume", action="store_true", help="continue the run in --run, or the newest run")
    p.add_argument("--no-save", action="store_true", help="write no run folder")
    p.add_argument(
        "--keep", type=positive_int, default=2, help="checkpoints to keep; one is saved after each validation"
    )
    p.add_argument("--sample", type=nonnegative_int, default=200, help="bytes of text to generate at the end")
    p.add_argument(
        "--trace",
        nargs="?",
        const="",
        help="keep a trace of the last steps, in this folder (default: trace/ of the run)",
    )
    p.add_argument("--verbose", action="store_true", help="print messages and time by kind at the end")
    p.add_argument("--hash", action="store_true", help="print the SHA-256 of all parameters at the end")
    p.add_argument("--device", default="cpu", help="cpu or cuda")
    p.add_argument("--no-node", action="store_true", help="use MPI messages instead of shared memory within a host")
    p.add_argument("--no-tune", action="store_true", help="use defaults instead of measuring")
    return p


def make_optimizer(lr: float, steps: int) -> optim.AdamW:
    """Build AdamW. Over `steps` steps, the learning rate first rises linearly, and then falls to 0 along a cosine."""
    warm = max(min(steps // 10, 100), 1)
    schedule = optim.schedules.WarmUp(warm, optim.schedules.Cosine(lr, max(steps - warm, 1), final=0.0))
    return optim.AdamW(lr=schedule, betas=(0.9, 0.98), weight_decay=0.1, groups=optim.no_decay)


def make_loader_and_validation_batches(
    args: argparse.Namespace, comm: Any, prints: bool
) -> tuple[data.DataLoader, list[Any]]:
    """Return the data loader of the training split, and a list of fixed batches of the validation split.

    `comm` is the communicator of the data ranks, `trainer.data_group`; ranks that differ only on the pipeline or
    tensor axis read the same samples. `prints` says whether this rank prints."""
    source, seq_len = args.data or data.python_stdlib_folder(), SIZES[args.size].seq_len
    train = data.TextDataset(source, seq_len, split="train")
    held = data.TextDataset(source, seq_len, split="validation")
    loader = data.DataLoader(
        train, args.batch, comm=comm, shuffle=True, seed=args.seed, drop_last=True, reproducible_chunks=args.chunks
    )
    check = data.DataLoader(
        held, args.batch, comm=comm, shuffle=True, seed=1, drop_last=True, reproducible_chunks=args.chunks
    )
    with check:
        batches = [batch for batch, _ in zip(check, range(args.validation_batches), strict=False)]
    if prints:
        print(
            f"text: {source}, {len(train) * seq_len:,} bytes to train on, {len(held) * seq_len:,} held out", flush=True
        )
    return loader, batches


def generate_and_print_text(trainer: fsdpx.Trainer, count: int, seed: int, cache: bool, prompt: str = "\ndef ") -> None:
    """Generate `count` bytes of text, and print them on rank 0 as they are generated. If `cache` is True, attention
    keys and values are cached. Collective."""
    prints = trainer.call_runner.rank == 0
    printed = TerminalStream(decode_bytes, lambda text: print(text, end="", flush=True) if prints else None)
    printed.write(f"\nsample:\n{prompt}")
    trainer.generate(list(prompt.encode()), count, temperature=0.8, seed=seed, stream=printed, cache=cache)
    printed.finish_line()


def make_trainer(args: argparse.Namespace) -> fsdpx.Trainer:
    """Build the trainer with the options from the command line. Collective."""
    elastic = fsdpx.ElasticConfig(copies=args.copies, ranks=args.ranks, resize=args.resize) if args.elastic else False
    return make_gpt(args.size, args.dropout).as_distributed(
        loss=nn.CrossEntropyLoss(),
        optimizer=make_optimizer(args.lr, args.steps),
        strategy=args.strategy,
        mesh=None if args.mesh is None else fsdpx.Mesh.parse(args.mesh),
        schedule=args.schedule,
        sequence=args.sequence,
        recompute=int(args.recompute) if args.recompute and args.recompute.isdecimal() else args.recompute,
        microbatches=args.microbatches,
        precision=args.dtype,
        reproducible_chunks=args.chunks,
        clip_norm=args.clip,
        seed=args.seed,
        device=args.device,
        tune=False if args.no_tune else None,
        elastic=elastic,
        trace=args.trace,
    )


MEANING = """\
In the lines below: loss: of the step's batch, in nats per byte (a model that knows nothing: ln 256 = 5.55); tokens/s:
bytes of all ranks per second of training, without validation and saving; lr: learning rate of the step; norm: length of
the whole gradient before it is clipped to {clip:g}"""
PASSING = ("chaos", "hash", "no_save", "resume", "run", "trace", "verbose")
"""Arguments that apply only to the current start of the script. `--resume` does not restore their earlier values."""


def parse_arguments_and_open_run(argv: Sequence[str] | None, comm: Any) -> tuple[argparse.Namespace, RunFolder | None]:
    """Parse the command line, and return the arguments and the run folder (None with --no-save). With --resume, the
    defaults of most options are their values in the resumed run.

    Rank 0 writes the arguments to the folder. Collective."""
    made = make_parser()
    args = made.parse_args(argv)
    if args.no_save:
        return args, None
    folder, before = agree_on_run_folder_and_last_arguments("gpt", args.run, args.resume, comm)
    made.set_defaults(**{name: value for name, value in before.items() if name not in PASSING})
    args = made.parse_args(argv)
    if comm.rank == 0:
        folder.write_config({name: value for name, value in vars(args).items() if name not in PASSING}, comm.size)
    return args, folder


def main(argv: Sequence[str] | None = None) -> int:
    """Train and validate the model, save the results and print a sample of text. Return the exit status."""
    comm = fsdpx.init("mpi" if make_parser().parse_args(argv).no_node else None)
    args, folder = parse_arguments_and_open_run(argv, comm)
    if args.trace == "":
        if folder is None:
            raise ConfigError("--trace: with --no-save there is no folder of the run; name one, --trace FOLDER")
        args.trace = str(folder.trace_folder)
    trainer = make_trainer(args)
    inject_faults(trainer, parse_faults(args.chaos), environment.read_environment().restart)
    loader, validation = make_loader_and_validation_batches(args, trainer.data_group, prints=comm.rank == 0)
    if comm.rank == 0:
        placed = trainer.inspect.placement
        count, on = placed.layout.size, f" ({placed.axes.mesh})" if args.mesh else ""
        ranks = format_count(comm.size, "rank")
        print(
            f"model: {args.size}, {count:,} parameters; {args.strategy} on {ranks}{on}, {args.dtype}\n"
            f"chosen: {placed.tuning}\n{MEANING.format(clip=args.clip)}",
            flush=True,
        )
    trainer.inspect.reset_counters()  # the report should count only the training, not the setup
    with loader:
        history = trainer.fit(
            loader,
            epochs=None,
            steps=args.steps,
            validation=validation,
            every=args.validate,
            count=lambda x: x.size,
            unit="tokens",
            log=folder.path if folder else None,
            checkpoints=CheckpointConfig(folder.checkpoint_folder, every=args.validate, keep=args.keep)
            if folder
            else None,
        )
    # make the report before generating text, because generating text raises the memory peak that the report shows
    report, summary = trainer.report().with_footprint(), trainer.inspect.gather_summary()
    if trainer.call_runner.rank == 0:
        loss = history.validation[-1][1]
        print(f"\n{format_summary_line(history, 'tokens')} = {loss / math.log(2):.3f} bits per byte", flush=True)
    if folder is not None:
        save_and_print_results(trainer, history, folder, summary, f"--resume --steps {2 * history.steps}")
    if args.sample:
        generate_and_print_text(trainer, args.sample, args.seed, cache=args.sequence is None)
    if trainer.call_runner.rank == 0:
        print(f"\n{report if args.verbose else report.memory_text}\n")
        peaks = ", ".join(f"{one.peak_rss / 2**20:,.0f} MiB" for one in summary.reports)
        print(f"{summary}\n\n" if args.verbose else "", end="")
        print(f"peak memory per rank: {peaks}", flush=True)
    if args.hash:
        digest = trainer.inspect.compute_fingerprint()
        if trainer.call_runner.rank == 0:
            print(f"sha256 {digest}")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
