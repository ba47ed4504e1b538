"""Finds the Python that a GPU machine runs, on the machine that builds wheels for it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from gpu.errors import GpuCheckError

OLDEST = (3, 10)
_PROBE = """
import json, os, sys, sysconfig
header = os.path.join(sysconfig.get_path("include"), "Python.h")
print(json.dumps([sys.executable, sys.version_info[0], sys.version_info[1], header, os.path.isfile(header)]))
"""


@dataclass(frozen=True)
class Interpreter:
    path: Path
    major: int
    minor: int

    @property
    def version(self) -> str:
        return f"{self.major}.{self.minor}"

    @property
    def tag(self) -> str:
        """As wheels spell it: cp312."""
        return f"cp{self.major}{self.minor}"


def find_interpreter(wanted: str) -> Interpreter:
    """`wanted`: a version such as 3.12, or a command or path such as python3 or .venv/bin/python."""
    by_version = re.fullmatch(r"3\.\d+", wanted)
    candidates = _installed(wanted) if by_version else [shutil.which(wanted) or wanted]
    for candidate in candidates:
        interpreter = _probe(candidate)
        if interpreter is not None and (not by_version or interpreter.version == wanted):
            return interpreter
    version = wanted if by_version else "3.X"
    raise GpuCheckError(
        f"no working Python '{wanted}' on this machine",
        "the same Python version here as on the GPU machine, for wheels fit one version only",
        f"install it (`uv python install {version}`, `pyenv install {version}` or the package python{version}-dev), "
        "or pass PYTHON=/path/to/python",
    )


def _installed(version: str) -> list[str]:
    """Where a Python of this version may lie: on PATH, managed by uv, managed by pyenv (its shims may be off)."""
    found = [shutil.which(f"python{version}")]
    if shutil.which("uv"):
        asked = subprocess.run(["uv", "python", "find", version], capture_output=True, text=True, check=False)
        found.append(asked.stdout.strip())
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found.extend(str(path) for path in sorted(pyenv.glob(f"versions/{version}*/bin/python{version}"), reverse=True))
    return [path for path in found if path]


def _probe(command: str) -> Interpreter | None:
    """Return this interpreter's facts; None if it does not run. Raises GpuCheckError if it cannot build extensions."""
    try:
        asked = subprocess.run([command, "-c", _PROBE], capture_output=True, text=True, check=False, timeout=30)
    except OSError:
        return None
    if asked.returncode != 0:
        return None
    path, major, minor, header, has_header = json.loads(asked.stdout)
    if (major, minor) < OLDEST:
        raise GpuCheckError(f"Python {major}.{minor} at {path}", "3.10 or later", "pass another one: PYTHON=3.12")
    if not has_header:
        raise GpuCheckError(
            f"Python {major}.{minor} at {path} without its headers ({header})",
            "headers, to compile PyCUDA",
            f"install them (Debian: python{major}.{minor}-dev)",
        )
    return Interpreter(Path(path), major, minor)
