"""Safe access to files that other users may have written: which files are trusted, how they are opened, and how new
ones are created.

There are two kinds of files. *Own* files are caches, records, notes, markers and locks that fsdpx itself wrote. They
are opened without following links, and must be regular files that this user or root owns and that no other user can
write. *Input* files are named by the user, such as a model or a checkpoint. They may belong to another user and be
reached through links, but must also be regular files. Both kinds have a maximum size. Opening a file never waits for
the other end of a pipe.

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
    "MAX_RECORD_BYTES", "READABLE", "TEMPORARY_PREFIX", "Untrusted", "can_write_folder", "create_file",
    "describe_json_error", "describe_read_error", "expanduser", "get_path_of_open_file", "is_owned_by_user",
    "is_user_owned_folder", "make_folder", "make_temporary_path", "open_file", "open_for_append", "open_lock_file",
    "open_self_deleting_file", "parse_json", "read_file", "read_if_trusted", "read_json", "remove_user_owned_folder",
    "require_json_fields", "require_private_folder", "try_create_marker", "warn_file_ignored", "write_file",
    "write_lock_text",
]  # fmt: skip

MAX_RECORD_BYTES = 1 << 20
"""Maximum size in bytes of a file that is read as a whole, unless the caller passes a different maximum."""
MAX_JSON_DEPTH = 64
"""Maximum nesting depth of lists and objects in JSON."""
MAX_JSON_DIGITS = 64
"""Maximum number of digits of an integer in JSON. Tokenizers write an integer of 31 digits to mean "no limit"."""
PRIVATE, READABLE = 0o600, 0o644
"""Modes of new files. `PRIVATE` files are for this user only. `READABLE` files, for example in a shared cache, can be
read by all users."""
TEMPORARY_PREFIX = "fsdpx-file-"
"""Name prefix of files that are unlinked as soon as all processes have opened them."""
_POSIX = hasattr(os, "geteuid")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_AT_ONCE = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_CLOEXEC", 0)
_SAFELY = _AT_ONCE | getattr(os, "O_BINARY", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_PATH_END = re.compile(r": | (?:is|belongs|can|has|comes) ")
"""Pattern of the text that follows the path in an error message about a file."""
_warned: set[str] = set()
_ESCAPES = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|u([dD][89a-fA-F]..)|.)")
"""Pattern of an escape in JSON. The group matches a lone surrogate, which is half of a pair."""


class Untrusted(OSError):
    """Error for a file or folder that exists but breaks the safety rules of this module. The message contains the path
    and the reason."""


def expanduser(path: str | os.PathLike[str]) -> Path:
    """Return a path in which ~ is replaced with the user's home folder, as in a shell. Raise ConfigError for a value
    that is not a path."""
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"{path!r} is not a path: give a string or a pathlib.Path")
    return Path(os.path.expanduser(path))


def open_file(path: str | os.PathLike[str], max_bytes: int | None = None, ours: bool = True) -> BinaryIO:
    """Open a file for reading after checking that it is safe. Raise `Untrusted` if it is not safe, and OSError if it
    cannot be opened.

    Parameters
    ----------
    path : path of the file
    max_bytes : maximum size in bytes, or None for any size
    ours : whether fsdpx itself wrote the file; if False, the file is the user's input
    """
    # check the status first, because opening a device can have side effects
    before = os.lstat(path) if ours else os.stat(path)
    _require_safe_file(path, before, max_bytes, ours)
    file = os.open(path, os.O_RDONLY | _SAFELY | (_NO_LINK if ours else 0))
    try:
        _require_safe_file(path, os.fstat(file), max_bytes, ours)
        return os.fdopen(file, "rb")
    except BaseException:
        os.close(file)
        raise


def get_path_of_open_file(file: BinaryIO, path: Path) -> Path:
    """Return the real path of an open file, with links resolved. If the system does not provide it, resolve `path`, the
    path used to open the file."""
    real_path = Path(f"/proc/self/fd/{file.fileno()}")
    return (real_path if real_path.exists() else path).resolve()


def read_file(path: str | os.PathLike[str], max_bytes: int = MAX_RECORD_BYTES, ours: bool = True) -> bytes:
    """Return the content of a file of at most `max_bytes` bytes. The file is opened with `open_file`, which makes the
    same checks and takes the same argument `ours`."""
    with open_file(path, max_bytes, ours) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise Untrusted(f"{path} has more than {max_bytes:,} bytes")
    return data


def read_json(path: str | os.PathLike[str], max_bytes: int = MAX_RECORD_BYTES, ours: bool = True) -> Any:
    """Return the parsed content of a JSON file. The arguments and errors are the same as for `read_file`. If the JSON
    is invalid, raise a ValueError that states the file, line and byte."""
    data = read_file(path, max_bytes, ours)
    try:
        return parse_json(data)
    except ValueError as error:
        raise ValueError(f"{path}, {describe_json_error(error, data)}") from None


def read_if_trusted(path: Path, max_bytes: int = MAX_RECORD_BYTES) -> bytes | None:
    """Return the content of a file that fsdpx wrote itself. Return None if the file is missing. If the file is not
    safe, warn once and return None."""
    try:
        return read_file(path, max_bytes)
    except Untrusted as error:
        warn_file_ignored(error)
    except OSError:
        pass
    return None


def describe_read_error(error: Exception, path: str | os.PathLike[str]) -> str:
    """Return an error message for a file that could not be read. It states the reason, and mentions the path exactly
    once."""
    return str(error) if isinstance(error, Untrusted) else f"{path}: {getattr(error, 'strerror', None) or error}"


def warn_file_ignored(error: Exception, path: Path | None = None) -> None:
    """Warn that a file is ignored, at most once per folder in each process. Pass the `path` of the file if the error
    does not contain the path."""
    text = f"{error}" if path is None else f"{path}: {error}"
    key = _PATH_END.split(text, maxsplit=1)[0].rpartition(os.sep)[0]
    if key not in _warned:
        _warned.add(key)
        warn(f"fsdpx: {text}; it is ignored")


def _require_safe_file(path: str | os.PathLike[str], status: os.stat_result, max_bytes: int | None, ours: bool) -> None:
    """Raise `Untrusted` unless `status` describes a regular file of at most `max_bytes` bytes. If `ours` is true, also
    require that only this user or root can write it."""
    if stat.S_ISLNK(status.st_mode):
        raise Untrusted(f"{path} is a link, which is not followed here")
    if not stat.S_ISREG(status.st_mode):
        raise Untrusted(f"{path} is a folder, a pipe or a device where a file should be")
    if ours:
        _require_owner_and_mode(path, status, _OTHERS_WRITE)
    if max_bytes is not None and status.st_size > max_bytes:
        raise Untrusted(f"{path} has {status.st_size:,} bytes, more than {max_bytes:,}")


def _require_owner_and_mode(
    path: str | os.PathLike[str], status: os.stat_result, forbidden_mode: int, allow_root: bool = True
) -> None:
    if not _POSIX:  # on Windows, other users cannot access a user's folders by default
        return
    if status.st_uid not in ((os.geteuid(), 0) if allow_root else (os.geteuid(),)):
        raise Untrusted(f"{path} belongs to user {status.st_uid}, not to this one ({os.geteuid()})")
    if status.st_mode & forbidden_mode:
        fault = "be written by" if forbidden_mode == _OTHERS_WRITE else "be entered by"
        raise Untrusted(f"{path} can {fault} others (mode {stat.S_IMODE(status.st_mode):04o})")


def parse_json(data: bytes) -> Any:
    """Parse JSON text in time linear in its length.

    Raise ValueError if the text is not valid JSON, if an object has duplicate names, if lists and objects are nested
    more than 64 levels deep, if an integer has more than 64 digits, or if a string cannot be encoded, for example
    because it contains half of a surrogate pair.
    """
    text = data.decode()
    try:
        value = json.loads(text, object_pairs_hook=_make_dict_of_unique_names, parse_int=_parse_json_int)
    except RecursionError:
        raise ValueError(f"lists and objects in it are nested more than {MAX_JSON_DEPTH} deep") from None
    _refuse_deep_nesting(value)
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{error.object[error.start]!r} in it is not valid text") from None
    return value


def describe_json_error(error: ValueError, data: bytes, line: int = 1) -> str:
    """Return a description of where and why `parse_json` rejected `data`, such as "line 3, byte 7: ...". `line` is the
    number of the first line of `data`."""
    position, why = 0, str(error)
    if isinstance(error, UnicodeDecodeError):
        position, why = error.start, f"0x{data[error.start]:02x} is not UTF-8: {error.reason}"
    elif isinstance(error, json.JSONDecodeError):
        end = len(data.rstrip())  # if the text ends too early, report the last line, not an empty line after it
        position, why = min(len(error.doc[: error.pos].encode()), end), error.msg
    else:
        position = next((found.start() for found in _ESCAPES.finditer(data) if found[1]), 0)
    line, position = line + data.count(b"\n", 0, position), position - data.rfind(b"\n", 0, position)
    return f"line {line}, byte {position}: not valid JSON: {why}"


def require_json_fields(value: Any, types: Mapping[str, Any]) -> dict[str, Any]:
    """Return `value` if it is a JSON object with exactly the names in `types`, each with a value of its type.
    Otherwise raise ValueError. A bool does not count as an int."""
    if not isinstance(value, dict) or value.keys() != types.keys():
        raise ValueError(f"it is not an object with the names {', '.join(types)}")
    for name, kind in types.items():
        allowed = kind if isinstance(kind, tuple) else (kind,)
        if type(value[name]) not in allowed:
            raise ValueError(f"{name} is not of type {' or '.join(one.__name__ for one in allowed)}")
    return value


def _make_dict_of_unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the dict for a JSON object; raise ValueError if a name occurs twice."""
    values_by_key = dict(pairs)
    if len(values_by_key) < len(pairs):
        seen = set[str]()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the name {name!r} occurs twice")
            seen.add(name)
    return values_by_key


def _parse_json_int(digits: str) -> int:
    if len(digits) > MAX_JSON_DIGITS:
        raise ValueError(f"an integer in it has more than {MAX_JSON_DIGITS} digits")
    return int(digits)


def _refuse_deep_nesting(value: Any) -> None:
    """Raise ValueError if lists and objects are nested too deeply. The check proceeds level by level, since recursion
    could overflow the stack."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        inner = [part for part in level if isinstance(part, dict | list)]
        level = [part for whole in inner for part in (whole.values() if isinstance(whole, dict) else whole)]
    if level or inner:
        raise ValueError(f"lists and objects in it are nested more than {MAX_JSON_DEPTH} deep")


def can_write_folder(path: Path) -> bool:
    """Return whether files can be created in a folder. If the folder does not exist yet, return whether it can be
    created."""
    nearest = next(folder for folder in (path, *path.parents) if os.path.exists(folder))
    return nearest.is_dir() and os.access(nearest, os.W_OK)


def make_folder(path: Path, private: bool = True) -> Path:
    """Create a folder and its parents if necessary, and return it. Raise `Untrusted` if a private folder belongs to
    another user.

    Parameters
    ----------
    path : path of the folder
    private : whether to keep other users out (mode 0700), as for the folder of a run. If False, as for a cache, other
        users may read the folder (mode 0755 at most); an existing folder is then accepted without a check, since each
        file in it is checked when it is read
    """
    missing = [path] if not os.path.lexists(path) else []
    while missing and not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for parent in reversed(missing):
        with suppress(FileExistsError):  # another rank may have just created the folder
            os.mkdir(parent, 0o700 if private else 0o755)
    if private:
        require_private_folder(path)
    return path


def require_private_folder(path: Path) -> None:
    """Raise `Untrusted` unless `path` is a folder that this user owns and no other user can enter. A link to a folder
    is not accepted."""
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise Untrusted(f"{path} is a link or a file where a folder should be")
    _require_owner_and_mode(path, status, stat.S_IRWXG | stat.S_IRWXO, allow_root=False)


def is_user_owned_folder(path: Path) -> bool:
    """Return whether `path` is a folder that this user owns. A link to a folder does not count."""
    with suppress(OSError):
        return stat.S_ISDIR(os.lstat(path).st_mode) and is_owned_by_user(path)
    return False


def is_owned_by_user(path: Path) -> bool:
    """Return whether this user owns the file, folder or link at `path`. For a link, the owner of its target does not
    matter."""
    with suppress(OSError):  # the path may have just been removed
        return not _POSIX or os.lstat(path).st_uid == os.geteuid()
    return False


def remove_user_owned_folder(path: Path) -> None:
    """Remove the folder `path` with everything in it, without following links. Do nothing unless `path` is a folder
    that this user owns."""
    if is_user_owned_folder(path):
        shutil.rmtree(path, ignore_errors=True)


def create_file(path: Path, mode: int = PRIVATE) -> int:
    """Create a file with permissions `mode`, and return its file descriptor, open for reading and writing. Raise
    FileExistsError if anything exists at `path`, even a link."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFELY | _NO_LINK, mode)


def open_self_deleting_file(folder: str | os.PathLike[str]) -> int:
    """Create a file that is deleted when the last process closes it. Return its file descriptor, open for reading and
    writing.

    If unnamed files are not supported, the file has a name for a moment, while it is still empty.
    """
    if hasattr(os, "O_TMPFILE"):
        with suppress(OSError):  # some file systems do not support O_TMPFILE
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | _SAFELY, PRIVATE)
    path = make_temporary_path(folder)
    file = create_file(path)
    os.unlink(path)
    return file


def make_temporary_path(folder: str | os.PathLike[str]) -> Path:
    """Return an unused path for a file that is unlinked soon after it has been created. If the process is killed before
    that, the file remains."""
    return Path(folder, f"{TEMPORARY_PREFIX}{os.urandom(8).hex()}")


def try_create_marker(path: Path) -> bool:
    """Create an empty marker file and return True; return False if `path` already exists."""
    with suppress(FileExistsError):
        os.close(create_file(path))
        return True
    return False


def write_file(path: Path, data: bytes | str, mode: int = PRIVATE) -> None:
    """Write a file with permissions `mode` atomically, so that readers never see incomplete data. Anything that exists
    at `path`, even a link, is replaced."""
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
    """Open a file that is used as a lock, and return its file descriptor; create the file if it is missing. Raise
    `Untrusted` if other users can access it.

    Other users can neither write the file nor hold its lock, because they cannot open it. `write_lock_text` records
    the holder.
    """
    file = _open_user_owned_file(path, os.O_RDWR, PRIVATE)
    if _POSIX:
        os.fchmod(file, PRIVATE)
    return file


def open_for_append(path: Path) -> int:
    """Open a file for appending lines, and return its file descriptor; create the file if it is missing. Raise
    `Untrusted` if this user does not own it."""
    return _open_user_owned_file(path, os.O_WRONLY | os.O_APPEND, READABLE)


def _open_user_owned_file(path: Path, flags: int, mode: int) -> int:
    """Open a file for writing; raise `Untrusted` unless it is a regular file that this user owns and that has no other
    hard links."""
    for _ in range(100):  # try again if another process of this user creates or removes the file at the same time
        with suppress(FileExistsError):
            return os.open(path, flags | os.O_CREAT | os.O_EXCL | _SAFELY | _NO_LINK, mode)
        with suppress(FileNotFoundError):
            _require_user_owned_file(path, os.lstat(path))
            file = os.open(path, flags | _SAFELY | _NO_LINK)
            try:
                _require_user_owned_file(path, os.fstat(file))
            except BaseException:
                os.close(file)
                raise
            return file
    raise Untrusted(f"{path} is created and removed repeatedly, so it cannot be opened")


def _require_user_owned_file(path: Path, status: os.stat_result) -> None:
    _require_safe_file(path, status, None, ours=False)
    _require_owner_and_mode(path, status, 0, allow_root=False)
    if status.st_nlink > 1:
        raise Untrusted(f"{path} is another file's name as well (a hard link)")


def write_lock_text(file: int, text: str) -> None:
    """Replace the content of a lock file with `text`, which says who holds the lock. `file` is the file descriptor."""
    os.ftruncate(file, 0)
    os.lseek(file, 0, os.SEEK_SET)
    os.write(file, text.encode())
