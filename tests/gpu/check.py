"""Everything that needs a GPU, in one command.

- The kernels' tests, and compute-sanitizer over a part of them.
- The benchmark.
- The TensorRT backend against ONNX Runtime: build, observe, infer, swap. A fake TensorRT shows that the backend's own
  CUDA calls are right. Then follows the TensorRT that is installed.

    make gpu-check [PYTHON=python3] [STEPS="tests memcheck racecheck benchmark backend tensorrt"] [OUT=var/gpu-check]

Needs an NVIDIA GPU with its driver, nvcc, g++, and Python 3.10 or later with numpy. PyCUDA and pytest come from
wheelhouse/, else from this Python, else from the package index through pip. `make wheelhouse` fills wheelhouse/ on
another machine; then neither network nor pip nor venv is used here. compute-sanitizer, CuPy and PyTorch are optional.
Without make: PYTHONPATH=tests python3 -m gpu.check. Each step's output goes to the terminal and to OUT/<step>.txt.
Exit code: 0 when every step passed, 1 when one failed, 2 when the check could not start.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gpu.environment import ROOT, Environment, has_module, prepare, require_compilers, require_device
from gpu.errors import GpuCheckError

PASSED, FAILED, CANNOT_START = 0, 1, 2
STEPS = ("tests", "memcheck", "racecheck", "benchmark", "backend", "tensorrt")
# What the TensorRT backend needs beside PyCUDA; the GPU machine has to bring it, most weighs too much to carry.
_BACKEND_NEEDS = ("onnx", "onnxruntime", "psutil")
_BACKENDS = {"backend": "fake_on_gpu", "tensorrt": "real"}  # steps, and their parameter of the backend's tests
_RUNTIMES = ("tensorrt", "tensorrt_rtx")
# Without tests/conftest.py, whose fixtures need all of tared's dependencies.
PYTEST = ("-m", "pytest", "-p", "pytest_timeout", "-p", "no:cacheprovider", "--noconftest", "-m", "gpu")
# Under compute-sanitizer a kernel runs up to a hundred times slower: both kernels, all geometries, but not all tests.
_SANITIZED = "float_edges or small_tensors or last_bit or small_frames"
_BACKEND_TESTS = ROOT / "tests/engines/trt/test_trt_gpu.py"
_LIMIT_S = 570.0
TIMED_OUT = 124  # as timeout(1) has it


@dataclass(frozen=True)
class Step:
    """`lacking` names the tool that it needs and this machine does not have."""

    name: str
    command: tuple[str, ...]
    lacking: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS, help="default: all")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "var/gpu-check"))
    parser.add_argument("--wheelhouse", type=Path, default=ROOT / "wheelhouse")
    parser.add_argument("--site", type=Path, default=ROOT / "var/gpu-site", help="where wheels are unpacked")
    options = parser.parse_args()
    exit_on_signals()
    try:
        environment = prepare(options.wheelhouse, options.site)
        device = require_device(environment)
        require_compilers(environment)
    except GpuCheckError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return CANNOT_START
    print(device, flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "device.txt").write_text(device + "\n")
    return run_steps([planned(name, environment) for name in options.steps], environment, options.out)


def exit_on_signals() -> None:
    """So that being ended ends the running step too: no signal from outside reaches its session."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda received, _: sys.exit(128 + received))


def planned(name: str, environment: Environment) -> Step:
    tests = (sys.executable, *PYTEST, *gpu_tests(ROOT / "tests"))
    if name == "tests":
        return Step(name, tests)
    if name == "benchmark":
        return Step(name, (sys.executable, "-m", "benchmarks.gpu_histogram"))
    if name in _BACKENDS:
        lacking = [module for module in _BACKEND_NEEDS if not has_module(module, environment)]
        if name == "tensorrt" and not any(has_module(module, environment) for module in _RUNTIMES):
            lacking.append(" or ".join(_RUNTIMES))
        command = (sys.executable, *PYTEST, "-rA", "-k", _BACKENDS[name], str(_BACKEND_TESTS))
        return Step(name, command, lacking=" and ".join(lacking))
    sanitizer = shutil.which("compute-sanitizer", path=environment["PATH"])
    if sanitizer is None:
        return Step(name, (), lacking="compute-sanitizer")
    return Step(name, (sanitizer, "--tool", name, "--error-exitcode", "1", *tests, "-k", _SANITIZED))


def gpu_tests(folder: Path) -> list[str]:
    """The files with a test marked gpu; the others would be imported for nothing, with all they import."""
    files = [path for path in sorted(folder.rglob("test_*.py")) if path != _BACKEND_TESTS]
    return [str(path) for path in files if "mark.gpu" in path.read_text(encoding="utf-8")]


def run_steps(steps: Iterable[Step], environment: Environment, out: Path) -> int:
    """All of them, also after one has failed: a GPU is borrowed rarely. Returns the exit code."""
    verdicts = {}
    for step in steps:
        if step.lacking:
            verdicts[step.name] = f"not run: {step.lacking} is not installed"
            continue
        print(f"--- {step.name}: {' '.join(step.command)}", flush=True)
        started = time.monotonic()
        code = run_shown(step.command, environment, out / f"{step.name}.txt", _LIMIT_S)
        failure = "ended at its limit" if code == TIMED_OUT else f"exit code {code}"
        verdict = "passed" if code == 0 else f"FAILED, {failure}"
        verdicts[step.name] = f"{verdict} ({time.monotonic() - started:.0f} s)"
    summary = "".join(f"{name:<10} {verdict}\n" for name, verdict in verdicts.items())
    print(summary, end="", flush=True)
    (out / "summary.txt").write_text(summary)
    return FAILED if "FAILED" in summary else PASSED


def run_shown(command: tuple[str, ...], environment: Environment, copy: Path, limit_s: float) -> int:
    """Runs a command, its output on the terminal and in `copy`, as it comes. TIMED_OUT where it took longer.

    In a session of its own, which ends with it: compute-sanitizer is a launcher, and what it started would live on.
    """
    expired, leader = threading.Event(), 0

    def expire() -> None:
        expired.set()
        _kill_group(leader)

    timer = threading.Timer(limit_s, expire)
    try:
        with _signals_held():
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            leader = process.pid
        timer.start()
        with process.stdout as output, copy.open("w", encoding="utf-8") as file:  # type: ignore[union-attr]  # a PIPE
            for line in output:
                print(line, end="", flush=True)
                file.write(line)
        code = process.wait()
    finally:
        timer.cancel()
        _kill_group(leader)
    return TIMED_OUT if expired.is_set() else code


@contextmanager
def _signals_held() -> Iterator[None]:
    """Handle signals at the end: in the middle, a process runs that is not recorded yet."""
    came: list[int] = []
    ending = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = {number: signal.signal(number, lambda received, _: came.append(received)) for number in ending}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for received in came:
            signal.raise_signal(received)


def _kill_group(leader: int) -> None:
    if leader:  # else it never started
        with suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
