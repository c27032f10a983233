"""A save becomes whole at one moment: ranks agree, and one of them renames the folder."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fsdpx.core.base import safe_files
from fsdpx.core.checkpoint.format import (
    NOTE_FILE_NAME,
    FileLayout,
    create_file,
    open_checked,
    sync_file,
    sync_folder,
    write_at,
)
from fsdpx.core.checkpoint.write import CHECKSUM_PREFIX, MANIFEST_NAME, OWN_FILE_PATTERN, Manifest, is_checkpoint
from fsdpx.core.comm.communicator import Communicator
from fsdpx.core.comm.default_communicator import all_gather_data_of
from fsdpx.errors import CheckpointError, FsdpxError

__all__ = [
    "PARTIAL",
    "SaveTarget",
    "agree_on_choices",
    "agree_on_path",
    "check_can_rename",
    "check_path_name",
    "check_replaceable",
    "describe_location",
    "error_to_text",
    "get_checkpoint_name",
    "list_checkpoints",
    "lock_file",
    "prune_checkpoints",
    "require_equal",
    "resolve_checkpoint",
    "run_on_all_ranks",
    "run_on_rank0",
    "sibling_path",
    "write_header",
]  # fmt: skip

T = TypeVar("T")


HOST = "host"


def run_on_all_ranks(world: Communicator, where: str, body: Callable[[], T]) -> list[T]:
    """`body()` of every rank, in rank order. Where it raises, whatever it is, all ranks raise CheckpointError with the
    text of the first rank that did: the others would wait for it. Collective."""
    value: Any = None
    problem, cause = None, None
    try:
        value = body()
    except Exception as error:
        problem = error_to_text(error)
        cause = None if isinstance(error, FsdpxError) else error  # else one text would be shown twice
    for rank, (_, text) in enumerate(everyone := all_gather_data_of(world, (value, problem))):
        if text is not None:
            who = f"rank {rank}: " if world.size > 1 else ""
            raise CheckpointError(text if text.startswith(where) else f"{where}: {who}{text}") from cause
    return [value for value, _ in everyone]


def run_on_rank0(world: Communicator, where: str, body: Callable[[], T]) -> T:
    """`body()` of rank 0, on every rank. Collective."""
    return run_on_all_ranks(world, where, lambda: body() if world.rank == 0 else None)[0]  # type: ignore[return-value]


def require_equal(world: Communicator, where: str, **choices: str) -> None:
    """CheckpointError on all ranks if they differ in a choice; names the ranks. Collective."""
    _require_same(where, world.all_gather_data(choices))


def agree_on_path(world: Communicator, call: str, path: Any, **choices: str) -> Path:
    """The path that `call` was given, if it can be one and all ranks gave the same and the same choices; else
    CheckpointError on all of them. Collective."""
    return Path(agree_on_choices(world, call, lambda: {**describe_location(check_path_name(path)), **choices})["path"])


def describe_location(path: Path) -> dict[str, str]:
    """Return what ranks compare of a path: for a relative one also the host and the working folder."""
    return {"path": str(path)} | ({} if path.is_absolute() else {HOST: platform.node(), "working folder": os.getcwd()})


def agree_on_choices(world: Communicator, where: str, choices: Callable[[], Mapping[str, str]]) -> Mapping[str, str]:
    """Return `choices()`; CheckpointError on all ranks if it differs between them or raises on one. Collective."""
    everyone = run_on_all_ranks(world, where, choices)
    _require_same(where, everyone)
    return everyone[0]


def _require_same(where: str, everyone: Sequence[Mapping[str, str]]) -> None:
    for rank, theirs in enumerate(everyone):
        for name, first in everyone[0].items():
            if name == HOST or (name == "working folder" and theirs.get(HOST) != everyone[0][HOST]):
                continue  # the same folder may have other names on other hosts
            if (other := theirs.get(name, "none")) != first:
                raise CheckpointError(f"{where}: ranks differ in {name}: rank 0 has {first}, rank {rank} has {other}")


def error_to_text(error: BaseException) -> str:
    """An error as text, the same on every system."""
    if isinstance(error, OSError) and error.errno is not None:
        name = errno.errorcode.get(error.errno, str(error.errno))
        return f"{error.strerror} ({name})" + (f": {error.filename}" if error.filename else "")
    return str(error) if isinstance(error, FsdpxError) else f"{type(error).__name__}: {error}"


try:
    import fcntl
except ImportError:  # Windows: two jobs there are not told apart
    fcntl = None  # type: ignore[assignment]


PREVIOUS, PARTIAL, LOCK, REMOVED = "previous", "partial-", "lock", "removed"
"""What a save needs beside a checkpoint for a while, and leaves if it is killed. `leaving` makes the names: they do not
begin as the checkpoint's does, so that who looks for `step-*` finds checkpoints alone."""
_RESERVED = ".fsdpx-"
_LEAVING = re.compile(rf"\.fsdpx-({PREVIOUS}|{PARTIAL}[0-9a-f]{{8}}|{LOCK}|{REMOVED})-(.+)", re.DOTALL)
MAX_LINKS = 40
"""That lead to one another, as many as Linux follows."""
IN_PLACE = (
    "this folder cannot be renamed, so no checkpoint can take its place (it is a mount, or a lower layer of an "
    "overlay): name a folder in it"
)


@dataclass
class SaveTarget:
    """Where a checkpoint goes. partial: the folder that ranks write into. lock: open file that holds off other jobs."""

    path: Path
    partial: Path
    lock: int | None

    @classmethod
    def open(cls, path: Path, token: str, plan: FileLayout) -> SaveTarget:
        """Lock the folder that `path` names, and make the partial folder with files of the right size in it."""
        path = check_replaceable(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        target = cls(path, sibling_path(path, PARTIAL + token), _lock_checkpoint(path))
        try:
            _require_free(path)
            for left, kind, name in _list_siblings(path.parent):
                if kind.startswith(PARTIAL) and name == path.name:
                    remove_checkpoint(left)
            target.partial.mkdir()
            for name, contents in plan.files.items():
                create_file(target.partial / name, contents.size)
        except BaseException:
            target.abandon()
            raise
        return target

    def commit(self, plan: FileLayout, manifest: Manifest) -> None:
        """The data are there: headers, manifest, and the new name. Until the last rename, `current` finds the old
        checkpoint; after it, `path` is the new one."""
        for name, contents in plan.files.items():
            write_header(self.partial / name, contents.header)
        note = {} if plan.note is None else {NOTE_FILE_NAME: plan.note}
        for name, text in {**plan.texts, **note, MANIFEST_NAME: manifest.to_json()}.items():
            create_file(self.partial / name, len(text))
            write_header(self.partial / name, text)
        sync_folder(self.partial)
        previous = sibling_path(self.path, PREVIOUS)
        if self.path.exists() and is_checkpoint(self.path):
            remove_checkpoint(previous)
            with check_can_rename(self.path):
                os.rename(self.path, previous)
        elif self.path.exists():
            with check_can_rename(self.path):
                self.path.rmdir()  # empty, as `_demand_free` saw
        try:
            with check_can_rename(self.path):
                os.rename(self.partial, self.path)
        except BaseException:
            if previous.exists():
                os.rename(previous, self.path)
            raise
        sync_folder(self.path.parent)
        remove_checkpoint(previous)
        self.release_lock()

    def abandon(self) -> None:
        """Leave no trace."""
        remove_checkpoint(self.partial)
        self.release_lock()

    def release_lock(self) -> None:
        lock, self.lock = self.lock, None
        if lock is not None:
            sibling_path(self.path, LOCK).unlink(missing_ok=True)
            os.close(lock)


def sibling_path(path: Path, kind: str) -> Path:
    """Return the path of a temporary folder of this kind next to the checkpoint `path`, as a save uses it."""
    return path.with_name(f"{_RESERVED}{kind}-{path.name}")


def _parse_sibling(name: str) -> tuple[str, str] | None:
    """Return (kind, name of the checkpoint) of a temporary folder of a save; None for any other name."""
    match = _LEAVING.fullmatch(name)
    return match and (match[1], match[2])


def _list_siblings(folder: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield (path, kind, name of the checkpoint) of the temporary folders that saves have left in a folder."""
    for path in sorted(folder.iterdir()):
        if parsed := _parse_sibling(path.name):
            yield path, *parsed


def get_checkpoint_name(name: str) -> str | None:
    """Return the name of the checkpoint that an entry of a folder can hold: its own, or, for the previous version of a
    checkpoint, that of the checkpoint; None for other temporary folders of saves."""
    kind, of = _parse_sibling(name) or (PREVIOUS, name)
    return of if kind == PREVIOUS else None


def check_path_name(path: Any) -> Path:
    """A path whose last part is a name, so that others can lie beside it; CheckpointError if it cannot be one."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise CheckpointError(f"the path {path!r} is of type {type(path).__name__}: give a str or a pathlib.Path")
    if not text or "\0" in text or not _is_encodable(text):
        raise CheckpointError(f"the path {text!r} is empty or has characters that no file system takes")
    given = safe_files.expanduser(text)
    given = given.resolve() if given.name in ("", "..") else given
    if not given.name:
        raise CheckpointError(f"the path {given} has no name, so nothing can lie beside it: give a folder inside it")
    return given


def _is_encodable(text: str) -> bool:
    try:
        return bool(os.fsencode(text))
    except UnicodeEncodeError:
        return False


def follow_link(path: Path) -> Path:
    """The folder that `path` names, which may not be there yet: where its last part is a link, what that points at.
    Links before it stay, as they may differ between hosts. CheckpointError for links in a circle."""
    given = path
    for _ in range(MAX_LINKS):
        if not path.is_symlink():
            return check_path_name(path)
        path = path.parent / os.readlink(path)
    raise CheckpointError(f"{given} is a link that leads to no end: choose another place")


def check_replaceable(path: Path) -> Path:
    """The folder that `path` names, if another one can take its place; CheckpointError if not."""
    folder = follow_link(path)
    if folder.name.lower().startswith(_RESERVED):
        raise CheckpointError(
            f"{path}: fsdpx gives such names to what it has beside a checkpoint while it saves, and removes it: choose "
            "another name"
        )
    if folder.is_dir() and os.path.samefile(folder, os.curdir):
        raise CheckpointError(f"{path} is the current folder, which cannot be replaced: name a folder in it")
    if os.path.ismount(folder):
        raise CheckpointError(f"{path}: {IN_PLACE}")
    return folder


@contextmanager
def check_can_rename(path: Path) -> Iterator[None]:
    """CheckpointError where the system refuses to rename or to remove this folder."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EBUSY, errno.EXDEV):
            raise CheckpointError(f"{path}: {IN_PLACE}") from error
        raise


def resolve_checkpoint(path: Path) -> Path:
    """Return where the checkpoint of this name is: under another name if a job was killed between two renames."""
    path = follow_link(path)
    previous = sibling_path(path, PREVIOUS)
    return previous if not path.exists() and is_checkpoint(previous) else path


def remove_checkpoint(folder: Path) -> None:
    """Delete a checkpoint or a part of one, and nothing else. The manifest goes first: without it the rest is no
    checkpoint. Where a link stands in its place, only the link is deleted."""
    if folder.is_symlink():
        folder.unlink()
    if not folder.is_dir():
        return
    for name in sorted(os.listdir(folder), key=lambda name: name != MANIFEST_NAME):
        if OWN_FILE_PATTERN.fullmatch(name) or name.startswith(CHECKSUM_PREFIX):
            (folder / name).unlink(missing_ok=True)
    with suppress(OSError):  # there is a file of another program in it
        folder.rmdir()


def list_checkpoints(folder: Path, prefix: str) -> Iterator[tuple[int, Path]]:
    """The checkpoints PREFIXn of a folder with their numbers, oldest first."""
    pattern, folders = re.compile(re.escape(prefix) + r"(\d+)"), dict[int, Path]()
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = pattern.fullmatch(get_checkpoint_name(path.name) or "")
        if match and is_checkpoint(path):
            folders[int(match[1])] = folder / match[0]
    yield from sorted(folders.items())


def prune_checkpoints(path: Path, keep: int, spare: str | None = None) -> None:
    """Delete all but the last `keep` checkpoints that are numbered as `path` is, up to its number: those with larger
    ones are of another run. `path` itself, `spare`, links, and what links of that folder point at stay."""
    prefix = strip_number(path)
    links = [p for p in path.parent.iterdir() if p.is_symlink()]
    linked = {os.path.realpath(p) for p in links}
    number = int(path.name.removeprefix(prefix))
    known = [p for n, p in list_checkpoints(path.parent, prefix) if n < number and p not in links]
    for old in [p for p in known[: max(len(known) + 1 - keep, 0)] if p.name != spare]:
        if os.path.realpath(old) in linked:
            continue
        gone = sibling_path(old, REMOVED)
        remove_checkpoint(gone)
        os.rename(resolve_checkpoint(old), gone)
    for left, kind, name in _list_siblings(path.parent):
        if kind == REMOVED and name.rstrip("0123456789") == prefix:
            remove_checkpoint(left)


def strip_number(path: Path) -> str:
    """The name without the number at its end; CheckpointError if there is none."""
    prefix = path.name.rstrip("0123456789")
    if prefix == path.name:
        raise CheckpointError(f"keep: {path} has no number at its end; save to folder/step-{{n}}")
    return prefix


def _require_free(path: Path) -> None:
    """`path` is not there, is an empty folder, or is a checkpoint with no other files in it."""
    if not path.exists():
        return
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file: a checkpoint is a folder; choose another place")
    names = os.listdir(path)
    if names and not is_checkpoint(path):
        raise CheckpointError(
            f"{path} is no checkpoint, but has files in it ({_format_some(names)}): choose another place"
        )
    foreign = [name for name in names if not OWN_FILE_PATTERN.fullmatch(name)]
    if foreign:
        raise CheckpointError(
            f"{path} holds files beside the checkpoint that would be lost ({_format_some(foreign)}): choose another "
            "place"
        )


def _format_some(names: list[str]) -> str:
    return ", ".join(sorted(names)[:5])


def _lock_checkpoint(path: Path) -> int:
    """Hold the lock of this name until `release` or the end of the process, however it ends; CheckpointError if another
    has it."""
    return lock_file(sibling_path(path, LOCK), f"{path}: another job is saving there")


def lock_file(name: Path, busy: str) -> int:
    """Lock a file, which holds until it is closed or the process ends. CheckpointError if another has it: `busy`, and
    who that is."""
    while True:
        try:
            fd = safe_files.open_lock_file(name)
        except safe_files.Untrusted as error:
            raise CheckpointError(f"{error}: remove it if no other job writes there, or choose another place") from None
        try:
            try:
                if fcntl is not None:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(fd, 1000, 0).decode(errors="replace")
                raise CheckpointError(f"{busy}: {owner or 'it has just begun'}") from None
            except OSError:
                pass  # a file system without locks
            if _is_same_file(fd, name):
                text = {"host": platform.node(), "process": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
                with suppress(OSError):  # the text is for people; a full disk is noticed in a moment
                    safe_files.write_lock_text(fd, json.dumps(text))
                return fd
        except BaseException:  # Ctrl-C, too: the process may go on, and would hold the lock for good
            os.close(fd)
            raise
        os.close(fd)  # its owner has deleted it meanwhile


def _is_same_file(fd: int, name: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(name))
    except FileNotFoundError:
        return False


def write_header(path: Path, data: Any) -> None:
    """Write the first bytes of a file that is there, and wait for the disk."""
    with open_checked(path, writing=True) as fd:
        write_at(fd, data, 0)
        sync_file(fd)
