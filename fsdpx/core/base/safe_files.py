"""Files that others may have written: which of them are believed, how they are opened, and how new ones are made.

There are two kinds. Files of *ours* are caches, records, notes, marks and locks that fsdpx wrote itself: they are
opened without following links, and they must be regular files of this user or of root that no other user can write. The
user's *input* is a file that the user names, such as a model or a checkpoint: it may belong to another user and be
reached over links, but it must be a regular file as well. Both have a largest size. Opening never waits for the other
end of a pipe.

What does not fit is `Untrusted`. A caller that can make the file again passes over it with one warning (`passed_over`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from fsdpx.errors import ConfigError, warn

__all__ = [
    "LARGEST_RECORD",
    "READABLE",
    "TEMPORARY",
    "Untrusted",
    "check_fields",
    "create_file",
    "create_marker",
    "describe_json_error",
    "describe_read_error",
    "expanduser",
    "is_folder",
    "is_owned_by_user",
    "make_folder",
    "make_temporary_path",
    "open_file",
    "open_for_append",
    "open_lock_file",
    "open_unnamed",
    "parse_json",
    "read_file",
    "read_if_trusted",
    "read_json",
    "remove_folder",
    "require_private",
    "resolve_open_file",
    "warn_ignored",
    "write_file",
    "write_lock_text",
]  # fmt: skip

LARGEST_RECORD = 1 << 20
"""Bytes of a file of ours that is read whole, unless the caller says another number."""
MAX_JSON_DEPTH = 64
"""Lists and objects inside each other in JSON."""
MAX_JSON_DIGITS = 64
"""The most digits of a whole number in JSON. Tokenizers write a number of 31 digits for "no limit"."""
PRIVATE, READABLE = 0o600, 0o644
"""Modes of new files: for this user alone, and for others to read, as in a cache that users share."""
TEMPORARY = "fsdpx-file-"
"""How names of files begin that have one only until all processes have opened them."""
_POSIX = hasattr(os, "geteuid")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_AT_ONCE = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_CLOEXEC", 0)
_SAFELY = _AT_ONCE | getattr(os, "O_BINARY", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_PATH_END = re.compile(r": | (?:is|belongs|can|has|comes) ")
"""Where the path ends in what is said of a file."""
_warned: set[str] = set()
_ESCAPES = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|u([dD][89a-fA-F]..)|.)")
"""Escapes in JSON, of which the group is half of a surrogate pair."""


class Untrusted(OSError):
    """A file or a folder that is there, but not as it has to be. The text names it and says why."""


def expanduser(path: str | os.PathLike[str]) -> Path:
    """A path as a shell reads it: ~ is the home folder of the user. ConfigError for what is no path."""
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"{path!r} is no path: give a text or a pathlib.Path")
    return Path(os.path.expanduser(path))


# -- reading ---------------------------------------------------------------------------------------------------------


def open_file(path: str | os.PathLike[str], most: int | None = None, ours: bool = True) -> BinaryIO:
    """A file opened for reading; `Untrusted` where it is not as it has to be, OSError where it cannot be opened.

    Parameters
    ----------
    path : the file
    most : the largest size in bytes, or None for any
    ours : whether fsdpx has written it; otherwise it is the user's input
    """
    before = os.lstat(path) if ours else os.stat(path)  # opening a device can do something by itself
    _require_safe_file(path, before, most, ours)
    file = os.open(path, os.O_RDONLY | _SAFELY | (_NO_LINK if ours else 0))
    try:
        _require_safe_file(path, os.fstat(file), most, ours)
        return os.fdopen(file, "rb")
    except BaseException:
        os.close(file)
        raise


def resolve_open_file(file: BinaryIO, path: Path) -> Path:
    """Where an open file lies, without links. path: by which it was opened, where the system cannot say it."""
    real_path = Path(f"/proc/self/fd/{file.fileno()}")
    return (real_path if real_path.exists() else path).resolve()


def read_file(path: str | os.PathLike[str], most: int = LARGEST_RECORD, ours: bool = True) -> bytes:
    """The content of a file of at most this many bytes, as `open_file` opens it."""
    with open_file(path, most, ours) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise Untrusted(f"{path} has more than {most:,} bytes")
    return data


def read_json(path: str | os.PathLike[str], most: int = LARGEST_RECORD, ours: bool = True) -> Any:
    """The value of a file of JSON; as `read`, and ValueError as `parse_json`, with the file, the line and the byte."""
    data = read_file(path, most, ours)
    try:
        return parse_json(data)
    except ValueError as error:
        raise ValueError(f"{path}, {describe_json_error(error, data)}") from None


def read_if_trusted(path: Path, most: int = LARGEST_RECORD) -> bytes | None:
    """The content of a file of ours; None if there is none, or, with one warning, if it is refused."""
    try:
        return read_file(path, most)
    except Untrusted as error:
        warn_ignored(error)
    except OSError:
        pass
    return None


def describe_read_error(error: Exception, path: str | os.PathLike[str]) -> str:
    """What to say of a file that could not be read: its name, once, and why."""
    return str(error) if isinstance(error, Untrusted) else f"{path}: {getattr(error, 'strerror', None) or error}"


def warn_ignored(error: Exception, path: Path | None = None) -> None:
    """Warn, once per process and folder, that a file is not used. path: the file, where the error does not name it."""
    text = f"{error}" if path is None else f"{path}: {error}"
    key = _PATH_END.split(text, maxsplit=1)[0].rpartition(os.sep)[0]
    if key not in _warned:
        _warned.add(key)
        warn(f"fsdpx: {text}; it is passed over")


def _require_safe_file(path: str | os.PathLike[str], found: os.stat_result, most: int | None, ours: bool) -> None:
    """`Untrusted` unless this is a regular file, not too large, and, if one of ours, of this user or root alone."""
    if stat.S_ISLNK(found.st_mode):
        raise Untrusted(f"{path} is a link, which is not followed here")
    if not stat.S_ISREG(found.st_mode):
        raise Untrusted(f"{path} is a folder, a pipe or a device where a file should be")
    if ours:
        _require_owner(path, found, _OTHERS_WRITE)
    if most is not None and found.st_size > most:
        raise Untrusted(f"{path} has {found.st_size:,} bytes, more than {most:,}")


def _require_owner(path: str | os.PathLike[str], found: os.stat_result, closed: int, root: bool = True) -> None:
    if not _POSIX:  # there a user's folders are the user's
        return
    if found.st_uid not in ((os.geteuid(), 0) if root else (os.geteuid(),)):
        raise Untrusted(f"{path} belongs to user {found.st_uid}, not to this one ({os.geteuid()})")
    if found.st_mode & closed:
        fault = "be written by" if closed == _OTHERS_WRITE else "be entered by"
        raise Untrusted(f"{path} can {fault} others (mode {stat.S_IMODE(found.st_mode):04o})")


# -- JSON ------------------------------------------------------------------------------------------------------------


def parse_json(data: bytes) -> Any:
    """The value of a JSON text, in time linear in its length.

    ValueError if it is none, if an object has a name twice, if lists and objects are more than 64 deep, if a whole
    number has more than 64 digits, or if a text in it cannot be written, as half of a surrogate pair."""
    text = data.decode()
    try:
        value = json.loads(text, object_pairs_hook=_require_unique_names, parse_int=_parse_int)
    except RecursionError:
        raise ValueError(f"lists and objects in it are more than {MAX_JSON_DEPTH} deep") from None
    _require_depth(value)
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{error.object[error.start]!r} in it is no text") from None
    return value


def describe_json_error(error: ValueError, data: bytes, line: int = 1) -> str:
    """Where and why `parse_json` refused these bytes: "line 3, byte 7: ...". line: the number of their first line."""
    position, why = 0, str(error)
    if isinstance(error, UnicodeDecodeError):
        position, why = error.start, f"0x{data[error.start]:02x} is not UTF-8: {error.reason}"
    elif isinstance(error, json.JSONDecodeError):
        end = len(data.rstrip())  # what is missing at the end is missing on the last line, not on an empty one after it
        position, why = min(len(error.doc[: error.pos].encode()), end), error.msg
    else:
        position = next((found.start() for found in _ESCAPES.finditer(data) if found[1]), 0)
    line, position = line + data.count(b"\n", 0, position), position - data.rfind(b"\n", 0, position)
    return f"line {line}, byte {position}: this is no JSON: {why}"


def check_fields(found: Any, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The value if it is an object of exactly these names, each with a value of its type, or of one of its types;
    otherwise ValueError. A bool is no int."""
    if not isinstance(found, dict) or found.keys() != kinds.keys():
        raise ValueError(f"it is no object of {', '.join(kinds)}")
    for name, kind in kinds.items():
        allowed = kind if isinstance(kind, tuple) else (kind,)
        if type(found[name]) not in allowed:
            raise ValueError(f"{name} is no {' or '.join(one.__name__ for one in allowed)}")
    return found


def _require_unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; ValueError if it has a name twice."""
    values_by_key = dict(pairs)
    if len(values_by_key) < len(pairs):
        seen = set[str]()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the name {name!r} is there twice")
            seen.add(name)
    return values_by_key


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_JSON_DIGITS:
        raise ValueError(f"a whole number in it has more than {MAX_JSON_DIGITS} digits")
    return int(digits)


def _require_depth(value: Any) -> None:
    """Level by level, since a function that calls itself would end where the value is deeper than the stack."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        inner = [part for part in level if isinstance(part, dict | list)]
        level = [part for whole in inner for part in (whole.values() if isinstance(whole, dict) else whole)]
    if level or inner:
        raise ValueError(f"lists and objects in it are more than {MAX_JSON_DEPTH} deep")


# -- folders ---------------------------------------------------------------------------------------------------------


def make_folder(path: Path, private: bool = True) -> Path:
    """The folder, made with the folders above it if it is not there; `Untrusted` if it is not this user's.

    Parameters
    ----------
    path : the folder
    private : whether others may not enter it (mode 0700), as a run's folder; otherwise they may read (0755 at most), as
        a cache, of which an existing folder is taken as it is: each file in it is looked at when it is read
    """
    missing = [path] if not os.path.lexists(path) else []
    while missing and not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for parent in reversed(missing):
        with suppress(FileExistsError):  # another rank has made it meanwhile
            os.mkdir(parent, 0o700 if private else 0o755)
    if private:
        require_private(path)
    return path


def require_private(path: Path) -> None:
    """`Untrusted` unless this is a folder, not a link to one, that this user owns and no other user can enter."""
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise Untrusted(f"{path} is a link or a file where a folder should be")
    _require_owner(path, status, stat.S_IRWXG | stat.S_IRWXO, root=False)


def is_folder(path: Path) -> bool:
    """Whether a path is a folder of this user, and not a link to one."""
    with suppress(OSError):
        return stat.S_ISDIR(os.lstat(path).st_mode) and is_owned_by_user(path)
    return False


def is_owned_by_user(path: Path) -> bool:
    """Whether this user owns what is there, a link itself rather than what it points at."""
    with suppress(OSError):  # it is gone by now
        return not _POSIX or os.lstat(path).st_uid == os.geteuid()
    return False


def remove_folder(path: Path) -> None:
    """Remove a folder of this user with all that is in it, without following links; nothing else."""
    if is_folder(path):
        shutil.rmtree(path, ignore_errors=True)


# -- writing ---------------------------------------------------------------------------------------------------------


def create_file(path: Path, mode: int = PRIVATE) -> int:
    """A new file, open for reading and writing; FileExistsError if there is anything of this name, even a link."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFELY | _NO_LINK, mode)


def open_unnamed(folder: str | os.PathLike[str]) -> int:
    """A new file in a folder, open for reading and writing, that goes with the last process that has it open. Where the
    system cannot make one without a name it has one for a moment, while it is empty."""
    if hasattr(os, "O_TMPFILE"):
        with suppress(OSError):  # a file system that has none
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | _SAFELY, PRIVATE)
    path = make_temporary_path(folder)
    file = create_file(path)
    os.unlink(path)
    return file


def make_temporary_path(folder: str | os.PathLike[str]) -> Path:
    """A path for a file that has a name for a moment; a process that is killed then leaves it, empty."""
    return Path(folder, f"{TEMPORARY}{os.urandom(8).hex()}")


def create_marker(path: Path) -> bool:
    """Make an empty file; False if there is anything of this name already."""
    with suppress(FileExistsError):
        os.close(create_file(path))
        return True
    return False


def write_file(path: Path, data: bytes | str, mode: int = PRIVATE) -> None:
    """Write a file that is there whole or not at all, and replaces whatever has its name, even a link."""
    partial = path.with_name(f"{path.name}.{os.urandom(8).hex()}.partial")
    file = create_file(partial, mode)
    try:
        with os.fdopen(file, "wb") as out:
            out.write(data.encode() if isinstance(data, str) else data)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise


def open_lock_file(path: Path) -> int:
    """A file to lock, open to read and write, made if it is not there; `Untrusted` if it is not this user's alone.

    Other users can neither write it nor, as they cannot open it, hold its lock. `sign` writes who holds it."""
    file = _open_own_file(path, os.O_RDWR, PRIVATE)
    if _POSIX:
        os.fchmod(file, PRIVATE)
    return file


def open_for_append(path: Path) -> int:
    """A file for lines, open to write at its end, made if it is not there; `Untrusted` if it is not this user's."""
    return _open_own_file(path, os.O_WRONLY | os.O_APPEND, READABLE)


def _open_own_file(path: Path, how: int, mode: int) -> int:
    """A regular file of this user under no other name, which may be written to."""
    for _ in range(100):  # another process of this user may make or remove it meanwhile
        with suppress(FileExistsError):
            return os.open(path, how | os.O_CREAT | os.O_EXCL | _SAFELY | _NO_LINK, mode)
        with suppress(FileNotFoundError):
            _require_own(path, os.lstat(path))
            file = os.open(path, how | _SAFELY | _NO_LINK)
            try:
                _require_own(path, os.fstat(file))
            except BaseException:
                os.close(file)
                raise
            return file
    raise Untrusted(f"{path} comes and goes: it cannot be opened")


def _require_own(path: Path, found: os.stat_result) -> None:
    _require_safe_file(path, found, None, ours=False)
    _require_owner(path, found, 0, root=False)
    if found.st_nlink > 1:
        raise Untrusted(f"{path} is another file's name as well (a hard link)")


def write_lock_text(file: int, text: str) -> None:
    """Write a text into a lock's file in place of what it says."""
    os.ftruncate(file, 0)
    os.lseek(file, 0, os.SEEK_SET)
    os.write(file, text.encode())
