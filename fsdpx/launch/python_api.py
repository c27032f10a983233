"""`fsdpx.launch`: run a script or a function on several ranks, each in its own process, from Python or a notebook."""

from __future__ import annotations

import hashlib
import pickle
import site
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple, Unpack, overload

from fsdpx.core.base import environment, safe_files
from fsdpx.core.base.name_hints import require_known_options
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.trainer.initialize import init
from fsdpx.errors import LaunchError
from fsdpx.launch.options import LaunchArgs, LaunchConfig, find_default_rank_count
from fsdpx.launch.run import run_job

__all__ = ["launch"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_CALL, _RESULT = "call.pickle", "result-{:05}.pickle"


@overload
def launch(
    what: str | Path, *args: object, config: LaunchConfig | None = ..., **options: Unpack[LaunchArgs]
) -> None: ...
@overload
def launch(
    what: Callable[[Communicator, Unpack[Ts]], T],
    *args: *Ts,
    config: LaunchConfig | None = ...,
    **options: Unpack[LaunchArgs],
) -> list[T]: ...
def launch(  # type: ignore[misc]  # mypy does not know that *args take any *Ts
    what: str | Path | Callable[..., Any], *args: Any, config: LaunchConfig | None = None, **options: Any
) -> list[Any] | None:
    """Start a script as `fsdpx run` does, or call the function `what(comm, *args)` on each rank of a new job.

    This function is like `fsdpx.spawn`, but ranks are processes instead of threads.

    Parameters
    ----------
    what : path of a script, "-m" (then the first of `args` is a module), or a function. A function and its arguments
        are pickled. A function that is defined in a script or notebook needs the package cloudpickle; a function that
        is defined in a module does not
    args : arguments of the script as text, or arguments of the function
    config, options : a `LaunchConfig`, its fields as keywords (`ranks=4`), or both; keywords take precedence. The
        default of `ranks` is the number that `fsdpx run` uses without -n. To run a function on several hosts, set
        `folder` to a folder on a disk that all hosts share

    Returns
    -------
    list : the return value of the function on each rank, in rank order; None for a script

    Raises
    ------
    LaunchError : the job could not be started, or it failed (the message contains the known details), or the function
        cannot be pickled
    """
    require_known_options("launch", options, [field.name for field in fields(LaunchConfig)])
    if config is None and "ranks" not in options:
        where = [options.get(name) for name in ("nodes", "per_node", "hostfile", "threads")]
        options["ranks"], _ = find_default_rank_count(*where)
    config = replace(config, **options) if config is not None else LaunchConfig(**options)
    folder = Path(tempfile.mkdtemp(prefix="fsdpx-launch-", dir=config.folder))
    # a notebook cell would not show the output of ranks, so it is written to log files and printed from there
    if config.logs is None and sys.stdout is not sys.__stdout__:
        config = replace(config, logs=folder)
    try:
        if not callable(what):
            _run_job_or_raise(config, [str(what), *map(str, args)])
            return None
        safe_files.write_file(folder / _CALL, packed := _pickle_call(what, args))
        _run_job_or_raise(config, ["-m", __name__, str(folder), _hash_bytes(packed)])
        return _read_results_by_rank(folder)
    finally:
        safe_files.remove_user_owned_folder(folder)


def _run_job_or_raise(config: LaunchConfig, program: Sequence[str]) -> None:
    """Run a job until it ends, with restarts after failures. Raise LaunchError unless it succeeded."""
    ending = run_job(config, program, _make_python_path_variable())
    if ending.kind != "done":
        raise LaunchError(ending.text)


def _make_python_path_variable() -> dict[str, str]:
    """Return {"PYTHONPATH": ...} for the ranks if this process finds fsdpx only through its sys.path, because fsdpx is
    not installed. Otherwise return {}."""
    home = str(Path(__file__).parents[2])
    installed = home in (*site.getsitepackages(), site.getusersitepackages())
    return {} if installed or home not in sys.path else {"PYTHONPATH": environment.make_prepended_python_path(home)}


def _pickle_call(what: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """Pickle the function `what` and its arguments, together with the sys.path of this process, so that the ranks find
    the same modules."""
    name = getattr(what, "__qualname__", repr(what))
    if _import_pickle_module() is pickle and getattr(what, "__module__", "") == "__main__":
        raise LaunchError(
            f"launch({name}): ranks cannot import __main__; pip install cloudpickle, or use a module for it"
        )
    return pickle.dumps((sys.path, _pickle_value((what, args), f"launch({name}): it")))


def _import_pickle_module() -> Any:
    """Return the module cloudpickle, which can pickle functions defined in a notebook. If it is not installed, return
    the module pickle."""
    try:
        import cloudpickle
    except ImportError:
        return pickle
    return cloudpickle


def _pickle_value(value: Any, what: str) -> bytes:
    """Pickle a value. If it cannot be pickled, raise a LaunchError that calls the value `what`."""
    try:
        return bytes(_import_pickle_module().dumps(value))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise LaunchError(f"{what} cannot be given to other processes: {error}") from error


def _hash_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read_results_by_rank(folder: Path) -> list[Any]:
    """Read the return values of the function on all ranks, in rank order. The number of ranks is stored with rank 0's
    result, since the job may have been restarted with fewer ranks."""
    size = 1
    found: list[Any] = []
    while len(found) < size:
        left = folder / _RESULT.format(len(found))
        if not left.exists():
            raise LaunchError(f"rank {len(found)} left no result here: name a folder that all hosts share (folder=)")
        size, result = pickle.loads(_read_trusted_file(left))
        found.append(result)
    return found


def _read_trusted_file(path: Path) -> bytes:
    with safe_files.open_file(path) as file:
        return file.read()


def main(folder: Path, digest: str) -> None:
    """Run the pickled function call on one rank, and write its result to `folder`.

    `digest` is the expected hash of the pickled call. The hash is checked, because another user may have replaced the
    folder.
    """
    try:
        packed = _read_trusted_file(folder / _CALL)
    except FileNotFoundError:
        raise LaunchError(f"there is no {folder} here: name a folder that all hosts share (folder=)") from None
    if _hash_bytes(packed) != digest:
        raise LaunchError(f"{folder / _CALL} is not of this launch: name a folder= where no other user can write")
    path, call = pickle.loads(packed)
    sys.path += [place for place in path if place not in sys.path]
    function, args = pickle.loads(call)
    comm = init()
    result = function(comm, *args)
    name = getattr(function, "__qualname__", function)
    packed = _pickle_value((comm.size, result), f"rank {comm.rank}: what {name} returned")
    safe_files.write_file(folder / _RESULT.format(comm.rank), packed)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
