"""Every error that fsdpx raises, in one tree.

FsdpxError
├── ConfigError (ValueError)      an option, a model or a combination of them that cannot work
│   ├── MeshError                 a mesh that the world does not fill
│   ├── ShapeError                an array or a layer that does not fit its neighbour
│   └── LaunchError               ranks that were started without each other
├── DataError (ValueError)        a batch, a label or a dataset that cannot be used
├── CheckpointError (ValueError)  a checkpoint that cannot be written, read or used
├── OffloadError (OSError)        a folder of offloaded state that is missing, full, in use or broken
├── OutOfMemory (MemoryError)     a plan that does not fit into the memory of a rank
├── NumericsError (ArithmeticError)   NaN or Inf where a number was needed
├── ProgramError                  a program that `check` rejects
└── CommError (RuntimeError)      ranks that no longer agree
    ├── DesyncError               ranks called different collectives
    ├── CommTimeout               a peer did not answer in time
    ├── RankLost                  a rank has died, or another rank has revoked the communicator
    ├── StateLost                 the state of dead ranks has no copy in another rank's memory
    └── Aborted                   another rank failed first
"""

import re
import sys
import warnings
from collections.abc import Iterable

__all__ = [
    "Aborted",
    "CheckpointError",
    "CommError",
    "CommTimeout",
    "ConfigError",
    "DataError",
    "DesyncError",
    "FsdpxError",
    "LaunchError",
    "MeshError",
    "NumericsError",
    "OffloadError",
    "OutOfMemory",
    "ProgramError",
    "RankLost",
    "ShapeError",
    "StateLost",
    "escape_control",
    "install_hint",
    "page_hint",
    "warn",
]  # fmt: skip

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that a terminal obeys, but for tabs and line breaks."""


def escape_control(text: str) -> str:
    """A text of which others may have written parts, so that a terminal shows it and does nothing else."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def install_hint(*extras: str) -> str:
    """The command that installs one of these extras of fsdpx, as text. No index has fsdpx, so it is in its sources."""
    commands = " or ".join(f"pip install '.[{extra}]'" for extra in extras)
    return f"{commands} in the folder of fsdpx's sources"


def page_hint(page: str) -> str:
    """A page of the documentation, as text, by the name of its file."""
    return f"the page {page} of the documentation"


_BETWEEN = {"contextlib", "fsdpx", "functools", "importlib", "numba"}
"""Packages that stand between the line of a caller and a warning."""


def warn(text: str, kind: type[Warning] = RuntimeWarning) -> None:
    """A warning at the line of the program that has called fsdpx, whatever lies between; an example is a program."""
    frame = sys._getframe(1)
    name = frame.f_globals.get("__name__", "")
    while frame.f_back and name.partition(".")[0] in _BETWEEN and not name.startswith("fsdpx.examples."):
        frame = frame.f_back
        name = frame.f_globals.get("__name__", "")
    seen = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, kind, frame.f_code.co_filename, frame.f_lineno, name, seen)


class FsdpxError(Exception):
    """Root of all errors that fsdpx raises on purpose. Names from files that others have made are shown, not obeyed."""

    def __str__(self) -> str:
        return escape_control(super().__str__())


class ConfigError(FsdpxError, ValueError):
    """An option, a model or a combination of them cannot work."""


class MeshError(ConfigError):
    """The mesh and the number of ranks do not fit."""


class ShapeError(ConfigError):
    """An array or a layer does not fit its neighbour."""


class LaunchError(ConfigError):
    """The ranks of this job were started without each other."""


class DataError(FsdpxError, ValueError):
    """A batch, a label or a dataset cannot be used."""


class CheckpointError(FsdpxError, ValueError):
    """A checkpoint cannot be written, read or used; the same on all ranks."""


class OffloadError(FsdpxError, OSError):
    """State cannot be kept in the folder that `OffloadConfig` names; where it is opened, the same on all ranks."""


class OutOfMemory(FsdpxError, MemoryError):
    """The plan of this rank does not fit into its memory: what the plan is, what there is, and what would fit."""


class NumericsError(FsdpxError, ArithmeticError):
    """NaN or Inf where a number was needed."""


class ProgramError(FsdpxError):
    """`check` found a program that would deadlock, leak or read what is not there."""


class CommError(FsdpxError, RuntimeError):
    """The ranks of a communicator no longer agree."""


class DesyncError(CommError):
    """Ranks called different collectives, or one did not call at all."""


class CommTimeout(CommError, TimeoutError):
    """A peer did not answer before the deadline."""


class RankLost(CommError):
    """A rank of this communicator has died, or another rank has revoked the communicator because one has.

    ranks: those of this communicator that are known to be dead on this rank; may be empty."""

    def __init__(self, message: str = "", ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class StateLost(CommError):
    """Parts of the state were lost with dead ranks and have no copy in another rank's memory; on all survivors."""


class Aborted(CommError):
    """Another rank failed first; this one was interrupted to end with it."""
