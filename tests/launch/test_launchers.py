"""What `fsdpx run` starts: the command of every launcher, hostfiles, and mistakes that are said in one line."""

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import threading
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import command, refused, shown
from trials import ROOT

import fsdpx
from fsdpx.core.base import environment
from fsdpx.errors import LaunchError
from fsdpx.launch import elastic_join, launchers, run
from fsdpx.launch.batch import BATCH_TEMPLATES, NodeCores, make_batch_script
from fsdpx.launch.options import HostSlots, LaunchConfig, assign_ranks_to_hosts, read_hostfile

SAYS = {
    "srun": "slurm 23.11.4",
    "flux": "commands: 0.66.0\nlibflux-core: 0.66.0",
    "openmpi": "mpiexec (Open MPI) 5.0.11",
    "intel": "Intel(R) MPI Library for Linux* OS, Version 2021.14 Build 20241121",
    "pals": "PALS version 1.7.1",
    "msmpi": "Microsoft MPI Startup Program [Version 10.1.12498.18]",
    "hydra": "HYDRA build details:\n    Version: 5.0.2",
    "unknown": "launch-o-matic 3",
}
OURS = ("FSDPX_EXPECT_SIZE", "FSDPX_RESTART", "FSDPX_RUN")
TAIL = "-n 4 python -m fsdpx.launch.rank train.py --fast"


class Site:
    """A folder to work in, with a folder on PATH, in which there is one launcher once `has` has put it there."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, patch

    def has(self, name: str, *, loaded: str = "", also: str = "") -> None:
        file = self.folder / "bin" / (name if name in ("srun", "flux") else "mpiexec")
        file.write_text(f"#!/bin/sh\n[ $1 = --mpi=list ] && echo '{also}' && exit\ncat <<X\n{SAYS[name]}\nX\n")
        file.chmod(0o755)
        own = {"openmpi": "Open MPI v5.0.11", "msmpi": "Microsoft MPI 10.1"}.get(name, "MPICH Version: 5.0.2")
        self.patch.setattr(launchers, "probe_mpi_library", lambda: (loaded or own, ""))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Without an mpiexec beside Python, and without an allocation."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("n1 slots=2\nn2:2  # the other\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "train.py").write_text("")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setattr(sys, "executable", "python")
    allocation = {"SLURM_JOB_ID", "SLURM_NTASKS", "FLUX_URI", "PBS_NODEFILE", "LSB_DJOB_NUMPROC", "HYDRA_HOST_FILE"}
    for name in os.environ:
        if name in allocation or name.startswith(environment.SHARED_PREFIXES):
            monkeypatch.delenv(name)
    return Site(tmp_path, monkeypatch)


def dry_run(*options: str) -> str:
    """The command that --dry-run prints, without the variables before it and the launcher's folder."""
    words = shlex.split(shown(["run", "-n", "4", "--dry-run", *options, "train.py", "--fast"]))
    first = next(i for i, word in enumerate(words) if "=" not in word)
    assert "FSDPX_EXPECT_SIZE=4" in words[:first]
    return " ".join([Path(words[first]).name, *words[first + 1 :]])


PASS = " ".join(f"-x {name}" for name in OURS)
ROWS = [
    ("hydra", "mpiexec", "mpiexec -ppn 2", "mpiexec -hosts n1:2,n2:2"),
    ("intel", "mpiexec", "mpiexec -ppn 2", "mpiexec -hosts n1,n2 -ppn 2"),
    (
        "pals", "mpiexec --cpu-bind none", "mpiexec --cpu-bind none --ppn 2",
        "mpiexec --cpu-bind none --hosts n1,n2 --ppn 2",
    ),
    (
        "openmpi", f"mpiexec --bind-to none --map-by :OVERSUBSCRIBE {PASS}",
        f"mpiexec --bind-to none --map-by ppr:2:node:OVERSUBSCRIBE {PASS}",
        f"mpiexec --bind-to none --host n1:2,n2:2 --map-by :OVERSUBSCRIBE {PASS}",
    ),
    (
        "msmpi", f"mpiexec -genvlist {','.join(OURS)}", f"mpiexec -cores 2 -genvlist {','.join(OURS)}",
        f"mpiexec -hosts 2 n1 2 n2 2 -genvlist {','.join(OURS)}",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "here", "spread", "on"), ROWS, ids=[row[0] for row in ROWS])
def test_every_mpiexec_is_told_in_its_own_words(name: str, here: str, spread: str, on: str, site: Site) -> None:
    site.has(name)
    assert dry_run() == f"{here} {TAIL}"
    assert dry_run("--hostfile", "hosts") == f"{on} {TAIL}"
    site.patch.setenv("OPENBLAS_CORETYPE", "Haswell")  # what other hosts must have for the same bits
    assert ("OPENBLAS_CORETYPE" in dry_run("--hostfile", "hosts")) == (PASS in on or "-genvlist" in on)
    site.patch.delenv("OPENBLAS_CORETYPE")
    site.patch.setenv("PBS_NODEFILE", "nodes")
    assert dry_run("--nodes", "2") == dry_run("--nproc-per-node", "2") == f"{spread} {TAIL}"


@pytest.mark.parametrize(
    ("loaded", "plugins", "starts"),
    [
        ("MPICH Version: 5.0.2", "cray_shasta pmi2", "srun --mpi=pmi2"),
        ("Open MPI v5.0.11", "none pmi2 pmix", "srun --mpi=pmix"),
        ("CRAY MPICH version 8.1", "cray_shasta", "srun"),
        ("Open MPI v5.0.11", "none pmi2", "mpiexec --bind-to none"),  # mpiexec itself asks srun for its daemons
    ],
)
def test_in_an_allocation_of_slurm_the_library_says_how(loaded: str, plugins: str, starts: str, site: Site) -> None:
    site.has("openmpi")
    site.has("srun", loaded=loaded, also=plugins)
    site.patch.setenv("SLURM_JOB_ID", "17")
    alike = "--kill-on-bad-exit=1 --input=none --distribution=block --nodes=2 --ntasks-per-node=2"
    said = dry_run("--nodes", "2", "--threads", "3")
    assert said.startswith(f"{starts} ")
    if starts.startswith("srun"):
        assert said == f"{starts} {alike} {TAIL}"
        assert dry_run("--hostfile", "hosts") == f"{starts} {alike} --nodelist=n1,n2 {TAIL}"


def test_the_mpiexec_of_a_wheel_finds_the_hosts_of_an_allocation_itself(site: Site) -> None:
    site.has("hydra")
    site.has("srun", also="pmi2")
    site.patch.setenv("SLURM_JOB_ID", "17")
    site.patch.setattr(sys, "executable", str(site.folder / "bin" / "python"))
    assert dry_run("--nodes", "2").startswith("mpiexec -ppn 2 -n 4 ")


def test_in_an_instance_of_flux(site: Site) -> None:
    site.has("flux")
    site.patch.setenv("FLUX_URI", "local:///run/flux/local")
    alike = "flux run -o exit-on-error -o cpu-affinity=off"
    assert dry_run() == f"{alike} {TAIL}"
    assert dry_run("--hostfile", "hosts") == f"{alike} -N 2 --requires=host:n1,n2 {TAIL}"


def test_a_launcher_that_is_given_gets_what_is_asked_for_and_nothing_else(site: Site) -> None:
    site.has("openmpi")
    assert dry_run("--mpiexec", "mpiexec --map-by core") == f"mpiexec --map-by core {TAIL}"
    site.has("unknown")
    assert dry_run("--mpiexec", "mpiexec -q") == f"mpiexec -q {TAIL}"
    said = refused("run -n 4 --hostfile hosts --mpiexec mpiexec train.py")
    assert "fsdpx run: mpiexec is no launcher that fsdpx knows: say its own options" in said


def test_threads_and_seconds_are_variables(site: Site) -> None:
    site.has("hydra")
    said = shown("run -n 2 --dry-run --threads 3 --timeout 9 -m train")
    for word in ("OMP_NUM_THREADS=3", "MKL_NUM_THREADS=3", "FSDPX_START_TIMEOUT=9", "fsdpx.launch.rank -m train"):
        assert f" {word}" in said


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1\n\n# a word\nn2\n", [HostSlots("n1", None, 1), HostSlots("n2", None, 4)]),
        ("n1:4\nn2 slots=2 max_slots=8\nn3 3\n", [HostSlots("n1", 4, 1), HostSlots("n2", 2, 2), HostSlots("n3", 3, 3)]),
        ("n1\nn1\nn2\n", [HostSlots("n1", 2, 1), HostSlots("n2", 1, 3)]),  # of PBS
    ],
)
def test_hostfiles_of_all_launchers_are_read(tmp_path: Path, text: str, hosts: list[HostSlots]) -> None:
    (tmp_path / "hosts").write_text(text)
    assert read_hostfile(tmp_path / "hosts") == hosts


def test_ranks_are_shared_host_after_host() -> None:
    two, bare = [HostSlots("n1", 3), HostSlots("n2", 2)], [HostSlots("n1", None), HostSlots("n2", None)]
    assert assign_ranks_to_hosts(two, LaunchConfig(5), 5) == [("n1", 3), ("n2", 2)]
    assert assign_ranks_to_hosts(two, LaunchConfig(2), 2) == [("n1", 2)]
    assert assign_ranks_to_hosts(two, LaunchConfig(4, per_node=2), 4) == [("n1", 2), ("n2", 2)]
    assert assign_ranks_to_hosts(bare, LaunchConfig(5), 5) == [("n1", 3), ("n2", 2)]
    assert assign_ranks_to_hosts(two, LaunchConfig(2, nodes=1), 2) == [("n1", 2)]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("-n 4 --nodes 0", "nodes=0: one or more is needed"),
        ("-n 4 --nproc-per-node 0", "per_node=0: one or more is needed"),
        ("-n 4 --timeout 0", "timeout=0: a positive number of seconds is needed"),
        ("-n 4 --backoff -1", "backoff=-1.0: 0 or more is needed"),
        ("-n4 --nodes 1 --nproc-per-node 3", "ranks=4: 1 hosts with 3 ranks each have room for 3; ask for fewer ranks"),
        ("-n 4 --nodes 2", "2 hosts are asked for, but not which: this is no allocation of Slurm, PBS or Flux"),
        ("-n 4 --hostfile few",
         "ranks=4: few has 3 slots on 2 hosts (n1:2, n2:1); start fewer ranks, or name more hosts"),
        ("-n 4 --hostfile few --nodes 3", "nodes=3: few names 2 hosts"),
        ("-n4 --hostfile typo", "typo:2: 'n2 slot=2' is no line of a hostfile: write one host in a line, as n1, n1:4,"),
        ("-n 4 --hostfile zero", "zero:1: 'n1:0' is no line of a hostfile"),
        ("-n 4 --hostfile empty", "the hostfile empty names no host: write one host in a line"),
        ("-n 4 --hostfile gone", "the hostfile gone cannot be read: No such file or directory"),
        ("-n 4 --hostfile nobody", "nobody:2: host 'no-such-host.invalid' is unknown here ("),
        ("-n 4 --hostfile long", f"long:1: host '{64 * 'n'}' is unknown here (parts of a name have 1 to 63 letters)"),
        ("-n 4 --folder few/x", "/few/x cannot be written (Not a directory): name a folder that can"),
        ("-n 4 --logs few/x", "/few/x cannot be written (Not a directory): name a folder that can"),
        # ranks that are given twice or not at all
        ("-n 4 --nodes 2 --nproc-per-node 4", "ranks=4: nodes=2 with per_node=4 are 8, and a host would have none"),
        ("--hostfile bare", "bare does not say how many ranks a host takes: say -n or --nproc-per-node"),
        ("--nodes 2", "how many ranks on 2 hosts? Say -n or --nproc-per-node"),
        ("--join job", "how many ranks? -n 4"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_with_a_remedy(options: str, text: str, site: Site) -> None:
    site.has("hydra")
    files = {
        "few": "n1:2\nn2:1\n", "typo": "n1:2\nn2 slot=2\n", "zero": "n1:0\n", "empty": "# none\n", "bare": "n1\nn2\n",
        "nobody": "localhost:3\nno-such-host.invalid:3\n", "long": 64 * "n" + ":4",
    }  # fmt: skip
    for name, content in files.items():
        (site.folder / name).write_text(content)
    said = refused(f"run {options} train.py")
    assert said.startswith("fsdpx run: ")
    assert text in said
    assert said.count("\n") == 1


def test_hosts_that_differ_are_refused_by_launchers_that_cannot_say_so(site: Site) -> None:
    site.has("intel")
    (site.folder / "hosts").write_text("n1:1\nn2:3\n")
    config = LaunchConfig(4, hostfile=Path("hosts"))
    with pytest.raises(LaunchError, match=r"mpiexec of Intel MPI wants the same number .* not n1:1, n2:3: name hosts"):
        launchers.make_command(launchers.find_launcher_to_use(config), config, 4, ["train.py"], [])


def test_a_further_start_is_on_the_hosts_that_answer(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.has("openmpi")
    launcher = site.folder / "bin" / "mpiexec"
    launcher.write_text(launcher.read_text().replace("cat <<", "case $* in *n2:1*) exit 1;; esac\ncat <<"))
    (site.folder / "hosts").write_text("n1:2\nn2:3\nn3\n")
    config = LaunchConfig(5, nodes=2, hostfile=Path("hosts"), min_ranks=3)
    job = run.LaunchedJob(launchers.find_launcher_to_use(config), config, ["train.py"], {})
    plan = run.RestartPlan(5, 3, 3)
    choose = partial(run._choose_job_and_rank_count_of_attempt, job, plan, site.folder)
    assert choose() == (job, 5)  # the first start takes what it is told
    plan.endings.append(run.JobEnding("died", 1))
    fewer, ranks = choose()
    assert ranks == 3
    assert "--host n1:2,n3:1 " in " ".join(fewer.make_command(ranks))
    assert capsys.readouterr().err == "fsdpx run: n2 cannot be reached: 3 ranks on n1, n3\n"
    plan.min_ranks = 4  # too few: then all are tried again, and perhaps it is back
    assert choose() == (job, 5)


def test_nobody_can_join_what_does_not_run_or_has_no_place(site: Site) -> None:
    said = refused("run -n 2 --join gone")
    assert said.startswith("fsdpx run: --join gone: there is no such folder; it is what --folder ")
    said = refused("run -n 2 --join . --timeout 0.2")
    assert "fsdpx run: --join .: no answer for 0.2 s: no fsdpx run --folder . runs there, " in said

    def full(more: int) -> None:
        raise LaunchError("ranks=6: few has 4 slots")

    guests = elastic_join.JoinRequests(site.folder, full)
    site.patch.setattr(elastic_join, "_find_process_handling_save_signal", lambda notes: 1)
    site.patch.setattr(elastic_join.time, "sleep", lambda seconds: guests.answer_and_request_save(site.folder))
    with pytest.raises(LaunchError, match=r"^--join .*: ranks=6: few has 4 slots$"):
        elastic_join.request_more_ranks(site.folder, 2, 5.0)
    assert guests.pop_accepted_rank_count() == 0
    site.patch.setattr(elastic_join.time, "sleep", lambda seconds: guests.refuse_open_requests())
    with pytest.raises(LaunchError, match="the job has ended"):
        elastic_join.request_more_ranks(site.folder, 2, 5.0)
    assert not [*site.folder.glob("*joins-*"), *site.folder.glob("answer-*")]


def test_an_mpiexec_of_another_mpi_is_named(site: Site) -> None:
    site.has("openmpi", loaded="MPICH Version: 5.0.2")
    said = refused("run -n 2 train.py")
    assert "/bin/mpiexec is the mpiexec of Open MPI, but mpi4py loads MPICH Version: 5.0.2: each rank would be" in said
    assert said.endswith("make mpi4py load the other (MPI4PY_LIBMPI=/path/to/libmpi.so)\n")


def test_no_launcher_at_all(site: Site) -> None:
    site.patch.setenv("PATH", str(site.folder / "bin"))
    assert refused("run -n 2 train.py") == (
        "fsdpx run: no mpiexec beside this Python or on PATH; pip install '.[mpich]' in the folder of fsdpx's sources, "
        "or name one: --mpiexec\n"
    )


def test_a_batch_file_says_the_same_job(site: Site) -> None:
    site.patch.setenv("LOADEDMODULES", "gcc/13:mpich/4")
    words = ["--nodes", "2", "--threads", "3", "--grace", "90", "--elastic", "train.py", "--name", "a b"]
    text = shown(["run", "-n", "4", "--print-sbatch", *words])
    for option in ("job-name=train", "nodes=2", "ntasks-per-node=2", "cpus-per-task=3", "signal=B:USR1@150 --requeue"):
        assert f"#SBATCH --{option}\n" in text
    words = "run --ranks 4 --nodes 2 --elastic --threads 3 --grace 90.0 train.py --name 'a b'"
    assert f"\npython -m fsdpx {words} &\n" in text
    assert "\nexport SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-3}\n" in text
    assert "\n# module load gcc/13 mpich/4\n" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize(
    ("config", "nodes", "per_node", "cores", "about"),
    [
        (LaunchConfig(512), 8, 64, 1, "64 ranks on each of 8 nodes, with 1 core per rank"),
        (LaunchConfig(512, threads=8), 64, 8, 8, "8 ranks on each of 64 nodes, with 8 cores per rank"),
        (LaunchConfig(32, nodes=8), 8, 4, 16, "4 ranks on each of 8 nodes, with 16 cores per rank"),
        (LaunchConfig(6), 1, 6, 10, "6 ranks on one node, with 10 cores per rank"),
        (LaunchConfig(8, per_node=4, threads=32), 2, 4, 32, "32 cores per rank: 128 cores, more than a node has"),
    ],
)
def test_a_batch_file_asks_for_the_nodes_and_the_cores_that_ranks_need(config, nodes, per_node, cores, about):
    given = ["train.py"], NodeCores(64, "so it is said"), {"FSDPX_TUNE": "again"}
    slurm, pbs, lsf = (make_batch_script(system, config, *given) for system in BATCH_TEMPLATES)
    for line in (f"--nodes={nodes}", f"--ntasks-per-node={per_node}", f"--cpus-per-task={cores}"):
        assert f"\n#SBATCH {line}\n" in slurm
    assert "\n##SBATCH --account=... --partition=... --mem=...\n" in slurm  # Slurm ignores it until it is filled in
    assert f" --nodes {nodes} " in slurm
    assert f"\n#PBS -l select={nodes}:ncpus={per_node * cores}:mpiprocs={per_node}\n" in pbs
    assert f'\n#BSUB -n {config.ranks}\n#BSUB -R "span[ptile={per_node}] affinity[core({cores})]"\n' in lsf
    assert ('--hostfile "$PBS_NODEFILE" train.py\n' in pbs) == ('"$LSB_DJOB_HOSTFILE"' in lsf) == (nodes > 1)
    for text in (slurm, pbs, lsf):
        assert about in text
        assert "Assumed: 64 cores per node, so it is said.\n" in text
        assert "\nexport FSDPX_TUNE=again\n" in text
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_a_batch_file_takes_the_environment_and_the_cores_of_nodes(site: Site) -> None:
    (site.folder / "my env" / "bin").mkdir(parents=True)
    (site.folder / "my env" / "bin" / "activate").write_text("")
    site.patch.setattr(sys, "prefix", str(site.folder / "my env"))
    site.patch.setattr(sys, "executable", str(site.folder / "my env" / "bin" / "python"))
    (site.folder / "bin" / "sinfo").write_text("#!/bin/sh\necho 128\necho 48+\n")
    (site.folder / "bin" / "sinfo").chmod(0o755)
    status, out, err = command("run --nodes 2 --nproc-per-node 4 --print-batch slurm train.py")
    assert (status, err) == (0, "fsdpx run: 8 ranks, by --nodes and --nproc-per-node\n")
    assert f"\nsource '{site.folder}/my env/bin/activate'\n" in out
    assert f"\n'{site.folder}/my env/bin/python' -m fsdpx run --ranks 8 --nodes 2 train.py &\n" in out
    assert "48 cores per node, as Slurm's smallest node has (sinfo).\n" in out
    assert "\n#SBATCH --cpus-per-task=12\n" in out
    status, _, err = command("run -n 8 --nodes 2 --threads 24 --print-batch slurm train.py")
    many = "4 ranks on each of 2 nodes, with 24 cores per rank: 96 cores, more than a node has."
    assert (status, f"{many} Assumed: 48 cores per node, as Slurm's" in err) == (0, True)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("-n 4 gone.py", "there is no script 'gone.py' in "),
        ("-n 4 -m gone.train", "there is no module 'gone.train' on Python's path or in "),
        ("-n 4 --hostfile hosts train.py", "a batch system chooses the hosts itself: leave --hostfile out"),
        ("-n 4 train.py a\nb", r"'a\nb' has a line break or another control character: a batch file cannot"),
        ("--nodes 2 train.py", "how many ranks? -n 4; a batch file also takes --nodes and --nproc-per-node"),
    ],
)
def test_what_no_batch_file_can_say_is_refused(words: str, text: str, site: Site) -> None:
    assert text in refused(["run", "--print-batch", "pbs", *words.split(" ")])


@pytest.mark.parametrize(
    ("variables", "options", "ranks", "source"),
    [
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "6"}, "", 6, "SLURM_NTASKS"),
        ({"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "4"}, "", 8, "SLURM_NNODES, "),
        ({"PBS_NODEFILE": "three"}, "", 3, "PBS_NODEFILE"),
        ({"LSB_DJOB_NUMPROC": "5"}, "", 5, "LSB_DJOB_NUMPROC"),
        ({"HYDRA_HOST_FILE": "hosts"}, "", 4, "HYDRA_HOST_FILE"),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "6"}, "--hostfile hosts", 4, "--hostfile"),
        ({}, "--hostfile bare --nproc-per-node 3", 6, "--hostfile"),
        ({}, "--threads 2", 3, "the 6 cores that this process may use"),
        ({}, "--nproc-per-node 8", 8, "--nproc-per-node on one host"),
        ({}, "--nproc_per_node 8", 8, "--nproc-per-node on one host"),
        ({}, "--nodes 1 --nproc-per-node 2", 2, "--nodes and --nproc-per-node"),
        ({"SLURM_JOB_ID": "7", "SLURM_NNODES": "1"}, "--nproc-per-node 2", 2, "--nproc-per-node on one host"),
        ({"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NTASKS": "6"}, "--nproc-per-node 4", 6, "SLURM_NTASKS"),
        ({}, "", 6, "the 6 cores that this process may use"),
    ],
)
def test_without_a_number_the_ranks_are_those_of_the_allocation_or_the_cores(variables, options, ranks, source, site):
    site.has("hydra")
    (site.folder / "three").write_text("n1\nn2\nn3\n")
    (site.folder / "bare").write_text("n1\nn2\n")
    site.patch.setattr(os, "sched_getaffinity", lambda process: set(range(6)), raising=False)
    for name, value in variables.items():
        site.patch.setenv(name, value)
    status, out, err = command(f"run --dry-run {options} train.py")
    assert (status, f" -n {ranks} python " in out) == (0, True)
    assert err.startswith(f"fsdpx run: {ranks} ranks, by {source}")


@pytest.mark.parametrize("option", ["-n 4", "-n4", "-np 4", "--np 4", "--np=4", "--ranks 4"])
def test_the_number_of_ranks_has_the_spellings_of_launchers(option: str, site: Site) -> None:
    site.has("hydra")
    assert f"{TAIL.removesuffix('--fast')}--np 3" in shown(f"run {option} --dry-run train.py --np 3")


def test_no_parser_takes_the_beginning_of_an_option_for_it() -> None:
    calls = [
        (path.name, node)
        for folder in ("fsdpx", "bench", "tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "ArgumentParser(" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("argparse.ArgumentParser", "ArgumentParser")
    ]
    assert len(calls) > 10
    assert [name for name, call in calls if "allow_abbrev=False" not in map(ast.unparse, call.keywords)] == []


def test_modules_are_looked_for_as_a_python_of_this_folder_finds_them(site: Site) -> None:
    (site.folder / "beside.py").write_text("")
    run._require_existing_program(["-m", "beside"])
    run._require_existing_program(["-m", "json.tool"])
    with pytest.raises(LaunchError, match=r"^there is no module 'linked\.train' on Python's path or in "):
        run._require_existing_program(["-m", "linked.train"])
    # a package that lies on no path, as those that are installed as links to their sources do
    links = SimpleNamespace(find_spec=lambda name, *_: ModuleSpec(name, None) if name == "linked" else None)
    site.patch.setattr(sys, "meta_path", [*sys.meta_path, links])
    run._require_existing_program(["-m", "linked.train"])


def test_a_name_in_a_batch_file_runs_nothing(site: Site) -> None:
    site.patch.setattr(sys, "prefix", sys.base_prefix)
    of_node = NodeCores(4, "so it is said")
    words = ["a$(touch ran);b`c`.py", "$(touch ran)", "; touch ran", "'", "#SBATCH"]
    text = make_batch_script("slurm", LaunchConfig(4), words, of_node)
    assert "#SBATCH --job-name=a__touch_ran__b_c_\n" in text
    assert "#SBATCH --job-name=pkg.train\n" in make_batch_script("slurm", LaunchConfig(4), ["-m", "pkg.train"], of_node)
    assert text.count("\n#SBATCH") == 7
    done = subprocess.run(["bash", "-c", f"python() {{ printf '%s\\n' \"$@\"; }}\n{text}"], cwd=site.folder,
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert done.stdout.splitlines() == ["-m", "fsdpx", "run", "--ranks", "4", "--nodes", "1", *words]
    assert not (site.folder / "ran").exists()
    for word in ("a\n#SBATCH --uid=0\ntouch ran\n#.py", "a\rb", "a\0"):
        with pytest.raises(LaunchError, match=r"has a line break or another control character: a batch file cannot"):
            make_batch_script("pbs", LaunchConfig(4), ["train.py", word], of_node)
        with pytest.raises(LaunchError, match=r"has a line break"):
            make_batch_script("lsf", LaunchConfig(4), [word], of_node)


def test_what_cannot_be_given_to_other_processes_is_said() -> None:
    with pytest.raises(LaunchError, match=r"^launch\(.*lock.*\): it cannot be given to other processes: "):
        fsdpx.launch(threading.Lock().acquire, ranks=2)
    assert isinstance(fsdpx.launch, type(sys))  # a folder of the package, too


def test_modules_that_are_started_by_name_are_there() -> None:
    sources = "".join(path.read_text() for path in Path(fsdpx.__file__).parent.rglob("*.py"))
    named = set(re.findall(r'"-m", "(fsdpx[\w.]*)"', sources))
    assert {"fsdpx", "fsdpx.launch.local_launcher", "fsdpx.launch.rank"} <= named
    assert not [name for name in named if importlib.util.find_spec(name) is None]


def test_what_is_loaded_runs_nothing_in_a_batch_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADEDMODULES", "gcc:mpi\nrm -r x")
    with pytest.raises(LaunchError, match=r"'# module load gcc mpi\\nrm -r x' has a line break"):
        make_batch_script("slurm", LaunchConfig(2), ["x.py"], NodeCores(4, "here"))
