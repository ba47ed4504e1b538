"""Histograms of a fleet merged: decoded counts a second, memory, and the bits of one machine that saw it all.

    python -m benchmarks.merge [--boards 10000] [--tensors 100] [--histograms FILE.npz] [--markdown | --json]

As many boards as are asked for, each with its own order of magnitude of counts and its own range, drawn from a pool of
64 uploads, so that the machine need not make a million histograms first. A gigabyte is of decoded counts: 4096 bins of
8 bytes for each tensor. Encodings are compared on histograms of 100 thousand to 10 million values, or on a file of
them, such as a calibration.npz. One process, one thread, CPU time: other work on the machine is none of its own.
"""

from __future__ import annotations

import argparse
import lzma
import resource
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agent.contract.histograms import Facts, read_upload, write_upload
from benchmarks.report import Section, add_output_option, at_least, bars_section, publish
from calibrate.histogram import AbsHistogram, abs_histogram, from_bytes, merge_all, to_bytes
from engines.calibration import load_histograms
from fleet.merge.calibration import Merger
from fleet.merge.outliers import Group, Sketch

BINS = 4096
POOL = 64
FACTS = Facts(model="ab" * 32, observed="0" * 16, method="entropy", frames=512)
_LZMA = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 16, "lc": 0, "lp": 0, "pb": 0}]


@dataclass
class Merged:
    """seconds: of the merge alone. rss_bytes: resident, after a hundredth of the boards and at the end."""

    seconds: float
    decoded_bytes: int
    rss_bytes: tuple[int, int]
    equal: bool

    @property
    def gb_per_s(self) -> float:
        return self.decoded_bytes / self.seconds / 1e9


def board(rng: np.random.Generator, tensors: int) -> dict[str, AbsHistogram]:
    """Normal, Laplace and rectified data, in the board's own light, of many frames."""
    light, found = rng.uniform(0.3, 3.0), {}
    for number in range(tensors):
        x = [rng.normal, rng.laplace][number % 2](size=100_000) * light
        one = abs_histogram((np.maximum(x, 0.0) if number % 3 == 0 else x).astype(np.float32))
        counts = rng.poisson(one.counts * 10.0 ** rng.uniform(0.0, 2.0)) * (one.counts > 0)
        counts[np.flatnonzero(one.counts)[-1]] += 1
        found[f"/backbone/stage{number}/conv"] = AbsHistogram(counts, one.range_exp, one.amax, 0, 0)
    return found


def merge(uploads: Sequence[bytes], order: NDArray[np.int64], boards: Sequence[Mapping[str, AbsHistogram]]) -> Merged:
    """Stream them all, and hold the sum against each of the pool as often as it came."""
    merger, early = Merger(), 0
    began_s = time.process_time()
    for number, which in enumerate(order):
        merger.add(read_upload(uploads[which]))
        if number == len(order) // 100:
            early = resident_bytes()
    seconds = time.process_time() - began_s
    late = resident_bytes()
    times = np.bincount(order, minlength=len(uploads))
    expected = {
        tensor: merge_all(
            repeated(each[tensor], int(count)) for each, count in zip(boards, times, strict=True) if count
        )
        for tensor in boards[0]
    }
    decoded = len(order) * len(boards[0]) * BINS * 8
    return Merged(seconds, decoded, (early, late), merger.histograms == expected)


def repeated(histogram: AbsHistogram, times: int) -> AbsHistogram:
    """What a machine counts that sees the same frames so often."""
    one = histogram
    return AbsHistogram(one.counts * times, one.range_exp, one.amax, one.zeros * times, one.nonfinite * times)


def resident_bytes() -> int:
    """Of this process, now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def encodings(histograms: Sequence[AbsHistogram]) -> Section:
    """What ours and the obvious others take, and how fast they are read; theirs are of the bare counts."""
    table = Section("Encodings", ("encoding", "KiB of 100 histograms", "read, GB/s of counts", "equal"))

    def packed(
        pack: Callable[[bytes], bytes], unpack: Callable[[bytes], bytes]
    ) -> tuple[list[bytes], Callable[[bytes], NDArray[np.int64]]]:
        planes = [_planes(histogram) for histogram in histograms]
        return [pack(plane) for plane in planes], lambda content: _from_planes(unpack(content))

    contenders: dict[str, tuple[list[bytes], Callable[[bytes], NDArray[np.int64]]]] = {
        "tared, checked": (
            [to_bytes(histogram) for histogram in histograms],
            lambda content: from_bytes(content).counts,
        ),
        "LZMA of differences in planes of bytes": packed(
            lambda plane: lzma.compress(plane, lzma.FORMAT_RAW, filters=_LZMA),
            lambda content: lzma.decompress(content, lzma.FORMAT_RAW, filters=_LZMA),
        ),
        "zlib of the same, level 6": packed(lambda plane: zlib.compress(plane, 6), zlib.decompress),
        "the counts as they are": ([h.counts.tobytes() for h in histograms], lambda c: np.frombuffer(c, np.int64)),
    }
    for name, (contents, read) in contenders.items():
        equal = all(np.array_equal(read(c), h.counts) for c, h in zip(contents, histograms, strict=True))
        seconds = min(_timed(contents, read) for _ in range(5))
        kib = sum(map(len, contents)) / len(contents) * 100 / 1024
        speed = len(histograms) * BINS * 8 / seconds / 1e9
        table.rows.append((name, f"{kib:.0f}", f"{speed:.3g}", "yes" if equal else "NO"))
    return table


def _timed(contents: Sequence[bytes], read: Callable[[bytes], object]) -> float:
    began_s = time.process_time()
    for content in contents:
        read(content)
    return time.process_time() - began_s


def _planes(histogram: AbsHistogram) -> bytes:
    differences = np.diff(histogram.counts, prepend=0)
    zigzag: NDArray[np.uint64] = ((differences << 1) ^ (differences >> 63)).astype("<u8")
    planes: NDArray[np.uint8] = zigzag.view(np.uint8).reshape(-1, 8).T
    return planes.tobytes()


def _from_planes(planes: bytes) -> NDArray[np.int64]:
    zigzag = np.ascontiguousarray(np.frombuffer(planes, np.uint8).reshape(8, -1).T).reshape(-1).view("<u8")
    differences = (zigzag >> np.uint64(1)) ^ (np.uint64(0) - (zigzag & np.uint64(1)))
    return np.cumsum(differences, dtype=np.uint64).view(np.int64)


def comparing(boards: Sequence[Mapping[str, AbsHistogram]]) -> Section:
    """What telling outliers takes beside the merge."""
    tensors = tuple(sorted(boards[0]))
    began_s = time.process_time()
    sketches = [Sketch.from_histograms(each, tensors) for each in boards]
    sketched_s = time.process_time()
    group = Group(tensors, sketches)
    costs = [group.cost_to_board_db(each) for each in boards]
    compared_s = time.process_time()
    group.costs_to_group_db(boards[0], sketches)
    ended_s = time.process_time()
    table = Section("Outliers, ms a board", ("sketch", "cost to the board", "cost to the group", "bytes of a sketch"))
    spans = (sketched_s - began_s, compared_s - sketched_s, ended_s - compared_s)
    table.rows.append((*(f"{1e3 * span / len(costs):.1f}" for span in spans), str(sketches[0].octaves.nbytes + 8)))
    return table


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Histograms of a fleet, merged.")
    parser.add_argument("--boards", type=int, default=10_000)
    parser.add_argument("--tensors", type=int, default=100)
    parser.add_argument("--histograms", type=Path, help="a .npz on which the encodings are compared")
    add_output_option(parser)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    boards = [board(rng, options.tensors) for _ in range(POOL)]
    uploads = [write_upload(FACTS, each) for each in boards]
    found = merge(uploads, rng.integers(0, POOL, options.boards), boards)
    table = Section(
        f"{options.boards} boards, {options.tensors} tensors, {BINS} bins",
        ("seconds", "decoded", "GB/s", "an upload", "resident early, late", "bit-equal"),
    )
    early, late = (f"{each / 2**20:.0f} MiB" for each in found.rss_bytes)
    size = f"{sum(map(len, uploads)) / POOL / 1024:.0f} KiB"
    equal = "yes" if found.equal else "NO"
    decoded = f"{found.decoded_bytes / 1e9:.1f} GB"
    table.rows.append((f"{found.seconds:.1f}", decoded, f"{found.gb_per_s:.2f}", size, f"{early}, {late}", equal))
    sample = list(boards[0].values())
    compared = list(load_histograms(options.histograms)[0].values()) if options.histograms is not None else sample
    bars = bars_section([at_least("decoded counts", 1.0, found.gb_per_s, " GB/s")])
    publish([table, encodings(compared), comparing(boards), bars], options)


if __name__ == "__main__":
    main()
