"""What Windows' Python lacks is not needed: import of everything, one process, thread ranks, checkpoints, `info`."""

from pathlib import Path

from commands import start

HIDE = """
import ctypes, importlib.abc, mmap, os, pathlib, select, signal, socket, subprocess, sys, time
import ml_dtypes, numpy, rich.console, rich.progress, threadpoolctl
import numba

MODULES = {"fcntl", "grp", "pwd", "resource", "termios", "pty", "tty", "syslog", "posix"}
NAMES = {
    os: "fork forkpty killpg getuid geteuid getgid getpgid getpgrp setsid setpgid sched_getaffinity sched_setaffinity "
    "pread pwrite preadv pwritev posix_fallocate posix_fadvise statvfs fstatvfs mkfifo chown getloadavg "
    "register_at_fork pidfd_open wait4 WNOHANG WIFEXITED sync sysconf uname nice O_DIRECTORY O_CLOEXEC O_NOFOLLOW "
    "O_DIRECT O_SYNC sendfile copy_file_range eventfd memfd_create",
    signal: "SIGUSR1 SIGUSR2 SIGHUP SIGALRM SIGCHLD SIGSTOP SIGCONT SIGPIPE SIGQUIT setitimer alarm "
    "pthread_kill pthread_sigmask sigwait siginterrupt pause",
    mmap: "MAP_SHARED MAP_PRIVATE MAP_ANONYMOUS PROT_READ PROT_WRITE MADV_DONTNEED MADV_WILLNEED MADV_HUGEPAGE",
    select: "epoll poll",
    socket: "AF_UNIX",
    time: "clock_gettime clock_gettime_ns pthread_getcpuclockid tzset",
}

class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in MODULES or name == "torch":  # a PyTorch for this system looks for Windows' libraries
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
for name in MODULES:
    sys.modules.pop(name, None)
for module, names in NAMES.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
isdir, is_dir = os.path.isdir, pathlib.Path.is_dir
os.path.isdir = lambda path: path != "/dev/shm" and isdir(path)
pathlib.Path.is_dir = lambda path: str(path) != "/dev/shm" and is_dir(path)
sys.platform = "win32"
"""
USE = """
import importlib, pkgutil
import mpi4py
import numpy as np
import fsdpx
from fsdpx import CheckpointConfig, data, nn, optim
from fsdpx.__main__ import main

mpi4py.rc.initialize = False
for found in pkgutil.walk_packages(fsdpx.__path__, "fsdpx."):
    if not found.name.startswith(("fsdpx.examples", "fsdpx.testing")) and not found.name.endswith("__main__"):
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            assert error.name not in MODULES, error  # else a package that this machine does not have

rng = np.random.default_rng(0)
source = data.ArrayDataset(rng.standard_normal((8, 6)).astype(np.float32), rng.integers(0, 3, 8))

def train(comm=None, folder="alone"):
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))
    trainer = fsdpx.distribute(model, loss=nn.CrossEntropyLoss(), optimizer=optim.AdamW(lr=0.01), comm=comm,
    reproducible_chunks=2)
    loader = data.DataLoader(source, 4, comm=trainer.data_group, reproducible_chunks=2)
    trainer.fit(loader, epochs=2, checkpoints=CheckpointConfig(folder, every=2), progress=False)
    return trainer.inspect.compute_fingerprint()

alone = train()
assert fsdpx.spawn(train, 2, "threads") == [alone] * 2
assert main(["ckpt", "verify", "alone"]) == 0
assert main(["info"]) == 0
print("used")
"""


def test_nothing_that_windows_lacks_is_needed(tmp_path: Path) -> None:
    done = start(1, "-c", HIDE + USE, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("used\n")
