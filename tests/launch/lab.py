"""Several hosts on one machine: network namespaces with a bridge between them, sshd and Slurm. Needs root.

Each host has its own network, host name, processes, /dev/shm and $TMPDIR. The disk is shared, but for the files that a
shell reads when it starts: what these begin may leave locks behind if it is killed. `python lab.py 2` starts some hosts
until Ctrl-C and prints how to enter them."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fsdpx.launch.rank import request_kill_on_parent_death

__all__ = ["TOOLS", "Lab", "wanting"]

TOOLS = {
    "unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2", "sshd": "openssh-server", "munged": "munge",
    "slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client",
}  # fmt: skip
"""What the hosts need, and the packages of Debian that have it."""
LOGIN = "login"
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"

HOST = """
hostname {name}; mount -t proc proc /proc; mount -t tmpfs shm /dev/shm; mount -t tmpfs tmp {tmp}
mount --bind {hosts} /etc/hosts; ip link set lo up
for file in ~/.bashrc ~/.bash_profile ~/.profile; do [ ! -e $file ] || mount --bind /dev/null $file; done
touch {ready}
while :; do sleep 3600 & wait $!; done
"""
SSHD = """
HostKey {folder}/hostkey
AuthorizedKeysFile {folder}/id.pub
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UsePAM no
StrictModes no
PidFile none
MaxStartups 100
SetEnv TMPDIR={tmp}
"""
SSH = """
Host *
IdentityFile {folder}/id
IdentitiesOnly yes
UserKnownHostsFile {folder}/known
BatchMode yes
LogLevel ERROR
"""
SLURM = """
ClusterName=lab
SlurmctldHost=login(10.99.0.100)
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.sock,cred_expire=5
ProctrackType=proctrack/linuxproc
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=10
KillWait=20
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
TmpFS={tmp}
SlurmctldPidFile={folder}/slurmctld.ns
SlurmdPidFile={folder}/slurmd.%n.ns
SlurmctldLogFile={folder}/log/slurmctld
SlurmdLogFile={folder}/log/slurmd.%n
SlurmdParameters=config_overrides
NodeName=n[1-{hosts}] CPUs=4 RealMemory=4000 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=60 State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=60 State=UP PriorityTier=2
"""


def wanting() -> str:
    """Why there can be no lab here, "" if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "virtual hosts need Linux, and root, who may make network namespaces"
    missing = sorted({package for tool, package in TOOLS.items() if shutil.which(tool, path=PATH) is None})
    return f"missing: apt-get install --no-install-recommends {' '.join(missing)} libpmix2" if missing else ""


class Lab:
    """Hosts n1, n2, ... and login, from which jobs are started. folder: what it needs, and its logs."""

    def __init__(self, folder: Path, hosts: int, slurm: bool = True) -> None:
        self.folder, self.tmp = folder, folder / "tmp"
        self.names = [LOGIN, *(f"n{number}" for number in range(1, hosts + 1))]
        self._hosts: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("log", "state", "spool", "tmp"):
            (folder / name).mkdir(parents=True)
        Path("/run/sshd").mkdir(exist_ok=True)
        self._addresses = {LOGIN: "10.99.0.100"} | {name: f"10.99.0.{name[1:]}" for name in self.names[1:]}
        (folder / "hosts").write_text(
            "".join(f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **self._addresses}.items())
        )
        try:
            for name in self.names:
                self._host(name)
            self._keys()
            own = f"{self._addresses[LOGIN]}/24"
            for words in ("link add br0 type bridge", f"addr add {own} dev br0", "link set br0 up"):
                self.run(LOGIN, "ip", *words.split())
            for name in self.names[1:]:
                self._connect(name)
            for name in self.names:
                self._sshd(name)
            if slurm:
                self._slurm(hosts)
        except BaseException:
            self.close()
            raise

    def words(self, host: str, *words: str | Path) -> list[str]:
        """The command that runs `words` on a host."""
        return ["nsenter", "-t", str(self._first(host)), "-n", "-u", "-i", "-m", "-p", f"--wd={os.getcwd()}", "--",
                *map(str, words)]  # fmt: skip

    def environment(self, **variables: str) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PMI", "OMPI_", "SLURM_"))}
        ours = {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": PATH, "TMPDIR": str(self.tmp)}
        return {**kept, **ours, **variables}

    def ssh(self) -> dict[str, str]:
        """What tells mpiexec how to reach the hosts; under Slurm it would take this for srun."""
        return dict.fromkeys(("HYDRA_LAUNCHER_EXEC", "PRTE_MCA_plm_ssh_agent"), str(self.folder / "ssh"))

    def run(self, host: str, *words: str | Path, seconds: float = 60, **options: object) -> str:
        """What the command prints, errors too; CalledProcessError, with the same, if it fails."""
        options.setdefault("env", self.environment())
        done = subprocess.run(
            self.words(host, *words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=seconds, **options,
        )  # fmt: skip
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, words, done.stdout)
        return str(done.stdout)

    def kill(self, host: str) -> None:
        """The host is gone, with all that ran there."""
        process = self._hosts.pop(host)
        process.kill()
        process.wait()

    def revive(self, host: str) -> None:
        """A host that was killed is there again, with ssh and without Slurm."""
        self._host(host)
        self._connect(host)
        self._sshd(host)

    def cut(self, host: str) -> None:
        """Nothing comes to the host or from it any more, and nobody is told."""
        self.run(LOGIN, "ip", "link", "set", f"v{host}", "down")

    def mend(self, host: str) -> None:
        self.run(LOGIN, "ip", "link", "set", f"v{host}", "up")

    def close(self) -> None:
        for name in [*self._hosts]:
            self.kill(name)

    def _host(self, name: str) -> None:
        """The first process of a host is a shell that reaps; what it was started by ends them all."""
        ready = self.folder / f"{name}.up"
        ready.unlink(missing_ok=True)
        text = HOST.format(name=name, tmp=self.tmp, hosts=self.folder / "hosts", ready=ready)
        with (self.folder / "log" / name).open("w") as log:
            self._hosts[name] = subprocess.Popen(
                ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--propagation",
                 "private", "bash", "-c", text],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=request_kill_on_parent_death,  # however these tests end, no host outlives them
            )  # fmt: skip
        until(ready.exists, f"host {name}")

    def _first(self, host: str) -> int:
        process = self._hosts[host].pid
        return int(Path(f"/proc/{process}/task/{process}/children").read_text().split()[0])

    def _connect(self, name: str) -> None:
        """Join the host to the bridge."""
        here, there = f"lab-{name}-{os.getpid()}"[:15], f"bal-{name}-{os.getpid()}"[:15]
        pair = f"ip link add {here} type veth peer name {there}"
        subprocess.run(pair.split(), check=True)
        for end, host, called in ((here, LOGIN, f"v{name}"), (there, name, "eth0")):
            words = f"ip link set {end} netns {self._first(host)} name {called}"
            subprocess.run(words.split(), check=True)
        self.run(LOGIN, "ip", "link", "set", f"v{name}", "master", "br0", "up")
        self.run(name, "ip", "addr", "add", f"{self._addresses[name]}/24", "dev", "eth0")
        self.run(name, "ip", "link", "set", "eth0", "up")

    def _keys(self) -> None:
        for key in ("hostkey", "id"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key)], check=True)
        public = " ".join((self.folder / "hostkey.pub").read_text().split()[:2])
        files = {
            "sshd_config": SSHD.format(folder=self.folder, tmp=self.tmp), "ssh_config": SSH.format(folder=self.folder),
            "known": "".join(f"{name} {public}\n" for name in self.names),
            "ssh": f'#!/bin/sh\nexec ssh -F {self.folder}/ssh_config "$@"\n',
        }  # fmt: skip
        for name, text in files.items():
            (self.folder / name).write_text(text)
        (self.folder / "ssh").chmod(0o755)

    def _sshd(self, name: str) -> None:
        log = self.folder / "log" / f"sshd.{name}"
        self.run(name, "/usr/sbin/sshd", "-f", self.folder / "sshd_config", "-E", log)

    def _slurm(self, hosts: int) -> None:
        (self.folder / "slurm.conf").write_text(SLURM.format(folder=self.folder, tmp=self.tmp, hosts=hosts))
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o600)
        for name in self.names[1:]:
            (self.folder / "spool" / name).mkdir()
        own = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.ns", "seed-file": "munge.seed"}
        files = [f"--{option}={self.folder / name}" for option, name in own.items()]
        self.run(LOGIN, "munged", "--force", *files, f"--log-file={self.folder}/log/munged")
        self.run(LOGIN, "slurmctld", "-i")
        for name in self.names[1:]:
            self.run(name, "slurmd")
        count_idle = "sinfo", "-h", "-p", "debug", "-t", "idle", "-o", "%D"
        until(lambda: self.run(LOGIN, *count_idle).strip() == str(hosts), "Slurm")


def until(true: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Wait for something; TimeoutError if it does not come."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not there after {seconds:g} s")
        time.sleep(0.05)


def main(hosts: str) -> None:
    """Until it is interrupted."""
    folder = Path(os.environ.get("LAB", "/tmp/fsdpx-lab"))
    with contextlib.closing(Lab(folder, int(hosts))) as lab, contextlib.suppress(KeyboardInterrupt):
        variables = [f"{name}={lab.environment()[name]}" for name in ("SLURM_CONF", "TMPDIR")]
        print(shutil.which("env"), *variables, *lab.words(LOGIN, "bash"))
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
