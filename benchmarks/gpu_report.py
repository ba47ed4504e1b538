"""What benchmarks/gpu_histogram.py found, as lines and as a block for RESULTS.md, with the bars it has to reach."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.gpu_timing import Speed

COPY_SHARE_BAR = 0.85  # share of the copy bandwidth, at 4096 bins of float32
SEARCH_BAR_MS = 1.0  # for 200 tensors of 4096 bins on a data-centre GPU
BAR_BITS = 12
NOTES = """
Bytes read by the kernel per second, against bytes read *and* written per second by a device-to-device copy of the same
memory in the same rounds (so 100 % is all the memory can do); medians, by CUDA events, with the host ahead of the GPU.
CuPy and PyTorch count |x| into the same bins, tensor by tensor; their bytes are counted likewise. * marks a figure that
the host's pace is part of, because no wait in front was long enough for it to queue all calls. Beside such a figure
belongs our `collect`: the whole call by the wall clock, with the counts' download and their folding on the CPU.
"""


@dataclass(frozen=True)
class Row:
    """One measured case. peers: speed by name, or why there is none. equal: to abs_histogram, in every launch."""

    tensors: str
    dtype: str
    data: str
    bits: int
    read: Speed
    copy: Speed
    collect_ms: float
    collect: Speed
    peers: Mapping[str, Speed | str]
    equal: bool

    @property
    def copy_share(self) -> float:
        return self.read.gbps / self.copy.gbps

    def line(self) -> str:
        case = f"{self.tensors:<22} {self.dtype:<8} {self.data:<7} {1 << self.bits:>5} bins"
        peers = "  ".join(f"{name} {_figure(found)}" for name, found in self.peers.items())
        speed = f"{self.read.text():>6} GB/s read, {self.copy_share:4.0%} of the copy's {self.copy.text()} GB/s"
        whole = f"collect {self.collect.text()} GB/s"
        return f"{case}  {speed}  {whole}  {peers}  {'equal' if self.equal else 'WRONG COUNTS'}"


@dataclass(frozen=True)
class Search:
    """The entropy search of all tensors.

    kernel_ms: the kernel alone, by CUDA events. call_ms: search_entropy as its caller waits for it. windows_ms: what
    the caller has to do before, entropy_window of each histogram on the CPU.
    """

    tensors: int
    bits: int
    kernel_ms: float
    call_ms: float
    windows_ms: float
    equal: bool

    def line(self) -> str:
        verdict = "equal" if self.equal else "WRONG THRESHOLDS"
        return (
            f"entropy search of {self.tensors} tensors of {1 << self.bits} bins: {self.kernel_ms:.3f} ms the kernel "
            f"alone, {self.call_ms:.3f} ms the whole call with uploads, downloads and waiting; before it "
            f"{self.windows_ms:.1f} ms for the windows, on the CPU; {verdict}"
        )


@dataclass(frozen=True)
class Bar:
    """reached None: it does not apply to this GPU or this run."""

    name: str
    value: str
    reached: bool | None
    is_speed: bool = True

    def line(self) -> str:
        return f"{ {True: 'pass', False: 'FAIL', None: 'n/a '}[self.reached] }  {self.name}: {self.value}"


def bars(rows: Sequence[Row], search: Search, data_centre: bool) -> Iterator[Bar]:
    for row in rows:
        if row.bits == BAR_BITS and row.dtype == np.dtype(np.float32).name:
            name = f"{row.tensors}, {row.data}: at least {COPY_SHARE_BAR:.0%} of the copy bandwidth"
            reached = row.copy_share >= COPY_SHARE_BAR if row.read.ahead and row.copy.ahead else None
            yield Bar(name, f"{row.copy_share:.1%}", reached)
    applies = data_centre and search.bits == BAR_BITS
    limit = f"at most {SEARCH_BAR_MS:g} ms for {1 << BAR_BITS} bins on a data-centre GPU (float64 at half speed)"
    measured = {"the kernel alone": search.kernel_ms, "the whole call, without the windows": search.call_ms}
    for what, milliseconds in measured.items():
        name = f"entropy search of {search.tensors} tensors, {what}: {limit}"
        yield Bar(name, f"{milliseconds:.3f} ms", milliseconds <= SEARCH_BAR_MS if applies else None)
    wrong = sum(not row.equal for row in rows) + (not search.equal)
    yield Bar("every result equals NumPy's", f"{wrong} of {len(rows) + 1} differ", wrong == 0, is_speed=False)


def no_speed_judged(judged: Sequence[Bar]) -> bool:
    return all(bar.reached is None for bar in judged if bar.is_speed)


def markdown(device: str, rows: Sequence[Row], search: Search, judged: Sequence[Bar]) -> str:
    """A section for RESULTS.md; the commit has to be added by who pastes it."""
    peers = list(rows[0].peers) if rows else []
    header = ["tensors", "type", "data", "bins", "read, GB/s", "of the copy", *(f"{p}, GB/s" for p in peers)]
    header += ["`collect`, GB/s", "ms", "equal"]
    table = [header, ["---"] * len(header)]
    for row in rows:
        speeds = [row.read.text(), f"{row.copy_share:.0%} of {row.copy.text()}"]
        found = [_figure(value) for value in row.peers.values()]
        end = [row.collect.text(), f"{row.collect_ms:.3f}", "yes" if row.equal else "NO"]
        table.append([row.tensors, row.dtype, row.data, str(1 << row.bits), *speeds, *found, *end])
    lines = ["## Histograms of |x| on a GPU", ""]
    lines += [f"`python -m benchmarks.gpu_histogram` · {device} · {datetime.date.today()}", ""]
    lines += [f"| {' | '.join(cells)} |" for cells in table]
    lines += [NOTES, search.line().capitalize() + ".", ""]
    lines += [f"- {bar.line()}" for bar in judged]
    return "\n".join(lines)


def _figure(found: Speed | str) -> str:
    return found if isinstance(found, str) else found.text(digits=1)
