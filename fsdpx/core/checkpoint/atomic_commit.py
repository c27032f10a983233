"""Atomic commit of a checkpoint: all ranks write into a temporary folder, and rank 0 gives the folder its final name
once all ranks have succeeded."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from fsdpx.core.base import safe_files
from fsdpx.core.base.dataclass import dataclass
from fsdpx.core.checkpoint.format import (
    NOTE_FILE_NAME,
    FileLayout,
    create_zero_filled_file,
    open_regular_file,
    sync_file,
    sync_folder,
    write_at,
)
from fsdpx.core.checkpoint.write import CHECKSUM_PREFIX, MANIFEST_NAME, OWN_FILE_PATTERN, Manifest, is_checkpoint
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.default_communicator import all_gather_plain_value
from fsdpx.errors import CheckpointError, FsdpxError

__all__ = [
    "PARTIAL", "SaveTarget", "agree_on_choices", "agree_on_equal_choices", "agree_on_path",
    "expanduser_in_checkpoint_path", "explaining_rename_errors", "find_committed_folder",
    "format_os_independent_error_text", "get_checkpoint_name_of_folder", "get_path_and_working_folder",
    "iterate_checkpoints", "lock_file", "make_sibling_path", "prune_checkpoints", "resolve_replaceable_folder",
    "run_on_all_ranks", "run_on_rank0", "write_header_and_sync",
]  # fmt: skip

T = TypeVar("T")


HOST = "host"


def run_on_all_ranks(world: Communicator, where: str, body: Callable[[], T]) -> list[T]:
    """Call `body()` on every rank, and return the results of all ranks in rank order. If `body` raises an error on any
    rank, all ranks raise CheckpointError, so that no rank is left waiting. CheckpointError contains the text of the
    original error; if several ranks fail, the text is from the lowest of these ranks. Error messages begin with
    `where`. Collective."""
    value: Any = None
    problem, cause = None, None
    try:
        value = body()
    except Exception as error:
        problem = format_os_independent_error_text(error)
        # do not chain an FsdpxError: `problem` already contains its full text, which would be printed twice
        cause = None if isinstance(error, FsdpxError) else error
    for rank, (_, text) in enumerate(everyone := all_gather_plain_value(world, (value, problem))):
        if text is not None:
            who = f"rank {rank}: " if world.size > 1 else ""
            raise CheckpointError(text if text.startswith(where) else f"{where}: {who}{text}") from cause
    return [value for value, _ in everyone]


def run_on_rank0(world: Communicator, where: str, body: Callable[[], T]) -> T:
    """Call `body()` on rank 0 and return its result on every rank. If `body` raises an error, all ranks raise
    CheckpointError. Error messages begin with `where`. Collective."""
    return run_on_all_ranks(world, where, lambda: body() if world.rank == 0 else None)[0]  # type: ignore[return-value]


def agree_on_equal_choices(world: Communicator, where: str, **choices: str) -> None:
    """Raise CheckpointError on all ranks unless they all pass the same `choices`. The error message begins with `where`
    and names two ranks that passed different values. Collective."""
    _require_same_choices(where, world.all_gather_value(choices))


def agree_on_path(world: Communicator, call: str, path: Any, **choices: str) -> Path:
    """Return `path` as a Path, after checking that all ranks pass the same path and the same `choices`. If they do not,
    or if the path is invalid on some rank, raise CheckpointError on all ranks. The error message begins with `call`,
    the name of the public method. Collective."""
    return Path(
        agree_on_choices(
            world, call, lambda: {**get_path_and_working_folder(expanduser_in_checkpoint_path(path)), **choices}
        )["path"]
    )


def get_path_and_working_folder(path: Path) -> dict[str, str]:
    """Return a dict that ranks compare to check that they all pass the same path: the path as text and, for a relative
    path, the host and the working folder."""
    return {"path": str(path)} | ({} if path.is_absolute() else {HOST: platform.node(), "working folder": os.getcwd()})


def agree_on_choices(world: Communicator, where: str, choices: Callable[[], Mapping[str, str]]) -> Mapping[str, str]:
    """Call `choices()` on every rank, check that all ranks get the same result, and return it. If results differ, or if
    the call fails on some rank, raise CheckpointError on all ranks. Error messages begin with `where`. Collective."""
    everyone = run_on_all_ranks(world, where, choices)
    _require_same_choices(where, everyone)
    return everyone[0]


def _require_same_choices(where: str, everyone: Sequence[Mapping[str, str]]) -> None:
    for rank, theirs in enumerate(everyone):
        for name, first in everyone[0].items():
            if name == HOST or (name == "working folder" and theirs.get(HOST) != everyone[0][HOST]):
                continue  # the ranks are on different hosts, where the same folder may have different paths
            if (other := theirs.get(name, "none")) != first:
                raise CheckpointError(f"{where}: ranks differ in {name}: rank 0 has {first}, rank {rank} has {other}")


def format_os_independent_error_text(error: BaseException) -> str:
    """Return the message of an error in a form that does not depend on the operating system."""
    if isinstance(error, OSError) and error.errno is not None:
        name = errno.errorcode.get(error.errno, str(error.errno))
        return f"{error.strerror} ({name})" + (f": {error.filename}" if error.filename else "")
    return str(error) if isinstance(error, FsdpxError) else f"{type(error).__name__}: {error}"


try:
    import fcntl
except ImportError:  # Windows has no fcntl, so two jobs that save to the same path are not detected there
    fcntl = None  # type: ignore[assignment]


PREVIOUS, PARTIAL, LOCK, REMOVED = "previous", "partial-", "lock", "removed"
"""Kinds of temporary files and folders that a save creates next to a checkpoint. If the save is killed, these files and
folders remain. `make_sibling_path` returns their paths. Their names begin with `.fsdpx-`, so the pattern `step-*` never
matches them."""
_RESERVED_PREFIX = ".fsdpx-"
_SIBLING_PATTERN = re.compile(rf"\.fsdpx-({PREVIOUS}|{PARTIAL}[0-9a-f]{{8}}|{LOCK}|{REMOVED})-(.+)", re.DOTALL)
MAX_LINKS = 40
"""Maximum number of symbolic links that are followed in a row. Linux has the same limit."""
IN_PLACE = (
    "this folder cannot be renamed, so no checkpoint can take its place (it is a mount, or a lower layer of an "
    "overlay): name a folder in it"
)


@dataclass
class SaveTarget:
    """The folders and the lock of a checkpoint that is being written.

    Attributes
    ----------
    path : final folder of the checkpoint
    partial : temporary folder that all ranks write to
    lock : file descriptor of the lock that keeps other jobs from saving to `path`; None once it is released
    """

    path: Path
    partial: Path
    lock: int | None

    @classmethod
    def lock_and_create_files(cls, path: Path, token: str, layout: FileLayout) -> SaveTarget:
        """Lock the folder `path` against other jobs. Remove temporary folders left behind by earlier saves to this path
        that were killed. Then create a new temporary folder with the files of `layout`, filled with zeros."""
        path = resolve_replaceable_folder(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        target = cls(path, make_sibling_path(path, PARTIAL + token), _lock_checkpoint(path))
        try:
            _require_no_foreign_files(path)
            for left, kind, name in _iterate_sibling_folders(path.parent):
                if kind.startswith(PARTIAL) and name == path.name:
                    remove_checkpoint(left)
            target.partial.mkdir()
            for name, contents in layout.files.items():
                create_zero_filled_file(target.partial / name, contents.size)
        except BaseException:
            target.abandon()
            raise
        return target

    def commit(self, layout: FileLayout, manifest: Manifest) -> None:
        """Write the headers and the manifest, and rename the temporary folder to `path`. All tensors must already be on
        disk.

        `find_committed_folder` finds the old checkpoint until the temporary folder is renamed, and the new one
        afterwards."""
        for name, contents in layout.files.items():
            write_header_and_sync(self.partial / name, contents.header)
        note = {} if layout.note is None else {NOTE_FILE_NAME: layout.note}
        for name, text in {**layout.texts, **note, MANIFEST_NAME: manifest.to_json()}.items():
            create_zero_filled_file(self.partial / name, len(text))
            write_header_and_sync(self.partial / name, text)
        sync_folder(self.partial)
        previous = make_sibling_path(self.path, PREVIOUS)
        if self.path.exists() and is_checkpoint(self.path):
            remove_checkpoint(previous)
            with explaining_rename_errors(self.path):
                os.rename(self.path, previous)
        elif self.path.exists():
            with explaining_rename_errors(self.path):
                self.path.rmdir()  # the folder is empty, as `_require_no_foreign_files` has checked
        try:
            with explaining_rename_errors(self.path):
                os.rename(self.partial, self.path)
        except BaseException:
            if previous.exists():
                os.rename(previous, self.path)
            raise
        sync_folder(self.path.parent)
        remove_checkpoint(previous)
        self.release_lock()

    def abandon(self) -> None:
        """Remove the temporary folder and release the lock."""
        remove_checkpoint(self.partial)
        self.release_lock()

    def release_lock(self) -> None:
        lock, self.lock = self.lock, None
        if lock is not None:
            make_sibling_path(self.path, LOCK).unlink(missing_ok=True)
            os.close(lock)


def make_sibling_path(path: Path, kind: str) -> Path:
    """Return the path of the temporary file or folder of this `kind` (such as "lock") that a save creates next to the
    checkpoint `path`."""
    return path.with_name(f"{_RESERVED_PREFIX}{kind}-{path.name}")


def _parse_sibling_name(name: str) -> tuple[str, str] | None:
    """Split the name of a temporary file or folder of a save into (kind, name of the checkpoint). Return None if `name`
    does not have this form."""
    match = _SIBLING_PATTERN.fullmatch(name)
    return match and (match[1], match[2])


def _iterate_sibling_folders(folder: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield (path, kind, name of the checkpoint) for each temporary file or folder that saves have left in `folder`."""
    for path in sorted(folder.iterdir()):
        if parsed := _parse_sibling_name(path.name):
            yield path, *parsed


def get_checkpoint_name_of_folder(name: str) -> str | None:
    """Return the name of the checkpoint that a folder named `name` contains. For a permanent folder, this is `name`
    itself. For a temporary folder that keeps the previous version of a checkpoint, it is the name of that checkpoint.
    For other temporary folders, return None."""
    kind, of = _parse_sibling_name(name) or (PREVIOUS, name)
    return of if kind == PREVIOUS else None


def expanduser_in_checkpoint_path(path: Any) -> Path:
    """Return `path` as a Path with `~` expanded. The last part of the result is a name (not `..`), so that files can be
    created next to it. Raise CheckpointError if `path` is not a valid str or PathLike, or has no such name."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise CheckpointError(f"the path {path!r} is of type {type(path).__name__}: give a str or a pathlib.Path")
    if not text or "\0" in text or not _is_encodable(text):
        raise CheckpointError(f"the path {text!r} is empty or has characters that no file system takes")
    given = safe_files.expanduser(text)
    given = given.resolve() if given.name in ("", "..") else given
    if not given.name:
        raise CheckpointError(f"the path {given} has no name, so nothing can be written next to it: name a subfolder")
    return given


def _is_encodable(text: str) -> bool:
    try:
        return bool(os.fsencode(text))
    except UnicodeEncodeError:
        return False


def follow_link(path: Path) -> Path:
    """Return the target of `path` if its last part is a symbolic link, and `path` otherwise. The target need not exist.

    Links in the parent folders are not resolved, since they may differ between hosts. Raise CheckpointError for
    circular links."""
    given = path
    for _ in range(MAX_LINKS):
        if not path.is_symlink():
            return expanduser_in_checkpoint_path(path)
        path = path.parent / os.readlink(path)
    raise CheckpointError(f"{given} is a circular link: choose another path")


def resolve_replaceable_folder(path: Path) -> Path:
    """Return the folder at `path`, or its target if `path` is a symbolic link. A save later replaces this folder by
    renaming another folder to its name. Raise CheckpointError if the folder's name is reserved. Also raise it for the
    current folder and for a mount point, because these folders cannot be replaced."""
    folder = follow_link(path)
    if folder.name.lower().startswith(_RESERVED_PREFIX):
        raise CheckpointError(
            f"{path}: fsdpx uses such names for temporary files next to a checkpoint, and removes them: choose "
            "another name"
        )
    if folder.is_dir() and os.path.samefile(folder, os.curdir):
        raise CheckpointError(f"{path} is the current folder, which cannot be replaced: name a folder in it")
    if os.path.ismount(folder):
        raise CheckpointError(f"{path}: {IN_PLACE}")
    return folder


@contextmanager
def explaining_rename_errors(path: Path) -> Iterator[None]:
    """Context manager that raises CheckpointError with an explanation if the operating system refuses to rename or
    remove the folder `path` (EBUSY, EXDEV)."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EBUSY, errno.EXDEV):
            raise CheckpointError(f"{path}: {IN_PLACE}") from error
        raise


def find_committed_folder(path: Path) -> Path:
    """Return the folder that holds the checkpoint `path`. Normally this is `path` itself. A commit first renames the
    old checkpoint to a temporary name, then the new one to `path`. If a job was killed between these two renames,
    return the temporary folder with the old checkpoint."""
    path = follow_link(path)
    previous = make_sibling_path(path, PREVIOUS)
    return previous if not path.exists() and is_checkpoint(previous) else path


def remove_checkpoint(folder: Path) -> None:
    """Delete the files of a complete or partial checkpoint, and also the folder unless it contains other files.

    The manifest is deleted first, since a folder without it does not count as a checkpoint. If `folder` is a symbolic
    link, only the link is deleted."""
    if folder.is_symlink():
        folder.unlink()
    if not folder.is_dir():
        return
    for name in sorted(os.listdir(folder), key=lambda name: name != MANIFEST_NAME):
        if OWN_FILE_PATTERN.fullmatch(name) or name.startswith(CHECKSUM_PREFIX):
            (folder / name).unlink(missing_ok=True)
    with suppress(OSError):  # rmdir fails if the folder has other files; the folder is then kept
        folder.rmdir()


def iterate_checkpoints(folder: Path, prefix: str) -> Iterator[tuple[int, Path]]:
    """Yield (number, path) for each checkpoint in `folder` whose name is `prefix` followed by a number, in ascending
    order of these numbers."""
    pattern, folders = re.compile(re.escape(prefix) + r"(\d+)"), dict[int, Path]()
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = pattern.fullmatch(get_checkpoint_name_of_folder(path.name) or "")
        if match and is_checkpoint(path):
            folders[int(match[1])] = folder / match[0]
    yield from sorted(folders.items())


def prune_checkpoints(path: Path, keep: int, keep_also: str | None = None) -> None:
    """Delete old checkpoints, so that only the newest `keep` remain, including `path`.

    Only checkpoints that have the same prefix as `path` and a lower number are deleted. Checkpoints with higher numbers
    are kept, because they were not written by this run. The checkpoint named `keep_also`, symbolic links, and
    checkpoints that a symbolic link in the same folder points to are never deleted."""
    prefix = strip_trailing_number(path)
    links = [p for p in path.parent.iterdir() if p.is_symlink()]
    linked = {os.path.realpath(p) for p in links}
    number = int(path.name.removeprefix(prefix))
    known = [p for n, p in iterate_checkpoints(path.parent, prefix) if n < number and p not in links]
    for old in [p for p in known[: max(len(known) + 1 - keep, 0)] if p.name != keep_also]:
        if os.path.realpath(old) in linked:
            continue
        gone = make_sibling_path(old, REMOVED)
        remove_checkpoint(gone)
        os.rename(find_committed_folder(old), gone)
    for left, kind, name in _iterate_sibling_folders(path.parent):
        if kind == REMOVED and name.rstrip("0123456789") == prefix:
            remove_checkpoint(left)


def strip_trailing_number(path: Path) -> str:
    """Return the name of a checkpoint without the number at its end, such as "step-" for "run/step-30". Raise
    CheckpointError if there is no number."""
    prefix = path.name.rstrip("0123456789")
    if prefix == path.name:
        raise CheckpointError(f"keep: {path} has no number at its end; save to folder/step-{{n}}")
    return prefix


def _require_no_foreign_files(path: Path) -> None:
    """Raise CheckpointError if `path` is a file, or a folder with files that do not belong to a checkpoint."""
    if not path.exists():
        return
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file: a checkpoint is a folder; choose another place")
    names = os.listdir(path)
    if names and not is_checkpoint(path):
        raise CheckpointError(
            f"{path} is no checkpoint, but has files in it ({_format_first_names(names)}): choose another place"
        )
    foreign = [name for name in names if not OWN_FILE_PATTERN.fullmatch(name)]
    if foreign:
        raise CheckpointError(
            f"{path} holds other files than the checkpoint, which would be lost ({_format_first_names(foreign)}): "
            "choose another path"
        )


def _format_first_names(names: list[str]) -> str:
    return ", ".join(sorted(names)[:5])


def _lock_checkpoint(path: Path) -> int:
    """Lock the checkpoint `path` against other jobs. Return a file descriptor that holds the lock until the descriptor
    is closed or the process ends. Raise CheckpointError if another job has the lock."""
    return lock_file(make_sibling_path(path, LOCK), f"{path}: another job is saving there")


def lock_file(path: Path, busy_text: str) -> int:
    """Create and lock a file. Return a file descriptor that holds the lock until the descriptor is closed or the
    process ends.

    If another process holds the lock, raise CheckpointError. The error message begins with `busy_text`, and gives the
    other process's host and id and the time when it took the lock."""
    while True:
        try:
            fd = safe_files.open_lock_file(path)
        except safe_files.Untrusted as error:
            raise CheckpointError(f"{error}: remove it if no other job writes there, or choose another place") from None
        try:
            try:
                if fcntl is not None:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(fd, 1000, 0).decode(errors="replace")
                raise CheckpointError(f"{busy_text}: {owner or 'it has just begun'}") from None
            except OSError:
                pass  # continue without a lock, because some file systems do not support locks
            if _is_same_file(fd, path):
                text = {"host": platform.node(), "process": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
                # the text is only informational; if the disk is full, the save itself will fail
                with suppress(OSError):
                    safe_files.write_lock_text(fd, json.dumps(text))
                return fd
        # close the file on Ctrl-C too: otherwise the process might continue and never release the lock
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # try again: the previous owner of the lock deleted the file after we opened it


def _is_same_file(fd: int, name: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(name))
    except FileNotFoundError:
        return False


def write_header_and_sync(path: Path, data: Any) -> None:
    """Write `data` at the start of an existing file, and flush the file to disk."""
    with open_regular_file(path, writing=True) as fd:
        write_at(fd, data, 0)
        sync_file(fd)
