"""Virtual hosts on this machine: network namespaces on a bridge, whose links carry so many bits a second. Needs root.

Nothing is left of them when the block ends, and nothing outside can be reached from them."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["inside", "offered", "virtual_hosts"]

NET = "10.99.0."
BEGIN = """
hostname {name}
mount --bind {folder}/hosts /etc/hosts
mount -t tmpfs shm /dev/shm
ip link set lo up
touch {folder}/{name}.up
exec sleep 86400
"""
ENTER = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
exec nsenter -t "$(cat {folder}/$host.pid)" -n -u -i -m --wd="$PWD" -- sh -c "$*"
"""


def offered() -> bool:
    """Whether this kernel and this user may have virtual hosts."""
    tried = f"ip link add name bench0 type veth peer name bench1 && tc qdisc add dev bench0 {_slow(1)}"
    return _done(["unshare", "--net", "--uts", "--ipc", "--mount", "sh", "-c", tried])


@contextmanager
def virtual_hosts(count: int, gbit: float) -> Iterator[Path]:
    """`count` hosts n1, n2, ... that send `gbit` gigabits a second each; the folder that `inside` needs."""
    with tempfile.TemporaryDirectory(prefix="hosts") as name:
        folder, names = Path(name), ["login", *(f"n{i + 1}" for i in range(count))]
        (folder / "hosts").write_text(
            "".join(f"{NET}{i + 1} {name}\n" for i, name in enumerate(names)) + "127.0.0.1 localhost\n"
        )
        (folder / "hostfile").write_text("".join(f"{name}:1\n" for name in names[1:]))
        (folder / "enter").write_text(ENTER.format(folder=folder))
        (folder / "enter").chmod(0o755)
        held = [_host(folder, name) for name in names]
        try:
            _connect(folder, names, gbit)
            yield folder
        finally:
            for process in held:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def inside(folder: Path, mpiexec: str, ranks: int, command: list[str]) -> list[str]:
    """A command that runs one rank on each of the first `ranks` hosts."""
    launch = [mpiexec, "-launcher", "ssh", "-launcher-exec", str(folder / "enter"), "-f", str(folder / "hostfile")]
    return [*_enter(folder, "login"), *launch, "-n", str(ranks), *command]


def _host(folder: Path, name: str) -> subprocess.Popen[bytes]:
    begin = BEGIN.format(name=name, folder=folder)
    held = ["unshare", "--net", "--uts", "--ipc", "--mount", "--propagation", "private", "sh", "-c", begin]
    process = subprocess.Popen(held, stdin=subprocess.DEVNULL, start_new_session=True)
    (folder / f"{name}.pid").write_text(str(process.pid))
    for _ in range(500):
        if (folder / f"{name}.up").exists():
            return process
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.01)
    raise RuntimeError(f"virtual host {name} did not start")


def _connect(folder: Path, names: list[str], gbit: float) -> None:
    """A bridge in the first host, and a link from it to each other one, slow at both ends."""
    lines = ["ip link add br0 type bridge", f"ip addr add {NET}1/24 dev br0", "ip link set br0 up"]
    for i, name in enumerate(names[1:], 1):
        pid = (folder / f"{name}.pid").read_text()
        lines += [
            f"ip link add name up{i} type veth peer name eth0 netns {pid}",
            f"ip link set up{i} master br0",
            f"ip link set up{i} up",
            f"tc qdisc add dev up{i} {_slow(gbit)}",
        ]
    _run(folder, names[0], lines)
    for i, name in enumerate(names[1:], 1):
        _run(
            folder,
            name,
            [f"ip addr add {NET}{i + 1}/24 dev eth0", "ip link set eth0 up", f"tc qdisc add dev eth0 {_slow(gbit)}"],
        )


def _slow(gbit: float) -> str:
    return f"root tbf rate {gbit}gbit burst {max(int(gbit * 256), 64)}kb latency 50ms"


def _run(folder: Path, name: str, lines: list[str]) -> None:
    subprocess.run([*_enter(folder, name), "sh", "-ec", "\n".join(lines)], check=True)


def _enter(folder: Path, name: str) -> list[str]:
    pid = (folder / f"{name}.pid").read_text()
    return ["nsenter", "-t", pid, "-n", "-u", "-i", "-m", f"--wd={os.getcwd()}", "--"]


def _done(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False
