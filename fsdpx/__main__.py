"""The command line of fsdpx: python -m fsdpx info, doctor, bench, run, train, show, plan, ckpt, verify, diff, ..."""

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from fsdpx.core.base.version import __version__
from fsdpx.errors import FsdpxError

Options = Callable[[argparse.ArgumentParser], None] | str
"""Function that adds options to the parser of a command, or a string "module:function" that names the function (see
`_import_command`)."""


class Command(NamedTuple):
    """A command of the command-line interface.

    Attributes
    ----------
    help : one line that describes the command
    function : "module:function" in fsdpx/launch; the function returns an exit status, or text to print
    options : function that adds the command's options to a parser
    example : arguments of an example. If the first word is `mpiexec`, the example begins with
        `mpiexec -n 4 python -m fsdpx`, otherwise with `python -m fsdpx`
    """

    help: str
    function: str
    options: Options
    example: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command given by the arguments and return its exit status."""
    args = make_parser().parse_args(argv)
    if args.command is None:
        make_parser().print_help(sys.stderr)
        return 2
    try:
        status = _run_command(args)
        sys.stdout.flush()
        return status
    except FsdpxError as error:
        if _is_connected_rank():
            raise error.with_traceback(None) from None  # the job's excepthook prints the error and ends all ranks
        return _print_error_on_first_rank(f"fsdpx {args.command}: {error}")
    except KeyboardInterrupt:
        if _is_connected_rank():
            raise
        return 128 + 2  # the exit status for SIGINT; users who press Ctrl-C need no message
    except BrokenPipeError:  # the program that reads the output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # the exit status for SIGPIPE, which Windows does not define


def _expand_path(text: str) -> Path:
    """Expand ~ in a path, as `fsdpx.core.base.safe_files.expanduser` does. That function is not used here, because
    importing its module would slow down the start of a job."""
    return Path(os.path.expanduser(text))


class CommandParser(argparse.ArgumentParser):
    """Argument parser that reports a mistake in one line. Unlike argparse, it does not list all options.

    `options` is a function that adds the options of a command. The function is imported only if its command was
    requested, because a launcher should not have to import training code."""

    def __init__(self, *args: Any, options: Options | None = None, **more: Any) -> None:
        super().__init__(*args, **{**more, "allow_abbrev": False})
        self._options = options

    def parse_known_args(self, *args: Any, **more: Any) -> Any:
        """Parse the arguments of a command. This method reports unknown options itself, so that it can suggest similar
        options of the command."""
        options, self._options = self._options, None
        if options is not None:
            (_import_command(options) if isinstance(options, str) else options)(self)
        found, unknown = super().parse_known_args(*args, **more)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Print the error message, with a suggestion, on the first rank only, and exit with status 2."""
        found = [word.partition("=")[0].rstrip(":") for word in message.split()]
        words = [word for word in found if word.startswith("-") and "/" not in word]
        message += next(filter(None, map(self._suggest_option, words)), "")
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            from fsdpx.core.base.name_hints import did_you_mean

            message += did_you_mean(choice[1], re.findall(r"[\w-]+", choice[2]))
        line = f"{self.prog.removeprefix('python -m ')}: {message}; {self.prog} --help lists what there is"
        self.exit(_print_error_on_first_rank(line))

    def _suggest_option(self, word: str) -> str:
        """Return a suggestion such as "; did you mean '--steps'?" for the mistyped option `word`, or "". The suggestion
        names the options that begin with `word`, or a similar option."""
        from fsdpx.core.base.name_hints import did_you_mean

        known = [option for action in self._actions for option in action.option_strings]
        if word in known:
            return ""
        begun = [option for option in known if word.startswith("--") and option.startswith(word)]
        hint = did_you_mean(word, known)
        return f"; did you mean {' or '.join(map(repr, begun))}?" if begun and "sbatch" not in hint else hint


def make_parser() -> argparse.ArgumentParser:
    p = CommandParser(
        prog="python -m fsdpx", description="MPI-first distributed training on NumPy and CuPy arrays",
        epilog=_format_commands(), formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--version", action="version", version=f"fsdpx {__version__}")
    commands = p.add_subparsers(dest="command", metavar="COMMAND", help="see below; COMMAND --help has its options")
    for name, command in COMMANDS.items():
        example = f"example: {_format_example(command)}"
        commands.add_parser(name, description=command.help, epilog=example, options=command.options)
    return p


def _format_commands() -> str:
    """Return the part of the --help text that lists the commands in groups. Each command has a description and an
    example."""
    lines = []
    for group, commands in GROUPS.items():
        lines.append(f"{group}:")
        for name, command in commands.items():
            lines += [f"  {name:16} {command.help}", f"      {_format_example(command)}"]
        lines.append("")
    return "\n".join(lines).rstrip()


def _format_example(command: Command) -> str:
    head, _, rest = command.example.partition(" ")
    return f"mpiexec -n 4 python -m fsdpx {rest}" if head == "mpiexec" else f"python -m fsdpx {command.example}"


def _run_command(args: argparse.Namespace) -> int:
    """Run the requested command and print the text that it returns, if any. Return the exit status."""
    status = _import_command(COMMANDS[args.command].function)(args)
    if isinstance(status, str):
        from fsdpx.core.base.messages import wrap_for_terminal

        text = status if getattr(args, "json", False) else wrap_for_terminal(status)
        print(text, end="\n" if text else "")
        return 0
    return int(status)


def _import_command(function: str) -> Callable[..., Any]:
    """Import and return a function given as "module:function", where the module is in fsdpx/launch."""
    module, _, name = function.partition(":")
    found: Callable[..., Any] = getattr(import_module(f"fsdpx.launch.{module}"), name)
    return found


def _is_connected_rank() -> bool:
    """Return whether this process is a rank and has connected to the other ranks. If it has, the other ranks may be
    waiting for it."""
    from fsdpx.core.base import environment
    from fsdpx.core.comm import default_communicator

    return environment.read_environment().launcher is not None and default_communicator.get_default() is not None


def _print_error_on_first_rank(line: str) -> int:
    """Print an error on the first rank only, and return exit status 2 on every rank. The other ranks need not print the
    error: before ranks connect to each other, the same error occurs on every rank."""
    from fsdpx.core.base import environment
    from fsdpx.core.base.messages import wrap_for_terminal

    launcher = environment.read_environment().launcher
    if launcher is None or not launcher.rank:
        print(wrap_for_terminal(line, sys.stderr), file=sys.stderr, flush=True)
    else:
        time.sleep(1)  # give the first rank time to print: a launcher ends all ranks as soon as one exits
    return 2


def _add_info_options(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--left",
        action="store_true",
        help="print only what killed jobs left in /dev/shm: files of MPI libraries and fsdpx that belong to this user "
        "(as root: only root's), are older than a minute, and are mapped by no process on this host",
    )


def _add_doctor_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--json", action="store_true", help="print the result as JSON")


def _add_report_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("run", type=_expand_path, help="folder of a run, such as runs/x, or a folder with only traces")


def _add_runs_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("run", nargs="*", type=_expand_path, help="folders of runs to compare (default: list all)")
    p.add_argument("--in", dest="folder", type=_expand_path, default=Path("runs"), help="parent folder (default: runs)")


def _add_trace_options(p: argparse.ArgumentParser) -> None:
    merge = p.add_subparsers(dest="action", required=True, metavar="merge").add_parser(
        "merge", help="write trace.json.gz next to the files"
    )
    merge.add_argument("folder", type=_expand_path, help="folder of distribute(trace=...), --trace or FSDPX_TRACE")


def _add_run_options(p: argparse.ArgumentParser) -> None:
    ranks = ("-n", "-np", "--np", "--ranks")
    p.add_argument(*ranks, dest="ranks", type=int, help="number of ranks (default: from the allocation, or cores)")
    p.add_argument("--nodes", type=int, help="number of hosts, of the hostfile or the allocation")
    each = ("--nproc-per-node", "--nproc_per_node")
    p.add_argument(*each, dest="per_node", type=int, help="ranks per host; without -n, the number of ranks on one host")
    p.add_argument("--hostfile", type=_expand_path, help="file with hosts and slots, in the format of any launcher")
    p.add_argument("--backend", choices=("mpi", "gloo"), default="mpi", help="gloo: without MPI (docs: backends)")
    p.add_argument("--node-rank", type=int, help="for gloo on several hosts: number of this host, from 0")
    p.add_argument("--master-addr", help="for gloo on several hosts: name or address of host 0")
    p.add_argument("--master-port", type=int, help="for gloo on several hosts: a free port on host 0 (default: 29500)")
    p.add_argument("--mpiexec", default=None,
        help='the launcher, as in "srun --mpi=pmi2 -K" (default: srun or mpiexec)')
    p.add_argument("--threads", type=int,
        help="threads of BLAS and kernels per rank (default: the host's cores are divided)")
    p.add_argument("--timeout", type=float, help="seconds that ranks wait for each other in MPI's start (default: 60)")
    p.add_argument("--max-restarts", type=int, default=3, help="maximum number of restarts (default: 3)")
    p.add_argument("--min-ranks", type=int, default=None, help="minimum ranks of a restart (default: -n, elastic: 1)")
    p.add_argument("--backoff", type=float, default=1.0, help="seconds before the first restart; doubles up to 60")
    p.add_argument("--grace", type=float, default=60.0, help="seconds for saving after a signal (default: 60)")
    p.add_argument("--folder", type=_expand_path, default=None,
        help="folder of the job, which keeps records of failed starts; see --join")
    p.add_argument("--join", type=_expand_path, metavar="FOLDER",
        help="add -n ranks to the job that has this --folder")
    p.add_argument("--logs", type=_expand_path,
        help="folder for rank-0003.log and rank-0003.json; printed lines begin with [3]")
    p.add_argument("--elastic", action="store_true",
        help="survive deaths of ranks: Open MPI's --with-ft ulfm (docs: elastic)")
    p.add_argument("--retune", action="store_true", help="repeat the measurements that choices depend on (docs: speed)")
    p.add_argument("--dry-run", action="store_true", help="print the command that would start the ranks")
    p.add_argument("--print-batch", choices=("slurm", "pbs", "lsf"), help="print a batch file for this system")
    p.add_argument("--print-sbatch", dest="print_batch", action="store_const", const="slurm", help="the same for Slurm")
    p.add_argument("-m", dest="module", action="store_true", help="the script is the name of a module")
    p.add_argument("script", nargs="?", help="script.py")
    # the script may be called without arguments
    p.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script").required = False


def _add_train_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("file", help="run.toml (docs: run-file)")
    p.add_argument("--set", dest="changes", nargs="+", default=(), metavar="section.key=value",
        help="values that replace those of the file")
    p.add_argument("--run", default=None, help="folder of the run (default: runs/NAME-DATE-TIME, with the file's NAME)")
    p.add_argument("--resume", action="store_true", help="continue the run in --run, or the newest run")


def _add_show_options(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "example", nargs="?", default="gpt-tiny",
        help="gpt-tiny, gpt-small, gpt-medium, mlp, many, digits, unet2d, unet3d, fno2d, or your function "
        "mymodule:make_model",
    )  # fmt: skip
    p.add_argument("--strategy", default="fsdp", help="ddp, zero1, zero2, zero3, fsdp or hybrid")
    _import_command("show:add_options")(p)
    p.add_argument("--ranks", type=int, default=None, help="number of ranks (default: those of the mesh, or 4)")
    p.add_argument("--rank", type=int, default=None, help="the rank to show (default: the first with samples)")
    p.add_argument("--ranks-per-host", type=int, default=None, help="ranks that share memory (default: all)")
    p.add_argument("--memory", default=None, help="check whether a rank stays within this budget, such as 2GiB")
    p.add_argument("--batch", default=None, help="samples of the global batch; for your model its shape: 8x1024")
    p.add_argument("--microbatches", type=int, default=None, help="default: 1; with a pipeline, 4 per pipeline rank")
    p.add_argument("--domain", default=None, help="ranks along each dim of a field, such as 2,2,2 for unet3d")
    p.add_argument("--field", default=None, help="cells of the full field along each dim: 512,512,512")
    p.add_argument("--chunks", type=int, default=None, help="reproducible chunks of the batch (docs: reproducibility)")
    p.add_argument("--precision", default="float32", help="float64, float32 (default), bf16, bf16-true or fp16")
    p.add_argument("--group-bytes", default=None, help="group small layers up to this many bytes of parameters: 1MiB")
    p.add_argument("--prefetch", type=int, default=None, help="pages gathered ahead of use")
    p.add_argument("--offload", default=None, metavar="WHAT,...",
        help="on disk: optimizer, parameters, activations, gradients")
    p.add_argument("--optimizer", default="adamw", choices=("adamw", "sgd"), help="default: adamw")
    p.add_argument("--lower", action="store_true", help="list single changes that lower the peak (ten more dry runs)")
    p.add_argument("--grid", action="store_true", help="show the schedule of all pipeline ranks, and its bubble")
    p.add_argument("--json", action="store_true", help="print the result as JSON")
    p.add_argument("--png", default=None, help="draw a step, simulated on --machine, to this file")
    p.add_argument("--trace", default=None, help="write the simulated step as a Perfetto trace: simulated.json.gz")
    p.add_argument("--machine", default=None, help="machine of --png and --trace, as for `plan` (default: epyc-100g)")


def _add_verify_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--strategy", default="fsdp", help="ddp, zero1, zero2, zero3, fsdp or hybrid, or `all`")
    p.add_argument("--precision", default="all", help="float64, float32, or `all`: both")
    _import_command("show:add_options")(p, also=", or `all`")
    p.add_argument("--microbatches", type=int, default=None, help="default: 2; with a pipeline, 2 per pipeline rank")
    p.add_argument("--chunks", type=int, default=None, help="make results bit-identical; batches must divide by it")
    p.add_argument("--steps", type=int, default=6, help="steps to compare (default: 6)")
    p.add_argument("--no-node", action="store_true", help="use MPI messages instead of shared memory inside a host")


GROUPS: dict[str, dict[str, Command]] = {
    "check a machine": {
        "info": Command("MPI, BLAS, Numba and GPUs of this machine", "info:format_info_or_leftovers", _add_info_options,
            "info"),
        "doctor": Command("hosts, cores and transports of all ranks; tests an all-reduce", "doctor:doctor",
            _add_doctor_options, "mpiexec doctor"),
        "verify": Command("compare N ranks with one process on the same batches", "verify:verify", _add_verify_options,
            "mpiexec verify --mesh pipe=2 --schedule all"),
        "bench": Command("time collectives, and steps by strategy", "bench:bench", "bench:add_options",
            "mpiexec bench comm"),
        "compile": Command("compile kernels before the first job", "compile:compile_kernels", "compile:add_options",
            "compile --all"),
    },
    "plan a job, without MPI": {
        "show": Command("program, memory and traffic of a step", "show:show", _add_show_options,
            "show gpt-small --ranks 8 --strategy zero2"),
        "plan": Command("rank strategies and meshes for a machine", "plan:search_and_format_plan", "plan:add_options",
            "plan gpt-small --ranks 16 --machine a100-dgx-200g"),
        "measure-machine": Command("write machine.toml for `plan`, from measurements", "plan:measure_and_write_machine",
            "plan:add_measure_options", "mpiexec measure-machine --output machine.toml"),
    },
    "run": {
        "run": Command("start ranks; restart them from a checkpoint after a failure", "run:main", _add_run_options,
            "run -n 4 train.py"),
        "train": Command("train the model of a run file", "runs:train_run_file", _add_train_options,
            "mpiexec train launch/run.toml"),
        "generate": Command("continue a text with a pretrained model", "generate:generate", "generate:add_options",
            "generate Qwen2-0.5B --prompt 'Once upon a time'"),
    },
    "look at results": {
        "runs": Command("list or compare run folders", "runs:print_runs", _add_runs_options, "runs gpt-a gpt-b"),
        "report": Command("write the HTML page of a run", "runs:print_and_write_report", _add_report_options,
            "report runs/gpt-a"),
        "trace": Command("merge the traces of all ranks, for Perfetto", "runs:merge_traces_and_print_path",
            _add_trace_options, "trace merge runs/gpt-a/trace"),
        "diff": Command("find the first tensor in which two runs differ", "diff:diff", "diff:add_options",
            "diff runs/a runs/b"),
        "ckpt": Command("list, check, compare and convert checkpoints", "ckpt:ckpt", "ckpt:add_options",
            "ckpt inspect runs/gpt/model"),
    },
}  # fmt: skip
COMMANDS = {name: command for commands in GROUPS.values() for name, command in commands.items()}


if __name__ == "__main__":
    sys.exit(main())
