"""Which files are believed: attacks on every rule of `fsdpx.core.base.safe_files`, as another user where the tests run
as root."""

import os
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fsdpx.core.base import safe_files
from fsdpx.core.base.safe_files import Untrusted
from fsdpx.errors import ConfigError

OTHER = 65534
posix = pytest.mark.skipif(os.name != "posix", reason="there are no owners and modes")
as_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can be another user")


@contextmanager
def another_user() -> Iterator[None]:
    """Inside, this process is another user, as far as files are concerned."""
    os.setegid(OTHER)
    os.seteuid(OTHER)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def planted(path: Path, kind: str) -> Path:
    """Something that is no file of ours to be believed."""
    if kind == "link":
        (path.parent / "elsewhere").write_text("{}")
        path.symlink_to(path.parent / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "sparse":
        path.touch(0o600)
        os.truncate(path, 10 << 30)
    else:
        path.write_text("{}")
        path.chmod(0o620 if kind == "group" else 0o602)
    return path


REFUSALS = {
    "link": "is a link, which is not followed here",
    "device": "is a link, which is not followed here",
    "pipe": "is a folder, a pipe or a device where a file should be",
    "folder": "is a folder, a pipe or a device where a file should be",
    "sparse": r"has 10,737,418,240 bytes, more than 1,048,576",
    "group": r"can be written by others \(mode 0620\)",
    "world": r"can be written by others \(mode 0602\)",
}


@posix
@pytest.mark.parametrize("kind", REFUSALS)
def test_a_file_of_ours_is_read_only_as_it_has_to_be(tmp_path: Path, kind: str) -> None:
    path = planted(tmp_path / "file", kind)
    with pytest.raises(Untrusted, match=f"^{path} {REFUSALS[kind]}$"):
        safe_files.read_file(path)
    with pytest.warns(RuntimeWarning, match=f"^fsdpx: {path} {REFUSALS[kind]}; it is ignored$"):
        assert safe_files.read_if_trusted(path) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert safe_files.read_if_trusted(path) is None  # one warning for each folder
    if kind in ("sparse", "group", "world"):  # what it says does not count, and from now on it is this user's alone
        os.close(safe_files.open_for_append(path))
        os.close(safe_files.open_lock_file(path))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    else:
        for opened in (safe_files.open_lock_file, safe_files.open_for_append):
            with pytest.raises(Untrusted, match=REFUSALS[kind]):
                opened(path)


@posix
@pytest.mark.parametrize("kind", ["device", "pipe", "folder", "sparse"])
def test_input_is_a_file_of_bounded_size(tmp_path: Path, kind: str) -> None:
    path = planted(tmp_path / "file", kind)
    with pytest.raises(Untrusted, match=REFUSALS["pipe" if kind == "device" else kind]):
        safe_files.read_file(path, ours=False)


@posix
@pytest.mark.parametrize("kind", ["link", "group"])
def test_input_may_be_a_link_and_belong_to_others(tmp_path: Path, kind: str) -> None:
    assert safe_files.read_json(planted(tmp_path / "file", kind), ours=False) == {}


def test_what_is_there_is_read_and_what_is_not_is_none(tmp_path: Path) -> None:
    safe_files.write_file(tmp_path / "file", "[1, 2]")
    assert safe_files.read_json(tmp_path / "file", max_bytes=6) == [1, 2]
    assert safe_files.read_if_trusted(tmp_path / "none") is None
    with pytest.raises(Untrusted, match="has 6 bytes, more than 5"):
        safe_files.read_file(tmp_path / "file", 5)
    with pytest.raises(ConfigError, match=r"^3 is not a path: give a string or a "):
        safe_files.expanduser(3)


@as_root
def test_a_file_of_another_user_is_refused_and_one_of_root_is_not(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    for above in tmp_path.parents[:3]:
        above.chmod(above.stat().st_mode | 0o011)
    (tmp_path / "roots").write_text("1")
    with another_user():
        (tmp_path / "others").write_text("1")
        assert safe_files.read_file(tmp_path / "roots") == b"1"
        with pytest.raises(Untrusted, match=r"belongs to user 0, not to this one \(65534\)"):
            safe_files.open_lock_file(tmp_path / "roots")
    with pytest.raises(Untrusted, match=r"belongs to user 65534, not to this one \(0\)"):
        safe_files.read_file(tmp_path / "others")
    with pytest.raises(Untrusted, match="belongs to user 65534"):
        safe_files.open_lock_file(tmp_path / "others")
    assert safe_files.read_file(tmp_path / "others", ours=False) == b"1"


@posix
@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022])
def test_modes_do_not_depend_on_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        safe_files.make_folder(tmp_path / "a" / "b")
        safe_files.make_folder(tmp_path / "cache" / "code", private=False)
        safe_files.write_file(tmp_path / "a" / "private", "x")
        safe_files.write_file(tmp_path / "a" / "readable", "x", safe_files.READABLE)
        os.close(safe_files.open_lock_file(tmp_path / "a" / "lock"))
    finally:
        os.umask(before)
    modes = {path.name: f"{stat.S_IMODE(path.stat().st_mode):o}" for path in tmp_path.rglob("*")}
    assert modes == {
        "a": "700", "b": "700", "cache": "755", "code": "755", "private": "600", "readable": "644", "lock": "600",
    }  # fmt: skip


@posix
def test_a_private_folder_is_nothing_else(tmp_path: Path) -> None:
    assert safe_files.make_folder(safe_files.make_folder(tmp_path / "run")) == tmp_path / "run"
    (tmp_path / "open").mkdir(mode=0o750)
    with pytest.raises(Untrusted, match=r"open can be entered by others \(mode 0750\)"):
        safe_files.make_folder(tmp_path / "open")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    for name in ("link", "dangling", "file"):
        with pytest.raises(Untrusted, match=f"{name} is a link or a file where a folder should be"):
            safe_files.make_folder(tmp_path / name)
    assert not (tmp_path / "nowhere").exists()


@as_root
def test_a_private_folder_that_another_user_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    os.chown(tmp_path / "run", OTHER, OTHER)
    with pytest.raises(Untrusted, match=r"run belongs to user 65534, not to this one \(0\)"):
        safe_files.make_folder(tmp_path / "run")
    safe_files.remove_user_owned_folder(tmp_path / "run")
    assert (tmp_path / "run").exists()


@posix
def test_writing_replaces_a_link_and_not_what_it_points_at(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(FileExistsError):
        safe_files.create_file(tmp_path / "link")
    safe_files.write_file(tmp_path / "link", "new")
    assert (tmp_path / "target").read_text() == "mine"
    assert (tmp_path / "link").read_text() == "new"
    assert not (tmp_path / "link").is_symlink()
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        safe_files.write_file(tmp_path / "folder", "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "link", "target"]


@posix
def test_a_lock_is_made_once_and_signed(tmp_path: Path) -> None:
    first, second = safe_files.open_lock_file(tmp_path / "lock"), safe_files.open_lock_file(tmp_path / "lock")
    safe_files.write_lock_text(first, "longer")
    safe_files.write_lock_text(second, "short")
    assert (tmp_path / "lock").read_text() == "short"
    assert os.path.samestat(os.fstat(first), os.fstat(second))
    for file in (first, second):
        os.close(file)
    os.link(tmp_path / "lock", tmp_path / "other")
    with pytest.raises(Untrusted, match=r"other is another file's name as well \(a hard link\)"):
        safe_files.open_lock_file(tmp_path / "other")


@posix
def test_links_are_not_followed_when_folders_are_removed(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "inner").symlink_to(tmp_path / "kept")
    safe_files.remove_user_owned_folder(tmp_path / "link")
    safe_files.remove_user_owned_folder(tmp_path / "gone")
    safe_files.remove_user_owned_folder(tmp_path / "kept" / "file")
    assert (tmp_path / "kept" / "file").exists()
    assert (tmp_path / "link").is_symlink()
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"[" * 100_000, "more than 64 deep"),
        (b"[" * 65 + b"]" * 65, "more than 64 deep"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "more than 64 deep"),
        (b"1" * 65, "an integer in it has more than 64 digits"),
        (b'{"a": 1, "b": 2, "a": 3}', "the name 'a' occurs twice"),
        (b'["\\ud800"]', "'\\\\ud800' in it is not valid text"),
        (b"\xff", "can't decode"),
        (b"", "Expecting value"),
    ],
)
def test_json_is_bounded(text: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        safe_files.parse_json(text)


def test_json_within_its_bounds_is_read() -> None:
    assert safe_files.parse_json(b"[" * 64 + b"7" + b"]" * 64) is not None
    assert safe_files.parse_json(b'{"a": -1, "b": [1.5, null, true], "c": 1000000000000000019884624838656}')["a"] == -1


def test_a_name_that_is_there_twice_is_found_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Name(str):
        """Counts comparisons."""

        compared = 0

        def __eq__(self, other: object) -> bool:
            Name.compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    pairs = [(Name(number), 0) for number in range(2_000)]
    with pytest.raises(ValueError, match="'1999' occurs twice"):
        safe_files._make_dict_of_unique_names([*pairs, (Name(1999), 0)])
    assert Name.compared < 100


def test_objects_are_of_the_names_and_types_that_are_asked_for() -> None:
    kinds = {"rank": int, "status": (int, type(None)), "host": str}
    good = {"rank": 1, "status": None, "host": "n1"}
    assert safe_files.require_json_fields(good, kinds) == good
    unlike = "it is not an object with the names rank, status, host"
    wrong: list[tuple[Any, str]] = [([], unlike), ({**good, "more": 1}, unlike), ({"rank": 1}, unlike), (None, unlike)]
    wrong += [({**good, "rank": True}, "rank is not of type int"), ({**good, "host": 3}, "host is not of type str")]
    for value, message in wrong:
        with pytest.raises(ValueError, match=f"^{message}$"):
            safe_files.require_json_fields(value, kinds)


def test_each_folder_has_a_warning_of_its_own_whatever_its_name(tmp_path: Path) -> None:
    for name in ("a b", "a c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").symlink_to(tmp_path)
        with pytest.warns(RuntimeWarning, match=f"{name}/x is a link"):
            assert safe_files.read_if_trusted(tmp_path / name / "x") is None
