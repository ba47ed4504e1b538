"""What benchmarks/gpu_histogram.py found, as lines and as a block for RESULTS.md, with the bars it has to reach."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

COPY_SHARE_BAR = 0.85  # of the copy bandwidth, at 4096 bins of float32
SEARCH_BAR_MS = 1.0  # for 200 tensors on a data-centre GPU
BAR_BITS = 12
DATA_CENTRE_MULTIPROCESSORS = 64  # the largest Jetson has 20, an A100 108


@dataclass(frozen=True)
class Row:
    """One measured case. peers: GB/s by name, or why there is none. equal: to abs_histogram, in every launch."""

    tensors: str
    dtype: str
    data: str
    bits: int
    read_gbps: float
    copy_gbps: float
    collect_ms: float
    peers: dict[str, float | str]
    equal: bool

    @property
    def copy_share(self) -> float:
        return self.read_gbps / self.copy_gbps

    def line(self) -> str:
        case = f"{self.tensors:<22} {self.dtype:<8} {self.data:<7} {1 << self.bits:>5} bins"
        peers = "  ".join(f"{name} {_figure(found)}" for name, found in self.peers.items())
        speed = f"{self.read_gbps:6.0f} GB/s read, {self.copy_share:4.0%} of the copy's {self.copy_gbps:.0f} GB/s"
        return f"{case}  {speed}  {peers}  {'equal' if self.equal else 'WRONG COUNTS'}"


@dataclass(frozen=True)
class Search:
    """The entropy search of all tensors: on the device, and as the caller waits for it."""

    tensors: int
    device_ms: float
    call_ms: float
    equal: bool

    def line(self) -> str:
        verdict = "equal" if self.equal else "WRONG THRESHOLDS"
        return (
            f"entropy search of {self.tensors} tensors: {self.device_ms:.3f} ms on the device, "
            f"{self.call_ms:.3f} ms with transfers and waiting, {verdict}"
        )


@dataclass(frozen=True)
class Bar:
    """reached None: it does not apply to this GPU."""

    name: str
    value: str
    reached: bool | None

    def line(self) -> str:
        return f"{ {True: 'pass', False: 'FAIL', None: 'n/a '}[self.reached] }  {self.name}: {self.value}"


def bars(rows: Sequence[Row], search: Search, multiprocessors: int) -> Iterator[Bar]:
    for row in rows:
        if row.bits == BAR_BITS and row.dtype == np.dtype(np.float32).name:
            name = f"{row.tensors}, {row.data}: at least {COPY_SHARE_BAR:.0%} of the copy bandwidth"
            yield Bar(name, f"{row.copy_share:.1%}", row.copy_share >= COPY_SHARE_BAR)
    large = multiprocessors >= DATA_CENTRE_MULTIPROCESSORS
    name = f"entropy search of {search.tensors} tensors: at most {SEARCH_BAR_MS} ms on a data-centre GPU"
    yield Bar(name, f"{search.device_ms:.3f} ms", search.device_ms <= SEARCH_BAR_MS if large else None)
    wrong = sum(not row.equal for row in rows) + (not search.equal)
    yield Bar("every result equals NumPy's", f"{wrong} of {len(rows) + 1} differ", wrong == 0)


def markdown(device: str, rows: Sequence[Row], search: Search, judged: Sequence[Bar]) -> str:
    """A section for RESULTS.md; the commit has to be added by who pastes it."""
    peers = list(rows[0].peers) if rows else []
    header = ["tensors", "type", "data", "bins", "read, GB/s", "of the copy", *(f"{p}, GB/s" for p in peers)]
    table = [[*header, "whole `collect`, ms", "equal"], ["---"] * (len(header) + 2)]
    for row in rows:
        speeds = [f"{row.read_gbps:.0f}", f"{row.copy_share:.0%} of {row.copy_gbps:.0f}"]
        found = [_figure(value) for value in row.peers.values()]
        end = [f"{row.collect_ms:.3f}", "yes" if row.equal else "NO"]
        table.append([row.tensors, row.dtype, row.data, str(1 << row.bits), *speeds, *found, *end])
    lines = ["## Histograms of |x| on a GPU", ""]
    lines += [f"`python -m benchmarks.gpu_histogram` · {device} · {datetime.date.today()}", ""]
    lines += [f"| {' | '.join(cells)} |" for cells in table]
    lines += [
        "",
        "Bytes read by the kernel per second, against bytes read *and* written per second by a device-to-device copy",
    ]
    lines += ["of the same memory in the same rounds (so 100 % is all the memory can do); medians, by CUDA events."]
    lines += ["CuPy and PyTorch count |x| into the same bins, tensor by tensor; their bytes are counted likewise.", ""]
    lines += [search.line().capitalize() + ".", ""]
    lines += [f"- {bar.line()}" for bar in judged]
    return "\n".join(lines)


def _figure(found: float | str) -> str:
    return found if isinstance(found, str) else f"{found:.1f}"
