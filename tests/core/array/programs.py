"""Programs that a new process runs."""

import subprocess
import sys

__all__ = ["run_program"]


def run_program(code: str, *arguments: str) -> list[str]:
    """The words that it prints; it must end well, in three minutes, without a warning."""
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    return subprocess.run(command, check=True, timeout=180, stdout=subprocess.PIPE, text=True).stdout.split()
