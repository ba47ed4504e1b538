"""kernels.cu under ThreadSanitizer and AddressSanitizer, and in shuffled orders, on the CPU: `make sanitize`.

    python tests/support/sanitize.py [SOURCE.cu]     exit code 1 on any report, wrong number or refused launch

`run` is one such run, in a process of its own with the sanitizer preloaded: a bug may well take it down.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import cast

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [
    str(ROOT),
    str(ROOT / "tests/fakes"),
]  # this module is run as a file, too

import numpy as np  # noqa: E402  found through sys.path
from fiber_executor import COMPILER, FiberExecutor, build, sanitizer_runtime  # noqa: E402  found through sys.path
from kernel_reference import divergences, extremes, histograms, preprocessed, tensors, transforms  # noqa: E402  found through sys.path

from calibrate.histogram import abs_histogram  # noqa: E402  found through sys.path
from engines.cuda.kernels import (  # noqa: E402  found through sys.path
    CudaExecutor,
    DeviceHistograms,
    DevicePreprocess,
    KernelGeometry,
    kernel_source,
    search_entropy,
)
from engines.errors import DeviceError  # noqa: E402  found through sys.path

GEOMETRY = KernelGeometry(11, 2, 64)  # few threads: sanitised fibers are slow
CHECKS = (("", 0), ("", 7), ("", 11), ("thread", 0), ("thread", 7), ("address", 0))  # sanitizer, seed of the order
_REPORTS = ("WARNING: ThreadSanitizer: ", "ERROR: AddressSanitizer: ")
_OPTIONS = {
    "TSAN_OPTIONS": "halt_on_error=1 exitcode=66",
    "ASAN_OPTIONS": "detect_leaks=0",  # of the interpreter's
    "OPENBLAS_NUM_THREADS": "1",
}
_ASLR_TROUBLE = "unexpected memory mapping"  # old ThreadSanitizers on kernels that randomise addresses a lot
_LIMIT_S = 120


def run(source: str, sanitizer: str, seed: int) -> str:
    """The fault that this check finds in the kernels of this text; empty without one."""
    build(GEOMETRY, source, sanitizer)  # here, so that the compiler runs unsanitised
    environment = {**os.environ, **_OPTIONS}
    if sanitizer:
        environment["LD_PRELOAD"] = str(sanitizer_runtime(sanitizer))
    command = [sys.executable, __file__, "--trial", sanitizer, str(seed)]
    code, output = _output(command, source, environment)
    if _ASLR_TROUBLE in output:
        setarch = shutil.which("setarch")
        if setarch is None:
            return "ThreadSanitizer cannot run under this kernel's address randomisation: install util-linux's setarch"
        code, output = _output([setarch, "--addr-no-randomize", *command], source, environment)
    for report in _REPORTS:
        if report in output:
            return report[report.index(" ") + 1 :] + output.partition(report)[2].partition("\n")[0]
    last = output.strip().rpartition("\n")[-1]
    if code == 0 and last == "right":
        return ""
    return last or f"died with exit code {code}"


def _output(command: list[str], source: str, environment: dict[str, str]) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command, input=source, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=_LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 124, f"no end after {_LIMIT_S} s"
    return done.returncode, done.stdout


def trial(executor: FiberExecutor) -> str:
    """'right', or what is wrong: the kernels over data that reaches every branch, against NumPy."""
    rng = np.random.default_rng(0)
    arrays = [
        values.astype(dtype)
        for size, dtype in ((5, "float32"), (1501, "float32"), (3001, "float16"))
        for kind, values in tensors(rng, size).items()
        if kind in ("normal", "broken", "small")
    ]
    arrays.append(extremes())
    buffers = [executor.upload(x) for x in arrays]
    try:
        counted = DeviceHistograms(cast(CudaExecutor, executor), [x.size for x in arrays], [x.dtype for x in arrays])
        for _ in range(2):
            for x, found in zip(arrays, counted.collect([buffer.address for buffer in buffers]), strict=True):
                wanted = abs_histogram(x, GEOMETRY.bits)
                if not (found.counts == wanted.counts).all():
                    return f"wrong: {np.abs(found.counts - wanted.counts).sum()} counts of a histogram"
                if (found.amax, found.zeros, found.nonfinite) != (wanted.amax, wanted.zeros, wanted.nonfinite):
                    return "wrong: amax, zeros or non-finite values"
        return _entropy_trial(executor, rng) or _preprocessing_trial(executor, rng) or "right"
    except DeviceError as error:
        return f"refused: {error.found}"


def _entropy_trial(executor: FiberExecutor, rng: np.random.Generator) -> str:
    rows = np.stack([row for name, row in histograms(rng, GEOMETRY.bins).items() if name in ("normal 0.1", "relu")])
    windows = [(300, 700), (0, GEOMETRY.bins)]
    curves = np.zeros((len(rows), GEOMETRY.bins + 1))
    chosen = search_entropy(cast(CudaExecutor, executor), rows, np.array(windows, np.int32), None, curves)
    for row, window, curve, bins in zip(rows, windows, curves, chosen, strict=True):
        wanted = divergences(row, window, GEOMETRY.threads)
        if not (curve.view(np.uint64) == wanted.view(np.uint64)).all():
            return "wrong: a divergence"
        if bins != np.flatnonzero(wanted <= wanted.min() + 1e-13)[-1]:
            return "wrong: the bins to keep"
    return ""


def _preprocessing_trial(executor: FiberExecutor, rng: np.random.Generator) -> str:
    preprocess = DevicePreprocess(cast(CudaExecutor, executor))
    for transform in transforms(rng, 24, 24):
        rows = rng.integers(0, 256, (transform.frame_height, transform.frame_width + 3, 3), np.uint8)
        frame = rows[:, : transform.frame_width]
        wanted = preprocessed(transform, frame)
        lying = executor.upload(rows.reshape(-1)[: rows.size - 9])  # the last row ends with its last pixel
        made = executor.empty(transform.input_shape, transform.dtype)
        preprocess.run(transform, lying.address, made.address, row_bytes=rows.strides[0])
        if executor.download(made).tobytes() != wanted.tobytes():
            return "wrong: a network input"
    return ""


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--trial"]:
        sanitizer, number = arguments[1:]
        executor = FiberExecutor(GEOMETRY, sys.stdin.read(), int(number), sanitizer, resident=24)
        print(trial(executor), flush=True)
        return 0
    if COMPILER is None:
        print("no C++ compiler: install g++, or set CXX", file=sys.stderr)
        return 2
    source = Path(arguments[0]).read_text() if arguments else kernel_source()
    failed = False
    for sanitizer, seed in CHECKS:
        found = run(source, sanitizer, seed)
        failed |= bool(found)
        print(f"{sanitizer or 'plain':8} seed {seed:<3} {found or 'clean'}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
