"""Safe access to files that others may have written: which are trusted, how they are opened, and how new ones are
created.

There are two kinds. Files of *ours* are caches, records, notes, marks and locks that fsdpx wrote itself: they are
opened without following links, and they must be regular files of this user or of root that no other user can write. The
user's *input* is a file that the user names, such as a model or a checkpoint: it may belong to another user and be
reached over links, but it must be a regular file as well. Both have a maximum size. Opening never blocks on the other
end of a pipe.

A file that breaks these rules raises `Untrusted`. A caller that can recreate the file ignores it with one warning
(`warn_file_ignored`).
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
    "LARGEST_RECORD", "READABLE", "TEMPORARY", "Untrusted", "create_file", "create_marker", "describe_json_error",
    "describe_read_error", "expanduser", "is_own_folder", "is_owned_by_user", "make_folder", "make_temporary_path",
    "open_file", "open_for_append", "open_lock_file", "open_unnamed_file", "parse_json", "read_file",
    "read_if_trusted", "read_json", "remove_own_folder", "require_json_fields", "require_private_folder",
    "resolve_open_file", "warn_file_ignored", "write_file", "write_lock_text",
]  # fmt: skip

LARGEST_RECORD = 1 << 20
"""Maximum size in bytes of a file of ours that is read whole, unless the caller gives another."""
MAX_JSON_DEPTH = 64
"""Maximum nesting of lists and objects in JSON."""
MAX_JSON_DIGITS = 64
"""Maximum digits of an integer in JSON. Tokenizers write a number of 31 digits for "no limit"."""
PRIVATE, READABLE = 0o600, 0o644
"""Modes of new files: for this user only, and readable by others, as in a cache that users share."""
TEMPORARY = "fsdpx-file-"
"""Prefix of files that have a name only until all processes have opened them."""
_POSIX = hasattr(os, "geteuid")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_AT_ONCE = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_CLOEXEC", 0)
_SAFELY = _AT_ONCE | getattr(os, "O_BINARY", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_PATH_END = re.compile(r": | (?:is|belongs|can|has|comes) ")
"""End of the path in an error message about a file."""
_warned: set[str] = set()
_ESCAPES = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|u([dD][89a-fA-F]..)|.)")
"""Escapes in JSON; the group is a lone surrogate, half of a pair."""


class Untrusted(OSError):
    """A file or folder exists, but breaks the rules of this module. The message names it and says why."""


def expanduser(path: str | os.PathLike[str]) -> Path:
    """Return a path with ~ expanded to the user's home folder, as a shell does; raise ConfigError if it is not a
    path."""
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"{path!r} is no path: give a text or a pathlib.Path")
    return Path(os.path.expanduser(path))


# -- reading ---------------------------------------------------------------------------------------------------------


def open_file(path: str | os.PathLike[str], max_bytes: int | None = None, ours: bool = True) -> BinaryIO:
    """Return a file opened for reading; raise `Untrusted` if it breaks the rules, OSError if it cannot be opened.

    Parameters
    ----------
    path : the file
    max_bytes : the maximum size in bytes, or None for any
    ours : whether fsdpx has written it; otherwise it is the user's input
    """
    before = os.lstat(path) if ours else os.stat(path)  # opening a device can have side effects
    _require_safe_file(path, before, max_bytes, ours)
    file = os.open(path, os.O_RDONLY | _SAFELY | (_NO_LINK if ours else 0))
    try:
        _require_safe_file(path, os.fstat(file), max_bytes, ours)
        return os.fdopen(file, "rb")
    except BaseException:
        os.close(file)
        raise


def resolve_open_file(file: BinaryIO, path: Path) -> Path:
    """Return the real path of an open file, without links; from `path`, by which it was opened, if the system cannot
    tell."""
    real_path = Path(f"/proc/self/fd/{file.fileno()}")
    return (real_path if real_path.exists() else path).resolve()


def read_file(path: str | os.PathLike[str], max_bytes: int = LARGEST_RECORD, ours: bool = True) -> bytes:
    """Return the content of a file of at most `max_bytes` bytes, opened by `open_file`."""
    with open_file(path, max_bytes, ours) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise Untrusted(f"{path} has more than {max_bytes:,} bytes")
    return data


def read_json(path: str | os.PathLike[str], max_bytes: int = LARGEST_RECORD, ours: bool = True) -> Any:
    """Return the value of a JSON file. Raises as `read_file`, and ValueError as `parse_json`, with the file, line and
    byte."""
    data = read_file(path, max_bytes, ours)
    try:
        return parse_json(data)
    except ValueError as error:
        raise ValueError(f"{path}, {describe_json_error(error, data)}") from None


def read_if_trusted(path: Path, max_bytes: int = LARGEST_RECORD) -> bytes | None:
    """Return the content of a file of ours; None if it is missing, or, with one warning, if it is rejected."""
    try:
        return read_file(path, max_bytes)
    except Untrusted as error:
        warn_file_ignored(error)
    except OSError:
        pass
    return None


def describe_read_error(error: Exception, path: str | os.PathLike[str]) -> str:
    """Return the message about a file that could not be read: its name, once, and the reason."""
    return str(error) if isinstance(error, Untrusted) else f"{path}: {getattr(error, 'strerror', None) or error}"


def warn_file_ignored(error: Exception, path: Path | None = None) -> None:
    """Warn, once per process and folder, that a file is ignored. `path` is the file, if the error does not name it."""
    text = f"{error}" if path is None else f"{path}: {error}"
    key = _PATH_END.split(text, maxsplit=1)[0].rpartition(os.sep)[0]
    if key not in _warned:
        _warned.add(key)
        warn(f"fsdpx: {text}; it is ignored")


def _require_safe_file(path: str | os.PathLike[str], found: os.stat_result, max_bytes: int | None, ours: bool) -> None:
    """Raise `Untrusted` unless this is a regular file, not too large, and, if `ours`, writable only by this user or
    root."""
    if stat.S_ISLNK(found.st_mode):
        raise Untrusted(f"{path} is a link, which is not followed here")
    if not stat.S_ISREG(found.st_mode):
        raise Untrusted(f"{path} is a folder, a pipe or a device where a file should be")
    if ours:
        _require_owner_and_mode(path, found, _OTHERS_WRITE)
    if max_bytes is not None and found.st_size > max_bytes:
        raise Untrusted(f"{path} has {found.st_size:,} bytes, more than {max_bytes:,}")


def _require_owner_and_mode(
    path: str | os.PathLike[str], found: os.stat_result, forbidden_mode: int, allow_root: bool = True
) -> None:
    if not _POSIX:  # on Windows a user's folders are closed to others by default
        return
    if found.st_uid not in ((os.geteuid(), 0) if allow_root else (os.geteuid(),)):
        raise Untrusted(f"{path} belongs to user {found.st_uid}, not to this one ({os.geteuid()})")
    if found.st_mode & forbidden_mode:
        fault = "be written by" if forbidden_mode == _OTHERS_WRITE else "be entered by"
        raise Untrusted(f"{path} can {fault} others (mode {stat.S_IMODE(found.st_mode):04o})")


# -- JSON ------------------------------------------------------------------------------------------------------------


def parse_json(data: bytes) -> Any:
    """Return the value of a JSON text, in time linear in its length.

    Raises ValueError if it is not valid JSON, if an object has a name twice, if lists and objects are nested more than
    64 deep, if an integer has more than 64 digits, or if a string in it cannot be encoded, such as half of a surrogate
    pair.
    """
    text = data.decode()
    try:
        value = json.loads(text, object_pairs_hook=_make_dict_of_unique_names, parse_int=_parse_json_int)
    except RecursionError:
        raise ValueError(f"lists and objects in it are more than {MAX_JSON_DEPTH} deep") from None
    _refuse_deep_nesting(value)
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{error.object[error.start]!r} in it is no text") from None
    return value


def describe_json_error(error: ValueError, data: bytes, line: int = 1) -> str:
    """Return where and why `parse_json` rejected these bytes: "line 3, byte 7: ...". `line` is the number of their
    first line."""
    position, why = 0, str(error)
    if isinstance(error, UnicodeDecodeError):
        position, why = error.start, f"0x{data[error.start]:02x} is not UTF-8: {error.reason}"
    elif isinstance(error, json.JSONDecodeError):
        end = len(data.rstrip())  # report a missing end on the last line, not on an empty one after it
        position, why = min(len(error.doc[: error.pos].encode()), end), error.msg
    else:
        position = next((found.start() for found in _ESCAPES.finditer(data) if found[1]), 0)
    line, position = line + data.count(b"\n", 0, position), position - data.rfind(b"\n", 0, position)
    return f"line {line}, byte {position}: not valid JSON: {why}"


def require_json_fields(found: Any, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value if it is an object of exactly these names, each with a value of its type, or of one of its
    types; otherwise raise ValueError. A bool does not count as an int."""
    if not isinstance(found, dict) or found.keys() != kinds.keys():
        raise ValueError(f"it is no object of {', '.join(kinds)}")
    for name, kind in kinds.items():
        allowed = kind if isinstance(kind, tuple) else (kind,)
        if type(found[name]) not in allowed:
            raise ValueError(f"{name} is no {' or '.join(one.__name__ for one in allowed)}")
    return found


def _make_dict_of_unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; raise ValueError if it has a name twice."""
    values_by_key = dict(pairs)
    if len(values_by_key) < len(pairs):
        seen = set[str]()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the name {name!r} is there twice")
            seen.add(name)
    return values_by_key


def _parse_json_int(digits: str) -> int:
    if len(digits) > MAX_JSON_DIGITS:
        raise ValueError(f"a whole number in it has more than {MAX_JSON_DIGITS} digits")
    return int(digits)


def _refuse_deep_nesting(value: Any) -> None:
    """Raise ValueError for too deep a nesting. Works level by level, since recursion would overflow the stack."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        inner = [part for part in level if isinstance(part, dict | list)]
        level = [part for whole in inner for part in (whole.values() if isinstance(whole, dict) else whole)]
    if level or inner:
        raise ValueError(f"lists and objects in it are more than {MAX_JSON_DEPTH} deep")


# -- folders ---------------------------------------------------------------------------------------------------------


def make_folder(path: Path, private: bool = True) -> Path:
    """Return the folder, created with its parents if it does not exist; raise `Untrusted` if it is not this user's.

    Parameters
    ----------
    path : the folder
    private : whether others may not enter it (mode 0700), as a run's folder; otherwise they may read it (0755 at most),
        as a cache. An existing cache folder is accepted unchecked: each file in it is checked when it is read
    """
    missing = [path] if not os.path.lexists(path) else []
    while missing and not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for parent in reversed(missing):
        with suppress(FileExistsError):  # another rank has created it meanwhile
            os.mkdir(parent, 0o700 if private else 0o755)
    if private:
        require_private_folder(path)
    return path


def require_private_folder(path: Path) -> None:
    """Raise `Untrusted` unless this is a folder, not a link to one, that this user owns and no other user can enter."""
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise Untrusted(f"{path} is a link or a file where a folder should be")
    _require_owner_and_mode(path, status, stat.S_IRWXG | stat.S_IRWXO, allow_root=False)


def is_own_folder(path: Path) -> bool:
    """Return whether a path is a folder of this user, and not a link to one."""
    with suppress(OSError):
        return stat.S_ISDIR(os.lstat(path).st_mode) and is_owned_by_user(path)
    return False


def is_owned_by_user(path: Path) -> bool:
    """Return whether this user owns the path; of a link, the link itself."""
    with suppress(OSError):  # it has been removed meanwhile
        return not _POSIX or os.lstat(path).st_uid == os.geteuid()
    return False


def remove_own_folder(path: Path) -> None:
    """Remove a folder of this user with its content, without following links; do nothing for any other path."""
    if is_own_folder(path):
        shutil.rmtree(path, ignore_errors=True)


# -- writing ---------------------------------------------------------------------------------------------------------


def create_file(path: Path, mode: int = PRIVATE) -> int:
    """Create a file and return it open for reading and writing; FileExistsError if the name is taken, even by a
    link."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFELY | _NO_LINK, mode)


def open_unnamed_file(folder: str | os.PathLike[str]) -> int:
    """Return a new file, open for reading and writing, that is deleted with the last process that has it open. If the
    system cannot create one without a name, it has a name for a moment, while it is empty."""
    if hasattr(os, "O_TMPFILE"):
        with suppress(OSError):  # a file system without O_TMPFILE
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | _SAFELY, PRIVATE)
    path = make_temporary_path(folder)
    file = create_file(path)
    os.unlink(path)
    return file


def make_temporary_path(folder: str | os.PathLike[str]) -> Path:
    """Return a path for a file that has a name for a moment; if the process is killed then, the empty file remains."""
    return Path(folder, f"{TEMPORARY}{os.urandom(8).hex()}")


def create_marker(path: Path) -> bool:
    """Create an empty file and return True; False if the name is taken."""
    with suppress(FileExistsError):
        os.close(create_file(path))
        return True
    return False


def write_file(path: Path, data: bytes | str, mode: int = PRIVATE) -> None:
    """Write a file atomically: it exists whole or not at all. It replaces anything of this name, even a link."""
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
    """Return a file to lock, open for reading and writing, created if missing; raise `Untrusted` if others have access
    to it.

    Other users can neither write it nor, as they cannot open it, hold its lock. `write_lock_text` records the holder.
    """
    file = _open_own_file(path, os.O_RDWR, PRIVATE)
    if _POSIX:
        os.fchmod(file, PRIVATE)
    return file


def open_for_append(path: Path) -> int:
    """Return a file open for appending lines, created if missing; raise `Untrusted` if it is not this user's."""
    return _open_own_file(path, os.O_WRONLY | os.O_APPEND, READABLE)


def _open_own_file(path: Path, flags: int, mode: int) -> int:
    """Open a regular file of this user without other hard links, to write to it."""
    for _ in range(100):  # another process of this user may create or remove it meanwhile
        with suppress(FileExistsError):
            return os.open(path, flags | os.O_CREAT | os.O_EXCL | _SAFELY | _NO_LINK, mode)
        with suppress(FileNotFoundError):
            _require_own_file(path, os.lstat(path))
            file = os.open(path, flags | _SAFELY | _NO_LINK)
            try:
                _require_own_file(path, os.fstat(file))
            except BaseException:
                os.close(file)
                raise
            return file
    raise Untrusted(f"{path} comes and goes: it cannot be opened")


def _require_own_file(path: Path, found: os.stat_result) -> None:
    _require_safe_file(path, found, None, ours=False)
    _require_owner_and_mode(path, found, 0, allow_root=False)
    if found.st_nlink > 1:
        raise Untrusted(f"{path} is another file's name as well (a hard link)")


def write_lock_text(file: int, text: str) -> None:
    """Replace the text of a lock file."""
    os.ftruncate(file, 0)
    os.lseek(file, 0, os.SEEK_SET)
    os.write(file, text.encode())
