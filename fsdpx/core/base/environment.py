"""Read the environment variables of the launcher and the user. No other module reads the environment."""

import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path

from fsdpx.core.base.dataclass import dataclass, replace
from fsdpx.errors import LaunchError

__all__ = [
    "SWITCHES", "Environment", "LauncherInfo", "RendezvousStore", "copy_without_rank_variables",
    "find_hostfile_and_variable", "find_scheduler", "get_allocated_ranks_and_variable", "is_single_host_job",
    "list_shared_variables", "read_environment", "require_expected_world_size", "require_single_process_and_get_note",
    "restoring_environment",
]  # fmt: skip

SHARED_PREFIXES = ("FSDPX_", "PYTHON", "NUMBA_", "OMP_", "OPENBLAS_", "MKL_", "DNNL_", "MPI4PY_")
MIN_SECRET_CHARS = 16
TCP_PREFIX = "tcp://"
"""Prefix of FSDPX_STORE if it names a host and a port."""
DEFAULT_RECORDED_STEPS = 3
"""Number of steps whose values are recorded if FSDPX_RECORD_STEPS is not set."""
SWITCHES = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
"""Spellings of true and false in environment variables and in overrides of run files."""


_LAUNCHERS = {
    "mpiexec of Open MPI": tuple(f"OMPI_COMM_WORLD_{what}" for what in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")),
    "mpiexec or srun with PMI": ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "mpiexec of MVAPICH": tuple(f"MV2_COMM_WORLD_{what}" for what in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")),
}
"""For each launcher, the names of the variables that contain the size, rank, local rank and local size. The first
launcher whose variables are set is used."""
_NO_TASKS = 0xFFFFFFF0
"""Slurm step IDs at or above this value denote the batch script or the shell of an interactive allocation, not a step
with ranks."""


@dataclass(frozen=True)
class RendezvousStore:
    """The place where ranks without MPI meet: a host and port, or a file that all ranks can access and that no other
    job has used.

    Attributes
    ----------
    served : whether a process other than rank 0 is already listening on the port, as under torchrun
    start : string that distinguishes restarts of a job that use the same store
    """

    address: str = ""
    port: int = 0
    file: str = ""
    served: bool = False
    start: str = ""

    def __str__(self) -> str:
        return f"FSDPX_STORE={self.file}" if self.file else f"MASTER_ADDR={self.address}, MASTER_PORT={self.port}"


@dataclass(frozen=True)
class LauncherInfo:
    """The launcher that started this process as one of several ranks, and the rank and size variables that it set (None
    if a variable is not set).

    Attributes
    ----------
    size, rank : number of ranks of the job, and the rank of this process
    local_size, local_rank : number of ranks on this host, and the rank of this process among them
    variable : name of the environment variable that contains the rank
    mpi : whether the ranks use MPI
    store : where ranks without MPI meet (FSDPX_STORE, or MASTER_ADDR and MASTER_PORT)
    """

    name: str
    size: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    variable: str = ""
    mpi: bool = True
    store: RendezvousStore | None = None


@dataclass(frozen=True)
class Environment:
    """Settings read from the environment variables.

    Parameters
    ----------
    check : whether ranks check, before each collective, that all of them make the same call (FSDPX_CHECK=1)
    node : whether ranks on the same host communicate through shared memory (FSDPX_NODE=0: through MPI messages)
    tune : whether options that the user has not set are chosen by measurement (FSDPX_TUNE=0: use the defaults)
    retune : whether to measure again even if results are cached (FSDPX_TUNE=again), except after `fsdpx run` has
        restarted the job
    cache : folder for cached measurements, plans and compiled kernels (FSDPX_CACHE; default: fsdpx in the user's cache
        folder)
    timeout : maximum time in seconds to wait for other ranks (FSDPX_TIMEOUT); None means the default time
    start_timeout : maximum time in seconds that the ranks of a host wait for each other while MPI starts
        (FSDPX_START_TIMEOUT)
    launcher : the launcher that started this process as one of several ranks; None if there is none
    expected_size : number of ranks that the launcher started (FSDPX_EXPECT_SIZE takes precedence); None if unknown
    watch : whether every rank has a watchdog, and a flight record that shows what the rank is doing (FSDPX_WATCH=0:
        neither)
    run : folder for the flight records and notes of this job, created by `fsdpx run` (FSDPX_RUN); if None, temporary
        files are used
    restart : number of times that `fsdpx run` or Slurm has restarted this job (FSDPX_RESTART, SLURM_RESTART_COUNT)
    ulfm : whether Open MPI lets the job continue after a rank has failed (mpiexec --with-ft ulfm, which sets
        OMPI_MCA_mpi_ft_enable)
    slurm_job : ID of the Slurm job (SLURM_JOB_ID)
    threads : number of BLAS threads per rank that the user has set (OPENBLAS_NUM_THREADS, MKL_NUM_THREADS,
        OMP_NUM_THREADS)
    """

    check: bool = False
    node: bool = True
    tune: bool = True
    retune: bool = False
    cache: Path = Path.home() / ".cache" / "fsdpx"
    timeout: float | None = None
    start_timeout: float = 60.0
    launcher: LauncherInfo | None = None
    expected_size: int | None = None
    watch: bool = True
    run: Path | None = None
    restart: int = 0
    ulfm: bool = False
    slurm_job: str | None = None
    threads: int | None = None

    @property
    def job_names(self) -> list[str]:
        """Names that identify this job across restarts: the folder of `fsdpx run`, and the ID of the Slurm job."""
        slurm = [] if self.slurm_job is None else [f"Slurm job {self.slurm_job}"]
        return slurm if self.run is None else [str(self.run.parent), *slurm]

    @property
    def settings_required_equal_on_all_ranks(self) -> dict[str, str]:
        """The environment variables that determine which messages ranks exchange, as {name: value}, with values as
        text. They must be the same on all ranks."""
        tune = "again" if self.retune else self.tune
        settings = {
            "CHECK": self.check,
            "NODE": self.node,
            "TUNE": tune,
            "WATCH": self.watch,
            "TIMEOUT": self.timeout,
        }
        return {f"FSDPX_{name}": _format_setting(value) for name, value in settings.items()}

    @property
    def can_share_memory(self) -> bool:
        """Whether the ranks of a host may communicate through shared memory. The value is False with ULFM, because
        shared memory does not survive the failure of a rank."""
        return self.node and not self.ulfm


def _format_setting(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else "not set" if value is None else str(value)


def read_environment(environ: Mapping[str, str] = os.environ) -> Environment:
    """Return the settings of this process. Raise LaunchError for a variable that cannot be parsed.

    In a Slurm job, SLURM_ variables are set even for processes that are not ranks, such as the batch script and the
    daemons of mpiexec. SLURM_ variables are used only in a job step without PMI_ or OMPI_ variables, because a PMI_ or
    OMPI_ variable means that another launcher runs inside the step.
    """
    launcher, expected = _find_launcher(environ), _read_positive_number(environ, "FSDPX_EXPECT_SIZE")
    if launcher is None and expected is not None:
        launcher = LauncherInfo("FSDPX_EXPECT_SIZE", expected)
    return Environment(
        check=_read_boolean(environ, "FSDPX_CHECK"),
        node=_read_boolean(environ, "FSDPX_NODE", "1"),
        tune=_is_retuning_wanted(environ) or _read_boolean(environ, "FSDPX_TUNE", "1"),
        retune=_is_retuning_wanted(environ) and _read_restart_count(environ) == 0,
        cache=_get_cache_folder(environ),
        timeout=_read_seconds(environ, "FSDPX_TIMEOUT"),
        start_timeout=_read_seconds(environ, "FSDPX_START_TIMEOUT") or 60.0,
        launcher=launcher,
        expected_size=launcher.size if expected is None and launcher is not None else expected,
        watch=_read_boolean(environ, "FSDPX_WATCH", "1"),
        run=Path(environ["FSDPX_RUN"]) if environ.get("FSDPX_RUN") else None,
        restart=_read_restart_count(environ),
        ulfm=SWITCHES.get(environ.get("OMPI_MCA_mpi_ft_enable", "").strip().lower(), False),
        slurm_job=environ.get("SLURM_JOB_ID"),
        threads=_read_thread_count(environ),
    )


def set_rank_variables(
    launcher: LauncherInfo, size: int | None, environ: MutableMapping[str, str] = os.environ
) -> None:
    """Set RANK, LOCAL_RANK and WORLD_SIZE for the user's script, regardless of the launcher that started it.

    Set nothing if these variables would make fsdpx detect a different launcher. For example, if FSDPX_STORE is also
    set, RANK and WORLD_SIZE mean that the ranks do not use MPI."""
    numbers = {"RANK": launcher.rank, "LOCAL_RANK": launcher.local_rank, "WORLD_SIZE": size}
    rank_texts = {name: str(value) for name, value in numbers.items() if value is not None}
    if _find_launcher({**environ, **rank_texts}) == _find_launcher(environ):
        environ.update(rank_texts)


@contextmanager
def restoring_environment(environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Return a context manager that undoes changes to environment variables made inside its block, because the
    environment belongs to the user's program."""
    before = dict(environ)
    try:
        yield
    finally:
        for name in environ.keys() - before.keys():
            del environ[name]
        environ.update({name: value for name, value in before.items() if environ.get(name) != value})


def copy_without_rank_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for a helper process, without the variables that would make the process a rank of this
    job."""
    of_launchers = ("PMI", "OMPI_", "PRTE_", "HYDRA_", "MPIR_", "SLURM_", "RANK", "WORLD_SIZE")
    without_mpi = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_", "FSDPX_STORE")
    of_jobs = (*of_launchers, *without_mpi, "FSDPX_EXPECT_SIZE", "FSDPX_RUN", "FSDPX_SECRET")
    return {name: value for name, value in environ.items() if not name.startswith(of_jobs)}


def find_scheduler(environ: Mapping[str, str] = os.environ) -> str:
    """Return the name of the scheduler that started this job: "slurm", "flux", "pbs", or "" if there is none."""
    marks = {"slurm": "SLURM_JOB_ID", "flux": "FLUX_URI", "pbs": "PBS_NODEFILE"}
    return next((name for name, variable in marks.items() if environ.get(variable)), "")


def list_shared_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names of the environment variables that must have the same value on all hosts, because they affect
    which code runs or the last bits of results."""
    return [name for name in environ if name.startswith(SHARED_PREFIXES)]


def require_expected_world_size(size: int, environment: Environment, library: str = "MPI") -> None:
    """Raise LaunchError if `size`, the number of ranks according to `library`, differs from the number that the
    launcher started or the user expects.

    The numbers differ if mpiexec or srun does not match the loaded MPI library, because each rank is then alone in its
    own MPI_COMM_WORLD.
    """
    launcher, expected = environment.launcher, environment.expected_size
    if launcher is not None and launcher.size == size != expected:
        raise LaunchError(
            f"FSDPX_EXPECT_SIZE says {expected} ranks, but {launcher.name} and {library} say {size}: start {expected} "
            "ranks, or unset FSDPX_EXPECT_SIZE"
        )
    if expected is None and launcher is not None and (launcher.rank or 0) >= size:
        expected = (launcher.rank or 0) + 1  # the size is unknown, but it is at least rank + 1
    if launcher is None or expected is None or expected == size:
        return
    beside = Path(sys.executable).with_name("mpiexec")
    says = launcher.name if launcher.size in (None, expected) else "FSDPX_EXPECT_SIZE"
    use = f"{beside} -n {expected}" if beside.exists() else "the mpiexec that belongs to this library"
    raise LaunchError(
        f"this rank was started without the others: {says} says {expected} ranks, "
        f"but {library} says {size}. The launcher and the MPI library that Python loaded do not belong together. "
        f"Start with {use} (under Slurm: srun --mpi=pmi2 for MPICH, srun --mpi=pmix for Open MPI), "
        "or load the launcher's library with MPI4PY_LIBMPI"
    )


def require_single_process_and_get_note(environ: Mapping[str, str] = os.environ) -> str:
    """Raise LaunchError if environment variables declare that this process is one of several ranks, but do not say
    where the ranks meet.

    Return a note for the user if this is a single process in a Slurm job with several tasks, else "". SLURM_NTASKS
    alone does not mean that this process is one of several ranks, because it is set for every process of an
    allocation.
    """
    size = environ.get("WORLD_SIZE", "")
    if environ.get("RANK", "").isdecimal() and size.isdecimal() and int(size) > 1:
        raise LaunchError(
            f"RANK={environ['RANK']} and WORLD_SIZE={size} say that this process is one of {size}, as torchrun sets "
            "them, but no MPI launcher started it, and without "
            f"{' and '.join(_list_missing_master_variables(environ))} it cannot meet the "
            f"others, so it would train alone. Set what is missing, or start it with mpiexec -n {size} python ... (or "
            "srun), or unset RANK and WORLD_SIZE; to train alone all the same: fsdpx.init(backend='local')"
        )
    tasks = environ.get("SLURM_NTASKS", "")
    if "SLURM_JOB_ID" in environ and tasks.isdecimal() and int(tasks) > 1:
        return f"this process is alone, in a Slurm job of {tasks} tasks: srun or mpiexec starts all of them"
    return ""


def _find_launcher(environ: Mapping[str, str]) -> LauncherInfo | None:
    """Return the launcher that started this process. If launchers are nested, such as torchrun inside srun, return the
    innermost one."""
    without_mpi = _find_launcher_of_ranks_without_mpi(environ)
    inside = without_mpi is not None and ("TORCHELASTIC_RUN_ID" in environ or environ.get("FSDPX_STORE"))
    launcher = without_mpi if inside else _detect_mpi_launcher_from_env(environ) or without_mpi
    return launcher and replace(launcher, store=_parse_rendezvous_store(environ))


def _detect_mpi_launcher_from_env(environ: Mapping[str, str]) -> LauncherInfo | None:
    for name, (size, *more) in _LAUNCHERS.items():
        rank, local_rank, local_size = (_parse_count_variable(environ, variable) for variable in more)
        if size in environ or rank:
            return LauncherInfo(
                f"{name} ({size})", _read_positive_number(environ, size), rank, local_rank, local_size, more[0]
            )
    between = any(key.startswith(("PMI_", "OMPI_")) for key in environ)
    rank, step = _parse_count_variable(environ, "SLURM_PROCID"), _parse_count_variable(environ, "SLURM_STEP_ID")
    if between or (step is None and not rank) or (step or 0) >= _NO_TASKS:
        return None
    variable = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    local = _parse_count_variable(environ, "SLURM_LOCALID")
    return LauncherInfo(
        f"srun ({variable})", _read_positive_number(environ, variable), rank, local, variable="SLURM_PROCID"
    )


def _find_launcher_of_ranks_without_mpi(environ: Mapping[str, str]) -> LauncherInfo | None:
    """Return the launcher of ranks that do not use MPI. Environment variables set by torchrun, `fsdpx run` or the user
    describe this launcher. Return None if these variables are missing or incomplete."""
    rank, size = (_parse_count_variable(environ, name) for name in ("RANK", "WORLD_SIZE"))
    if rank is None or not size or _parse_rendezvous_store(environ) is None:
        return None
    local_rank, local_size = (_parse_count_variable(environ, name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    name = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "ranks without MPI"
    return LauncherInfo(f"{name} (WORLD_SIZE)", size, rank, local_rank, local_size, "RANK", mpi=False)


def _parse_rendezvous_store(environ: Mapping[str, str]) -> RendezvousStore | None:
    place = environ.get("FSDPX_STORE", "")
    if place.startswith(TCP_PREFIX):
        address, _, port = place.removeprefix(TCP_PREFIX).rpartition(":")
        if not address or not port.isdecimal():
            raise LaunchError(f"FSDPX_STORE={place} names no port: {TCP_PREFIX}HOST:PORT is needed, or a file")
        return RendezvousStore(address, int(port))
    if place:
        return RendezvousStore(file=place)
    if _list_missing_master_variables(environ):
        return None
    served = SWITCHES.get(environ.get("TORCHELASTIC_USE_AGENT_STORE", "").strip().lower(), False)
    start = environ.get("TORCHELASTIC_RESTART_COUNT", "") if served else ""
    return RendezvousStore(environ["MASTER_ADDR"].strip(), int(environ["MASTER_PORT"]), served=served, start=start)


def read_secret(environ: Mapping[str, str] = os.environ) -> bytes:
    """Return the secret that the ranks of a job share (FSDPX_SECRET), as bytes. Return b"" if the variable is not set.

    Raise LaunchError if the secret has fewer than `MIN_SECRET_CHARS` characters.
    """
    secret_bytes = environ.get("FSDPX_SECRET", "").strip().encode()
    if 0 < len(secret_bytes) < MIN_SECRET_CHARS:
        raise LaunchError(
            f"FSDPX_SECRET has {len(secret_bytes)} characters, which can be guessed: at least {MIN_SECRET_CHARS} are "
            "needed, as "
            "of openssl rand -hex 32; the same on all ranks"
        )
    return secret_bytes


def get_gloo_interface(environ: Mapping[str, str] = os.environ) -> str:
    """Return the name of the network interface that Gloo should use (GLOO_SOCKET_IFNAME, which PyTorch reads as well),
    or "" if the variable is not set."""
    return environ.get("GLOO_SOCKET_IFNAME", "")


def _list_missing_master_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the missing or invalid variables among MASTER_ADDR and MASTER_PORT."""
    address, port = environ.get("MASTER_ADDR", "").strip(), _parse_count_variable(environ, "MASTER_PORT") or 0
    missing = [] if address else ["MASTER_ADDR"]
    return missing if 0 < port < 1 << 16 else [*missing, "MASTER_PORT (from 1 to 65535)"]


def _parse_count_variable(environ: Mapping[str, str], variable: str) -> int | None:
    """Return the value of a launcher's environment variable as a number. Return None if the variable is missing or not
    a number."""
    text = environ.get(variable, "").strip()
    return int(text) if text.isdecimal() else None


def _read_thread_count(environ: Mapping[str, str]) -> int | None:
    """Return the number of BLAS threads that the user has set, or None if the user has set none. Like BLAS libraries,
    this function ignores invalid values."""
    for variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        text = environ.get(variable, "").strip()
        if text.isdecimal() and int(text) > 0:
            return int(text)
    return None


def _read_positive_number(environ: Mapping[str, str], variable: str) -> int | None:
    text = environ.get(variable)
    if text is None:
        return None
    if not text.strip().isdecimal() or int(text) < 1:
        raise LaunchError(f"{variable}={text!r} is not a number of ranks: set it to an integer of at least 1")
    return int(text)


def describe_compiler_target(environ: Mapping[str, str] = os.environ) -> str:
    """Return a description of the processor that the user has told Numba to compile for (NUMBA_CPU_NAME,
    NUMBA_CPU_FEATURES, NUMBA_OPT). Return "" if none of these variables is set."""
    return " ".join(environ.get(f"NUMBA_{name}", "") for name in ("CPU_NAME", "CPU_FEATURES", "OPT")).strip()


def get_trace_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder for training traces (FSDPX_TRACE), which is used if the script does not set one. Return None if
    the variable is not set."""
    return Path(environ["FSDPX_TRACE"]) if environ.get("FSDPX_TRACE") else None


def get_value_record_folder_and_step_count(environ: Mapping[str, str] = os.environ) -> tuple[Path, int] | None:
    """Return the folder in which to record the values that each action of a step writes (FSDPX_RECORD), and the number
    of steps to record (FSDPX_RECORD_STEPS). Return None if nothing should be recorded."""
    if not environ.get("FSDPX_RECORD"):
        return None
    return Path(environ["FSDPX_RECORD"]), _parse_count_variable(environ, "FSDPX_RECORD_STEPS") or DEFAULT_RECORDED_STEPS


def make_recording_environment(folder: Path, steps: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for a run that records, in `folder`, the values that each action writes during the first
    `steps` steps."""
    return {**environ, "FSDPX_RECORD": str(folder), "FSDPX_RECORD_STEPS": str(steps)}


def get_allocated_ranks_and_variable(environ: Mapping[str, str] = os.environ) -> tuple[int, str] | None:
    """Return the number of ranks that the scheduler has allocated resources for, and the name of the environment
    variable that contains this number. Return None if there is no allocation.

    If SLURM_NTASKS is not set, the number is computed from the number of nodes and the tasks per node (default: 1)."""
    if "SLURM_JOB_ID" in environ:
        nodes = _parse_count_variable(environ, "SLURM_NNODES") or 1
        each = _parse_count_variable(environ, "SLURM_NTASKS_PER_NODE") or 1
        tasks = _parse_count_variable(environ, "SLURM_NTASKS")
        return (tasks, "SLURM_NTASKS") if tasks else (nodes * each, "SLURM_NNODES, SLURM_NTASKS_PER_NODE")
    for variable in ("LSB_DJOB_NUMPROC", "LSB_MAX_NUM_PROCESSORS"):
        if slots := _parse_count_variable(environ, variable):
            return slots, variable
    return None


def is_single_host_job(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the job runs on a single host: its allocation has one host, or there is no allocation."""
    if "SLURM_JOB_ID" in environ:
        return _parse_count_variable(environ, "SLURM_NNODES") == 1
    return not find_scheduler(environ) and get_allocated_ranks_and_variable(environ) is None


def find_hostfile_and_variable(environ: Mapping[str, str] = os.environ) -> tuple[Path, str] | None:
    """Return the path of the hostfile that the scheduler or the cluster provides for this job, and the name of the
    environment variable that contains the path. Return None if there is no hostfile."""
    known = ("PBS_NODEFILE", "HYDRA_HOST_FILE", "PRTE_MCA_prte_default_hostfile", "OMPI_MCA_orte_default_hostfile")
    return next(((Path(environ[name]), name) for name in known if environ.get(name)), None)


def list_environment_modules(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names of the environment modules that are loaded (`module load`)."""
    return [name for name in environ.get("LOADEDMODULES", "").split(":") if name]


def make_prepended_python_path(first: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the value of PYTHONPATH with the folder `first` prepended."""
    return os.pathsep.join(filter(None, (first, environ.get("PYTHONPATH"))))


def get_visible_gpus(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the GPUs that are visible to this process (CUDA_VISIBLE_DEVICES, which fsdpx never sets). None means all
    GPUs."""
    return environ.get("CUDA_VISIBLE_DEVICES")


def get_gpu_aware_mpi_setting(environ: Mapping[str, str] = os.environ) -> bool | None:
    """Return whether to pass GPU arrays to MPI directly (FSDPX_GPU_AWARE_MPI). Return None if the user has not decided
    this; the caller must then probe whether MPI accepts GPU arrays."""
    text = environ.get("FSDPX_GPU_AWARE_MPI", "auto").strip().lower()
    return None if text == "auto" else _read_boolean(environ, "FSDPX_GPU_AWARE_MPI")


def get_requested_mpi_library(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the value of MPI4PY_LIBMPI: the path or name of the MPI library that mpi4py loads. Return None if it is
    not set."""
    return environ.get("MPI4PY_LIBMPI")


def _read_restart_count(environ: Mapping[str, str]) -> int:
    text = environ.get("FSDPX_RESTART", "0").strip()
    if not text.isdecimal():
        raise LaunchError(f"FSDPX_RESTART={text!r} is not a number of restarts: leave it to `python -m fsdpx run`")
    return int(text) + (_parse_count_variable(environ, "SLURM_RESTART_COUNT") or 0)


def _read_seconds(environ: Mapping[str, str], variable: str) -> float | None:
    text = environ.get(variable)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise LaunchError(f"{variable}={text!r} is not a time: set it to a positive number of seconds")
    return seconds


def _get_cache_folder(environ: Mapping[str, str]) -> Path:
    cache_path, users = environ.get("FSDPX_CACHE"), environ.get("XDG_CACHE_HOME")
    return Path(cache_path or Path(users or "~/.cache", "fsdpx")).expanduser()


def _is_retuning_wanted(environ: Mapping[str, str]) -> bool:
    return environ.get("FSDPX_TUNE", "").strip().lower() == "again"


def _read_boolean(environ: Mapping[str, str], variable: str, default: str = "0") -> bool:
    text = environ.get(variable, default).strip().lower()
    if text and text not in SWITCHES:
        raise LaunchError(f"{variable}={text!r} is neither yes nor no: set it to 1 or 0")
    return SWITCHES.get(text, False)
