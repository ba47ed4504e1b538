"""Builds wheelhouse/: what `make gpu-check` installs on a machine that reaches no package index.

    make wheelhouse [PYTHON=3.12]

Run it on a machine with the network and a CUDA toolkit; no GPU and no driver needed. PYTHON is the version that the
GPU machine runs, and must be installed here too. Then copy the working tree, wheelhouse/ included, to the GPU machine
and run `make gpu-check` there. That machine must itself have

    - an NVIDIA driver and its GPU, and a processor of this machine's kind
    - the same Python version, with numpy 1.26 or later (15 MB, too large to bring); pip and venv are not needed
    - nvcc and g++, for PyCUDA compiles the kernels on the device's own machine

and it may have compute-sanitizer, CuPy and PyTorch, which are used where they are. The wheelhouse, some 3 MB, brings
PyCUDA, which its authors publish as source only, what PyCUDA needs, what calibrate/ needs, and pytest.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from gpu.errors import GpuCheckError
from gpu.interpreters import Interpreter, find_interpreter
from gpu.stub_libcuda import build_stub, find_toolkit

ROOT = Path(__file__).resolve().parents[2]
PYCUDA = "2026.1"
TEST_TOOLS = ("pytest", "pytest-timeout")
BESIDE_NUMPY = ("pcodec",)  # what calibrate/ imports
LIMIT_BYTES = 5_000_000  # it travels with the working tree, sometimes over a slow line
_TICK_S = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="python3", help="version or path of the Python to build for")
    parser.add_argument("--output", type=Path, default=ROOT / "wheelhouse", help="default: wheelhouse/")
    options = parser.parse_args()
    try:
        fill(options.output, find_interpreter(options.python))
    except GpuCheckError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def fill(output: Path, python: Interpreter) -> None:
    """Replaces `output` once everything is there. A PyCUDA wheel that fits is kept, for compiling it takes minutes."""
    print(f"wheelhouse for Python {python.version} on {platform.machine()}", flush=True)
    output = output.resolve()  # the commands run elsewhere
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch).resolve()
        builder = _virtual_environment(python, work)
        kept = sorted(output.glob(f"pycuda-{PYCUDA}-{python.tag}-*_{platform.machine()}.whl"))
        wheel = kept[-1] if kept else _build_pycuda(builder, work)
        collect = [*_pip(builder, "download"), "--only-binary=:all:", "--dest", str(work / "wheels")]
        _shown("collecting what PyCUDA needs, and pytest", [*collect, str(wheel), *TEST_TOOLS], work)
        _shown("collecting what calibrate/ needs", [*collect, "--no-deps", *BESIDE_NUMPY], work)
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(work / "wheels", output)
    _report(output)


def _pip(builder: Path, command: str) -> list[str]:
    pins = ["--constraint", str(ROOT / "constraints.txt")]
    return [str(builder), "-m", "pip", "--disable-pip-version-check", command, *pins]


def _virtual_environment(python: Interpreter, work: Path) -> Path:
    """A throwaway environment of the wanted Python; returns its interpreter."""
    remedy = f"install its venv module (Debian: python{python.version}-venv)"
    _shown("setting up", [str(python.path), "-m", "venv", str(work / "venv")], work, remedy)
    return work / "venv/bin/python"


def _build_pycuda(builder: Path, work: Path) -> Path:
    """Compiles PyCUDA from its source against the stub; returns the wheel.

    Without cuRAND, whose headers many toolkits leave out and tared does not use. NumPy 2's headers make a wheel
    that runs with NumPy 1.25 and later.
    """
    stub, toolkit = work / "stub", find_toolkit()
    build_stub(toolkit, stub)
    install = [*_pip(builder, "install"), "numpy>=2", "setuptools", "wheel"]
    _shown("fetching numpy's headers", install, work)
    fetch = [*_pip(builder, "download"), "--no-deps", "--no-build-isolation", "--no-binary=:all:"]
    _shown(f"fetching PyCUDA {PYCUDA}", [*fetch, "--dest", str(work), f"pycuda=={PYCUDA}"], work)
    source = work / f"pycuda-{PYCUDA}"
    unpack_source(source.with_name(f"{source.name}.tar.gz"), work)
    (source / "siteconf.py").write_text(
        f"CUDA_ROOT = {str(toolkit)!r}\nCUDA_ENABLE_CURAND = False\nCUDADRV_LIB_DIR = [{str(stub)!r}]\n"
        "CXXFLAGS = ['-g0']\nLDFLAGS = ['-s']\n"  # with debug information the wheel weighs eight times as much
    )
    build = [*_pip(builder, "wheel"), "--no-deps", "--no-build-isolation", "--wheel-dir", str(work), str(source)]
    _shown("compiling PyCUDA, a minute or two", build, work, "install g++ (Debian: build-essential)")
    return next(work.glob("pycuda-*.whl"))


def unpack_source(archive: Path, folder: Path) -> None:
    """The regular files of an archive. Old Pythons' tarfile (Debian 12's) has no filter to keep them in `folder`."""
    with tarfile.open(archive) as members:
        for member in members:
            target = (folder / member.name).resolve()
            if not target.is_relative_to(folder.resolve()):
                raise GpuCheckError(f"{member.name} in {archive.name}", f"files within {folder}", "do not trust it")
            content = members.extractfile(member) if member.isfile() else None
            if content is not None:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content.read())


def _shown(what: str, command: list[str], work: Path, remedy: str = "see the lines above") -> None:
    """Runs a command silently but for a sign of life; raises GpuCheckError after the end of its output."""
    started = printed_s = time.monotonic()
    print(f"  {what}", end="", flush=True)
    with (work / "log").open("w+b") as log:
        running = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=work)
        while running.poll() is None:
            time.sleep(0.2)
            if time.monotonic() - printed_s >= _TICK_S:
                printed_s = time.monotonic()
                print(".", end="", flush=True)
        print(f" ({time.monotonic() - started:.0f} s)", flush=True)
        if running.returncode != 0:
            log.seek(0)
            print(log.read().decode(errors="replace")[-3000:], file=sys.stderr)
            raise GpuCheckError(f"exit code {running.returncode} from {what!r}", "0", remedy)


def _report(output: Path) -> None:
    sizes = {path: path.stat().st_size for path in sorted(output.iterdir())}
    for path, size in sizes.items():
        print(f"{size / 1000:8.0f} kB  {path.name}")
    total = sum(sizes.values())
    print(f"{total / 1000:8.0f} kB  in {os.path.relpath(output)}")
    if total > LIMIT_BYTES:
        raise GpuCheckError(
            f"{total} bytes in {output}",
            f"at most {LIMIT_BYTES}",
            "drop what the GPU tests do not need from TEST_TOOLS",
        )


if __name__ == "__main__":
    sys.exit(main())
