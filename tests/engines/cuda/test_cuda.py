"""engines/cuda/gpu.py without a GPU: what it asks of PyCUDA, and what it says when something is missing."""

from __future__ import annotations

import importlib.util
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from fake_pycuda import ORIN, T4, CompileError, Error, FakePycuda, MemoryError_
from fiber_executor import COMPILER

from calibrate.histogram import abs_histogram
from engines.cuda.gpu import Gpu
from engines.cuda.kernels import CudaExecutor, DeviceHistograms, KernelGeometry, search_entropy
from engines.errors import DeviceError

SMALL = KernelGeometry(11, 2, 128)


@pytest.fixture
def pycuda(monkeypatch: pytest.MonkeyPatch) -> FakePycuda:
    if COMPILER is None:
        pytest.skip("no C++ compiler to build kernels.cu for the CPU: install g++, or set CXX")
    fake = FakePycuda()
    fake.install(monkeypatch)
    return fake


def test_histograms_are_counted_on_the_caller_s_stream(pycuda: FakePycuda) -> None:
    gpu = Gpu()
    stream = gpu.stream()
    arrays = [np.random.default_rng(0).normal(0.0, 3.0, n).astype(np.float16) for n in (3000, 17)]
    with gpu.current():
        executor = CudaExecutor(gpu, SMALL)
        pycuda.calls.clear()
        buffers = [executor.upload(x, stream) for x in arrays]
        histograms = DeviceHistograms(executor, [x.size for x in arrays], [x.dtype for x in arrays])
        found = histograms.collect([buffer.address for buffer in buffers], stream)
        counts = np.stack([histogram.counts for histogram in found])
        search_entropy(executor, counts, np.array([[128, 2048]] * 2, np.int32), stream)
        assert {on for name, on in pycuda.calls if name != "mem_alloc"} == {stream}
        del buffers
        executor.close()
    gpu.close()
    for histogram, x in zip(found, arrays, strict=True):
        np.testing.assert_array_equal(histogram.counts, abs_histogram(x, SMALL.bits).counts)
    names = pycuda.names()
    assert names.index("memcpy_dtoh_async") < names.index("synchronize")
    assert (pycuda.depth, stream.handle, pycuda.attributes) == (0, 77, {})
    assert pycuda.alive == {}


def test_a_stream_does_not_wait_for_the_default_one(pycuda: FakePycuda) -> None:
    Gpu().stream()
    assert ("stream", 1) in pycuda.calls


def test_memory_comes_back_from_anywhere_and_is_used_again(pycuda: FakePycuda) -> None:
    gpu = Gpu()
    with gpu.current():
        executor = CudaExecutor(gpu, SMALL)
        kept = [executor.empty((1000,), np.float32)]
        address = kept[0].address
    pycuda.calls.clear()
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join()
    assert pycuda.calls == []  # PyCUDA itself would leak here, or end the process
    with gpu.current():
        again, another = executor.empty((990,), np.float32), executor.empty((990,), np.float32)
        assert again.address == address != another.address
        assert pycuda.names().count("mem_alloc") == 1


def test_a_full_gpu_gets_back_what_is_kept(pycuda: FakePycuda) -> None:
    gpu = Gpu()
    with gpu.current():
        executor = CudaExecutor(gpu, SMALL)
        executor.empty((1000,), np.float32)
        assert len(pycuda.alive) == 1
        pycuda.fail["mem_alloc"] = MemoryError_("cuMemAlloc failed: out of memory")
        with pytest.raises(DeviceError, match=r"cuda\.memory"):
            executor.empty((5000,), np.float32)
        assert pycuda.alive == {}
        assert pycuda.names()[-3:] == ["mem_alloc", "free", "mem_alloc"]


def test_a_remark_of_nvcc_is_no_error(pycuda: FakePycuda) -> None:
    pycuda.chatter = "nvcc warning : Support for offline compilation for architectures prior to ..."
    count_something(SMALL)
    assert "abs_histogram" in pycuda.names()


@pytest.mark.parametrize(
    ("board", "geometry", "histogram", "search"),
    [
        (ORIN, KernelGeometry(), 16 * 3, 16 * 3),  # threads, registers
        (ORIN, KernelGeometry(12, 2, 1024), 16, 16),
        (ORIN, KernelGeometry(13), 16 * 2, 16),  # shared memory, of which 1 KiB goes with every block
        (T4, KernelGeometry(), 40 * 2, 40),
        (T4, KernelGeometry(13), 40, 0),
    ],
    ids=str,
)
def test_blocks_that_run_at_once(
    monkeypatch: pytest.MonkeyPatch, board: dict[str, int], geometry: KernelGeometry, histogram: int, search: int
) -> None:
    if COMPILER is None:
        pytest.skip("no C++ compiler to build kernels.cu for the CPU: install g++, or set CXX")
    FakePycuda(board=board).install(monkeypatch)
    gpu = Gpu()
    with gpu.current():
        executor = CudaExecutor(gpu, geometry)
        assert [executor.resident_blocks(name) for name in ("abs_histogram", "entropy_search")] == [histogram, search]
        if search == 0:
            with pytest.raises(DeviceError, match=r"cuda\.kernel: at most 65536 bytes.*expected 86032 for one of ent"):
                search_entropy(executor, np.ones((1, geometry.bins), np.int64), np.full((1, 2), 200, np.int32))


def test_more_than_48_kib_of_shared_memory_is_asked_for(pycuda: FakePycuda) -> None:
    gpu = Gpu()
    with gpu.current():
        CudaExecutor(gpu, KernelGeometry(13, 2, 128))
    needed = KernelGeometry(13, 2, 128).shared_bytes()
    assert pycuda.attributes == {kernel: nbytes for kernel, nbytes in needed.items() if nbytes > 48 << 10}
    assert len(pycuda.attributes) == 2


@pytest.mark.parametrize(
    ("call", "error", "code"),
    [
        ("init", Error("cuInit failed: no CUDA-capable device is detected"), "cuda.device"),
        ("compile", OSError("error invoking 'nvcc --version': No such file"), "cuda.compiler"),
        ("compile", CompileError("nvcc compilation of kernel.cu failed\n[stderr: ...]"), "cuda.compiler"),
        ("compile", Error("cuModuleLoadDataEx failed: an illegal memory access was encountered"), "cuda.launch"),
        ("set_attribute", Error("cuFuncSetAttribute failed: invalid argument"), "cuda.launch"),
        ("push", Error("cuCtxPushCurrent failed: an illegal memory access was encountered"), "cuda.launch"),
        ("pop", Error("cuCtxPopCurrent failed: an illegal memory access was encountered"), "cuda.launch"),
        ("mem_alloc", MemoryError_("cuMemAlloc failed: out of memory"), "cuda.memory"),
        ("mem_alloc", Error("cuMemAlloc failed: an illegal memory access was encountered"), "cuda.launch"),
        ("memset_d8_async", Error("cuMemsetD8Async failed: an illegal memory access was encountered"), "cuda.launch"),
        ("memcpy_htod_async", Error("cuMemcpyHtoDAsync failed: illegal memory access"), "cuda.launch"),
        ("abs_histogram", Error("cuLaunchKernel failed: too many resources requested for launch"), "cuda.launch"),
        (
            "memcpy_dtoh_async",
            Error("cuMemcpyDtoHAsync failed: an illegal memory access was encountered"),
            "cuda.launch",
        ),
    ],
)
def test_failures_name_code_cause_and_remedy(pycuda: FakePycuda, call: str, error: Exception, code: str) -> None:
    pycuda.fail[call] = error
    with pytest.raises(DeviceError) as raised:
        count_something(KernelGeometry(13, 2, 128))
    assert raised.value.code == code
    assert raised.value.found == str(error).partition("\n")[0]
    assert raised.value.expected
    assert raised.value.remedy
    assert raised.value.__cause__ is error
    assert pycuda.depth == 0


def test_a_fault_is_not_covered_by_what_comes_after_it(pycuda: FakePycuda) -> None:
    pycuda.fail = {name: Error(f"{name} failed") for name in ("memcpy_dtoh_async", "pop")}
    with pytest.raises(DeviceError, match=r"cuda\.launch: memcpy_dtoh_async failed"):
        count_something(SMALL)
    assert pycuda.detached == 1  # else PyCUDA aborts the process at its end


def test_a_closed_gpu_is_refused(pycuda: FakePycuda) -> None:
    gpu = Gpu()
    gpu.close()
    gpu.close()
    assert pycuda.detached == 1
    with pytest.raises(DeviceError, match=r"cuda\.device: a call to a closed Gpu"), gpu.current():
        raise AssertionError


def count_something(geometry: KernelGeometry) -> None:
    gpu = Gpu()
    with gpu.current():
        executor = CudaExecutor(gpu, geometry)
        buffer = executor.upload(np.ones(64, np.float32), None)
        DeviceHistograms(executor, [64], [np.dtype(np.float32)]).collect([buffer.address])


def test_no_pycuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(DeviceError, match=r"cuda\.pycuda: no PyCUDA.*pip install '.\[jetson\]'"):
        Gpu()


def test_no_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FakePycuda().install(monkeypatch)  # so that what the next lines import is taken away again
    for name in ("pycuda", "pycuda.driver"):
        monkeypatch.delitem(sys.modules, name)
    package = tmp_path / "pycuda"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "driver.py").write_text("raise ImportError('libcuda.so.1: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DeviceError, match=r"cuda\.driver: libcuda\.so\.1: cannot open.*install the driver"):
        Gpu()
