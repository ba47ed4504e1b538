"""`make wheelhouse` and `make gpu-check` as far as they go without a GPU."""

from __future__ import annotations

import ctypes
import io
import os
import platform
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from brokers import eventually
from gpu.check import FAILED, PASSED, TIMED_OUT, Step, gpu_tests, run_shown, run_steps
from gpu.environment import DRIVER, ROOT, fits, unpack
from gpu.errors import GpuCheckError
from gpu.stub_libcuda import build_stub, find_toolkit
from gpu.wheelhouse import unpack_source
from places import TEST_PATH

WHEELHOUSE = ROOT / "wheelhouse"
TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"
MACHINE = platform.machine()


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stub driver library."""
    try:
        toolkit = find_toolkit()
    except GpuCheckError as error:
        pytest.skip(str(error))
    return build_stub(toolkit, tmp_path_factory.mktemp("stub")).parent


def run_check(libraries: Path, folder: Path, wheelhouse: Path = WHEELHOUSE) -> subprocess.CompletedProcess[str]:
    """`make gpu-check` with `libraries` before the machine's own, and without the network."""
    command = [sys.executable, "-m", "gpu.check", "--out", str(folder / "out"), "--site", str(folder / "site")]
    command += ["--wheelhouse", str(wheelhouse)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "tests"),
        "LD_LIBRARY_PATH": str(libraries),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": "",
    }
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def has_driver() -> bool:
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return False
    return True


@pytest.mark.skipif(has_driver(), reason="this machine has an NVIDIA driver")
def test_a_machine_without_a_driver_is_refused_at_once(tmp_path: Path) -> None:
    done = run_check(tmp_path, tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("gpu-check: found no NVIDIA driver")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "site").exists(), "nothing is installed before the driver is there"


@pytest.mark.slow
@pytest.mark.skipif(
    not list(WHEELHOUSE.glob(f"pycuda-*-{TAG}-*_{MACHINE}.whl")),
    reason=f"wheelhouse/ holds no PyCUDA for {TAG}: `make wheelhouse`",
)
def test_the_check_runs_up_to_the_missing_device(stub: Path, tmp_path: Path) -> None:
    done = run_check(stub, tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "no CUDA-capable device is detected" in done.stderr
    assert done.stderr.count("\n") == 1
    assert (tmp_path / "site/pycuda/driver.py").is_file(), "the wheels were unpacked, and pycuda.driver imported"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("wheel", "fit"),
    [
        ("iniconfig-2.3.1-py3-none-any.whl", True),
        (f"siphash24-1.9-{TAG}-{TAG}-manylinux2014_{MACHINE}.manylinux_2_17_{MACHINE}.whl", True),
        (f"pycuda-2026.1-{TAG}-{TAG}-linux_{MACHINE}.whl", True),
        (f"x-1-cp310-abi3-linux_{MACHINE}.whl", True),
        (f"x-1-cp3{sys.version_info.minor + 1}-abi3-linux_{MACHINE}.whl", False),
        (f"pycuda-2026.1-cp39-cp39-linux_{MACHINE}.whl", False),
        (f"pycuda-2026.1-{TAG}-{TAG}-linux_riscv64.whl", False),
    ],
)
def test_wheels_fit_one_python_and_one_processor(wheel: str, fit: bool) -> None:
    assert fits(wheel) is fit


def test_another_pythons_wheelhouse_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / f"pycuda-2026.1-cp39-cp39-linux_{MACHINE}.whl"
    wheel.touch()
    with pytest.raises(GpuCheckError, match=r"found pycuda-.* expected wheels for Python .*make wheelhouse PYTHON="):
        unpack([wheel], tmp_path / "site")


def test_every_step_runs_and_one_failure_fails_the_check(tmp_path: Path) -> None:
    python = sys.executable
    good = Step("good", (python, "-c", "print('measured')"))
    bad = Step("bad", (python, "-c", "raise SystemExit(3)"))
    lacking = Step("lacking", (), lacking="a tool")
    assert run_steps([bad, good, lacking], dict(os.environ), tmp_path) == FAILED
    assert (tmp_path / "good.txt").read_text() == "measured\n"
    bad_line, good_line, lacking_line = (tmp_path / "summary.txt").read_text().splitlines()
    assert "FAILED, exit code 3" in bad_line
    assert "passed" in good_line
    assert "not run: a tool is not installed" in lacking_line
    assert run_steps([good, lacking], dict(os.environ), tmp_path) == PASSED


HANGING = 'echo on; sleep 600 & echo $! > "$0"; wait'  # as compute-sanitizer does, in a child with the same output


def runs(pid: int) -> bool:
    """Return whether this process runs; one that waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def test_a_step_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    command = ("sh", "-c", HANGING, str(tmp_path / "pid"))
    assert run_shown(command, dict(os.environ), tmp_path / "log", limit_s=5.0) == TIMED_OUT
    assert (tmp_path / "log").read_text() == "on\n"
    eventually(lambda: not runs(int((tmp_path / "pid").read_text())))


def test_processes_of_a_step_end_with_it(tmp_path: Path) -> None:
    leaving = 'sleep 600 >/dev/null 2>&1 & echo $! > "$0"'
    assert run_shown(("sh", "-c", leaving, str(tmp_path / "pid")), dict(os.environ), tmp_path / "log", 30.0) == 0
    eventually(lambda: not runs(int((tmp_path / "pid").read_text())))


CHECK = (
    "import os, pathlib, sys; from gpu.check import exit_on_signals, run_shown; exit_on_signals()\n"
    "run_shown(('sh', '-c', *sys.argv[1:3]), dict(os.environ), pathlib.Path(sys.argv[3]), 50.0)"
)


def checking(folder: Path, step: str) -> subprocess.Popen[bytes]:
    """A check with one step, a shell command that writes a process id to $0."""
    command = [sys.executable, "-c", CHECK, step, str(folder / "pid"), str(folder / "log")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def test_ending_the_check_ends_its_step(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    with checking(tmp_path, HANGING) as check:
        eventually(lambda: pid.exists() and pid.read_text().endswith("\n"))
        assert runs(int(pid.read_text()))
        check.send_signal(signal.SIGTERM)
        assert check.wait(60) != 0
    eventually(lambda: not runs(int(pid.read_text())))


def test_a_step_that_has_only_just_begun_is_ended_too(tmp_path: Path) -> None:
    """The signal comes while the check may still be starting it; it did not always end the step."""
    with checking(tmp_path, 'echo $$ > "$0"; kill -TERM $PPID; sleep 60') as check:
        assert check.wait(60) != 0
    eventually(lambda: not runs(int((tmp_path / "pid").read_text())))


def test_the_gpu_tests_import_no_more_than_the_wheelhouse_brings() -> None:
    paths = [Path(path) for path in gpu_tests(ROOT / "tests")]
    code = (
        "import sys, numpy, pcodec, pytest, pytest_timeout; known = set(sys.modules)\n"
        f"import {', '.join(path.stem for path in paths)}\n"
        "new = [m for name, m in sys.modules.items() if name not in known and name.partition('.')[0] != 'numpy']\n"
        "print(*(m.__name__ for m in new if 'site-packages' in (getattr(m, '__file__', None) or '')))"
    )
    folders = sorted({str(path.parent) for path in paths})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((TEST_PATH, *folders))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def archive(path: Path, name: str, kind: bytes = tarfile.REGTYPE) -> Path:
    """A source archive of one member."""
    with tarfile.open(path, "w:gz") as members:
        member = tarfile.TarInfo(name)
        member.type, member.size, member.linkname = kind, 4 if kind == tarfile.REGTYPE else 0, "/etc/passwd"
        members.addfile(member, io.BytesIO(b"text"))
    return path


def test_sources_are_unpacked_without_tarfile_s_filter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tarfile.TarFile, "extractall", lambda _archive, _path: None)  # Python 3.11.2 knows no filter
    unpack_source(archive(tmp_path / "good.tar.gz", "pycuda-1/src/file.py"), tmp_path / "to")
    assert (tmp_path / "to/pycuda-1/src/file.py").read_text() == "text"
    unpack_source(archive(tmp_path / "link.tar.gz", "pycuda-1/link", tarfile.SYMTYPE), tmp_path / "to")
    assert not (tmp_path / "to/pycuda-1/link").is_symlink()


@pytest.mark.parametrize("name", ["../out", "/tmp/kept/out", "a/../../out"])
def test_sources_stay_in_their_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(GpuCheckError, match=r"found .*out in bad\.tar\.gz"):
        unpack_source(archive(tmp_path / "bad.tar.gz", name), tmp_path / "to")
    assert not (tmp_path / "out").exists()
