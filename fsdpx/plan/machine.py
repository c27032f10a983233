"""Descriptions of machines: the speed of ranks and of the network between them. Descriptions are read from
machine.toml files."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from itertools import pairwise
from math import ceil, inf
from os import PathLike
from pathlib import Path
from typing import Any

from fsdpx.core.base.name_hints import require_known_options
from fsdpx.core.base.safe_files import describe_read_error, expanduser, read_file
from fsdpx.errors import ConfigError, warn
from fsdpx.plan.kernels import WEIGHTS, KernelRates, explain_invalid_kernel_rates

__all__ = ["Compute", "DiskSpeed", "Machine", "NetworkLevel"]

SHIPPED_FOLDER = Path(__file__).with_name("machines")
KEYS_AT_MOST_1 = ("efficiency", "memory_efficiency", "spill", "contention")
"""Keys whose values are at most 1."""
POSITIVE_KEYS = (
    "ranks", "bandwidth", "memory", "efficiency", "memory_efficiency", "capacity", "cores", "write", "read", "total",
)  # fmt: skip
"""Keys whose values must be above 0; the values of other keys may be 0."""
FORMATS = {"float64", "float32", "bf16", "float16"}
MEASURED_VALUES = ("compute", "links")
"""Values that the list `measured` of a machine file may contain."""


@dataclass(frozen=True)
class NetworkLevel:
    """One level of the network hierarchy, such as the network between hosts. All ranks in one unit of the level (a
    socket, a host, a rack) reach each other at the same speed.

    Parameters
    ----------
    name : name of the level, such as "socket", "host", "rack" or "system"
    latency : seconds that an empty message takes
    bandwidth : bytes per second of one rank while no other rank sends
    ranks : number of ranks in one unit (default: all ranks; only the last level has this default)
    contention : how much ranks slow each other down if they share a unit of the next lower level, such as the ranks of
        one host in the network between hosts: 0 if every rank has its own link (default), 1 if all these ranks share
        one link
    """

    name: str
    latency: float
    bandwidth: float
    ranks: float = inf
    contention: float = 0.0

    def compute_bandwidth_per_rank(self, users: float) -> float:
        """Return the bandwidth of one rank while several ranks of its unit send.

        Parameters
        ----------
        users : number of ranks that use the links of one unit at the same time

        Returns
        -------
        float : bytes per second
        """
        return self.bandwidth / (1.0 + (max(users, 1.0) - 1.0) * self.contention)


@dataclass(frozen=True)
class Compute:
    """Compute speed and memory of one rank.

    Parameters
    ----------
    flops : peak FLOP per second of matrix products, by format: float64, float32, bf16, float16
    memory : peak bytes per second to and from memory
    efficiency : fraction of `flops` that large products reach
    half : size in FLOP of a matrix product that reaches half the rate of large products, in the fastest format: a
        product of F FLOP reaches `F / (F + half)` of that rate. Every product therefore takes a constant time longer
        than at the full rate, and this extra time is the same in all formats
    memory_efficiency : fraction of `memory` that memory-bound kernels reach
    launch : overhead of each kernel call in seconds
    spill : fraction of the intermediate arrays of attention and losses that is written to memory if these layers
        consist of several kernels; 0 if all intermediate arrays stay in registers and caches
    overhead : overhead of each step in seconds
    gpu : whether each rank is a GPU; unlike CPUs, GPUs always compute with 16-bit numbers directly
    cores : number of cores of a rank that is not a GPU; less than 1 if ranks share cores. In this case, all other
        figures apply to a host on which all ranks are computing
    capacity : bytes of memory of one rank (None if not known)
    kernels : rates of kernels that were measured one by one, see `KernelRates`
    """

    flops: Mapping[str, float]
    memory: float
    efficiency: float = 1.0
    half: float = 0.0
    memory_efficiency: float = 1.0
    launch: float = 0.0
    spill: float = 0.0
    overhead: float = 0.0
    gpu: bool = False
    cores: float = 1.0
    capacity: float | None = None
    kernels: KernelRates = field(default_factory=KernelRates)


@dataclass(frozen=True)
class DiskSpeed:
    """Speed of the disk that holds checkpoints and offloaded state.

    Parameters
    ----------
    write : maximum bytes per second that one rank writes
    read : maximum bytes per second that one rank reads
    total : maximum bytes per second of all ranks together (default: no limit)
    """

    write: float
    read: float
    total: float = inf


@dataclass(frozen=True)
class Machine:
    """A machine to predict steps for. A rank is a GPU, or the cores of one process.

    Parameters
    ----------
    name : name of the machine in tables and messages
    levels : the network hierarchy: the first level connects the closest ranks, and the last level connects all ranks
    compute : speed and memory of one rank
    disk : speed of the disk that holds checkpoints and offloaded state (None if not known)
    measured : which figures were measured: "compute", "links" or both (None if the file does not say)
    """

    name: str
    levels: tuple[NetworkLevel, ...]
    compute: Compute
    disk: DiskSpeed | None = None
    measured: tuple[str, ...] | None = None

    @classmethod
    def list_names(cls) -> list[str]:
        """Return the names of the predefined machines, which `Machine.load` accepts."""
        return sorted(path.stem for path in SHIPPED_FOLDER.glob("*.toml"))

    @classmethod
    def load(cls, name_or_path: str | PathLike[str] | Machine) -> Machine:
        """Load the description of a machine: either a predefined machine by name, or a machine.toml file by path.

        Parameters
        ----------
        name_or_path : a name, the path of a machine.toml, or a `Machine`, which is returned unchanged

        Returns
        -------
        Machine : the machine

        Raises
        ------
        ConfigError : if the machine is unknown, or if its file is invalid; for an invalid file, the message names the
            file, section and key, and says what is needed
        """
        if isinstance(name_or_path, Machine):
            return name_or_path
        if not isinstance(name_or_path, str | PathLike):
            raise ConfigError(f"machine={name_or_path!r}: a name, the path of a machine.toml or a Machine is needed")
        path = expanduser(name_or_path)
        if str(name_or_path) in cls.list_names():
            path = SHIPPED_FOLDER / f"{name_or_path}.toml"
        elif path.suffix != ".toml" and not os.path.exists(path):
            names = ", ".join(cls.list_names())
            raise ConfigError(f"machine={str(name_or_path)!r} is none of {names}, and no file of that name exists")
        try:
            found = tomllib.loads(read_file(path, ours=False).decode())
        except FileNotFoundError:
            remedy = "write it with `mpiexec -n N python -m fsdpx measure-machine`, or name one of "
            remedy += ", ".join(cls.list_names())
            raise ConfigError(f"machine file {path}: there is no such file; {remedy}") from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"machine file {path}: {error}") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"machine file {path} cannot be read: {describe_read_error(error, path)}") from error
        return _parse_machine(path, found)

    @property
    def ranks_per_host(self) -> float:
        """Number of ranks per host; inf if the description of the machine does not limit it."""
        return next((level.ranks for level in self.levels if level.name == "host"), self.levels[0].ranks)

    def compute_slowdown(self, ranks: int) -> float:
        """Return the factor that scales the computing time given by `compute` for a job with `ranks` ranks.

        The factor differs from 1 only if ranks share cores (`Compute.cores` < 1). In that case, the ranks on a core
        take turns, and all ranks wait for the core with the most ranks. The figures of `compute` apply to a full host,
        so with fewer ranks the factor is below 1.

        Parameters
        ----------
        ranks : number of ranks of the job

        Returns
        -------
        float : computing time relative to a full host
        """
        if self.compute.cores >= 1 or self.ranks_per_host == inf:
            return 1.0
        cores = max(round(self.compute.cores * self.ranks_per_host), 1)
        return ceil(min(ranks, self.ranks_per_host) / cores) / ceil(self.ranks_per_host / cores)


def _parse_machine(path: Path, found: dict[str, Any]) -> Machine:
    """Convert the parsed TOML of a machine file to a `Machine`. If it is invalid, raise a ConfigError that names the
    section and key."""

    def make_error(section: str, what: str, wanted: str) -> ConfigError:
        return ConfigError(f"machine file {path}, {section}: {what}; {wanted}")

    def parse_record(kind: Any, given: Any, section: str) -> Any:
        known = {one.name: one.default for one in fields(kind) if one.name != "kernels"}
        needed = [key for key, default in known.items() if default is MISSING]
        if not isinstance(given, dict):
            raise make_error(section, f"{given!r} is no table", f"one with {' and '.join(needed)} is needed")
        for key, value in given.items():
            if key not in known:
                raise make_error(section, f"{key} is not known", f"the keys here are {', '.join(known)}")
            if wanted := _explain_invalid_value(key, value):
                raise make_error(section, f"{key} = {value!r}", wanted)
        for key in needed:
            if key not in given:
                raise make_error(section, f"{key} is missing", "say it")
        return kind(**given)

    levels, compute, disk = (found.get(name) for name in ("levels", "compute", "disk"))
    if not isinstance(levels, list) or not levels:
        raise make_error("[[levels]]", "no level", "say at least one [[levels]] with latency and bandwidth")
    if compute is None:
        raise make_error("[compute]", "missing", "say flops and memory")
    keys = ["name", "about", "measured", "levels", "compute", "disk", "kernels"]
    require_known_options(f"machine file {path}", found, keys)
    for key in ("name", "measured", "kernels"):
        if key in found and (wanted := _explain_invalid_value(key, found[key])):
            raise make_error("[kernels]" if key == "kernels" else "the machine", f"{key} = {found[key]!r}", wanted)
    made = [parse_record(NetworkLevel, level, f"[[levels]] {n}") for n, level in enumerate(levels, 1)]
    for n, (one, two) in enumerate(pairwise(made), 1):
        if one.ranks == inf:
            raise make_error(f"[[levels]] {n}", "ranks is missing", "only the last level holds all")
        if one.ranks >= two.ranks:
            wanted = f"more than the {one.ranks:g} of the level before"
            raise make_error(f"[[levels]] {n + 1}", f"{two.name} holds {two.ranks:g} ranks", wanted)
    there = None if disk is None else parse_record(DiskSpeed, disk, "[disk]")
    kernels, measured = KernelRates(**found.get("kernels", {})), found.get("measured")
    computes = replace(parse_record(Compute, compute, "[compute]"), kernels=kernels)
    name = found.get("name", path.stem)
    _warn_of_unknown_kernels(path, kernels)
    return Machine(name, tuple(made), computes, there, None if measured is None else tuple(measured))


def _warn_of_unknown_kernels(path: Path, rates: KernelRates) -> None:
    """Warn if a machine file contains rates of kernels that do not exist, for example because an update has renamed
    kernels."""
    tables = (*rates.passes.values(), *rates.products.values())
    names = {kernel.removeprefix(WEIGHTS) for table in tables for kernel in table}
    if not names:
        return
    from fsdpx.plan.probes import find_names_of_measured_kernels

    if unknown := sorted(names - find_names_of_measured_kernels()):
        warn(
            f"machine file {path} has rates of {', '.join(unknown)}, which this version of fsdpx does not measure: "
            "these rates are ignored, and kernels without rates are priced as plain array code. Measure again: "
            f"mpiexec -n N python -m fsdpx measure-machine --output {path}"
        )


def _explain_invalid_value(key: str, value: Any) -> str:
    """Return an error message that says which values are allowed for the key `key` of a machine file. Return "" if
    `value` is valid."""
    if key in ("name", "gpu"):
        kind = str if key == "name" else bool
        return "" if isinstance(value, kind) else f"a {kind.__name__} is needed"
    if key == "kernels":
        return explain_invalid_kernel_rates(value, FORMATS)
    if key == "measured":
        good = isinstance(value, list) and all(one in MEASURED_VALUES for one in value)
        return "" if good else f"a list of {' and '.join(MEASURED_VALUES)} is needed"
    if key == "flops":
        if not isinstance(value, dict) or not value or not FORMATS.issuperset(value):
            names = ", ".join(sorted(FORMATS))
            return f"a table by format is needed, such as {{float32 = 19.5e12}}; the formats are {names}"
        return next(filter(None, (_explain_invalid_value("memory", one) for one in value.values())), "")
    least = "above 0" if key in POSITIVE_KEYS else "of at least 0"
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < inf
    if not good or (value == 0 and key in POSITIVE_KEYS):
        return f"a number {least} is needed"
    if key == "ranks" and value != int(value):
        return "a whole number is needed"
    return "at most 1 is needed" if key in KEYS_AT_MOST_1 and value > 1 else ""
