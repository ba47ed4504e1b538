"""Histograms of many boards merged into one for each tensor: exactly, in any order, in memory that does not grow.

What comes out is, bit for bit, what a single machine would have counted that had seen all the frames. The results of
several mergers, each of some of the boards, merge to the same.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from pydantic import JsonValue

from agent.common.errors import AgentError
from agent.contract.histograms import Facts, read_facts, read_upload, write_upload
from agent.contract.wire import MessageError
from calibrate.histogram import AbsHistogram, HistogramSum
from engines.calibration import Calibration, calibrate_histograms
from engines.store.files import replace_files
from fleet.merge.outliers import Distance, Group, OutlierLimits, Sketch


class Merger:
    """One sum for each tensor; no histogram that is added is kept."""

    def __init__(self) -> None:
        self._sums: dict[str, HistogramSum] = {}

    @property
    def histograms(self) -> dict[str, AbsHistogram]:
        """A copy of the sums so far, by tensor."""
        return {tensor: each.result() for tensor, each in self._sums.items()}

    def add(self, histograms: Iterable[tuple[str, AbsHistogram]]) -> None:
        """Of a board, as `agent.contract.histograms.read_upload` gives them, or of another merger.

        Raises CalibrationError as `merge`; those before the one that does not fit have been added then.
        """
        for tensor, histogram in histograms:
            if tensor not in self._sums:
                self._sums[tensor] = HistogramSum(histogram.bits)
            self._sums[tensor].add(histogram)


BUNDLE = ".bundle"  # in the place of a calibration's .json: what boards get
_AT_ONCE = 32  # boards whose scales are held against the group's histograms together

Advance = Callable[[str, float], None]  # what is being done, and which fraction of it is


@dataclass(frozen=True)
class ExaminedUpload:
    """An upload that was looked at. kind: a hash of what has to be the same for its histograms to merge."""

    path: Path
    kind: str
    frames: int
    sketch: Sketch


@dataclass(frozen=True)
class MergedCalibration:
    """A calibration that tells in `merged` of which boards it is; excluded: by device, why it is not among them."""

    calibration: Calibration
    distances: Mapping[str, Distance]
    limits: OutlierLimits
    excluded: Mapping[str, str]


def merge_calibration(
    uploads: Mapping[str, Path], method: str, fleet: str = "", advance: Advance = lambda _doing, _fraction: None
) -> MergedCalibration:
    """Of the uploads by device. method: how amax is chosen, as in `tared calibrate`.

    Each file is read two times, a third time where there are outliers; in memory are the sums, one upload, and a sketch
    for each board. Raises AgentError (`merge.empty`), CalibrationError as `calibrate_histograms`.
    """
    boards, excluded = _examine(uploads, advance)
    boards, strangers = _alike(boards)
    excluded |= strangers
    if not boards:
        why = next(iter(excluded.values()), "nobody has sent any")
        raise AgentError("merge.empty", f"no histograms to merge: {why}", "a board's upload", "see to the boards")
    content = next(iter(boards.values())).path.read_bytes()
    facts, tensors = read_facts(content), sorted(tensor for tensor, _ in read_upload(content))
    group = Group(tensors, [board.sketch for board in boards.values()])
    heavy = {device: why for device, board in boards.items() if (why := group.outweighed(board.sketch))}
    boards = {device: board for device, board in boards.items() if device not in heavy}
    seen, distances = _distances(group, boards, advance)
    limits = OutlierLimits.from_distances(list(distances.values()))
    outliers = {device: why for device, each in distances.items() if (why := limits.reason(each))}
    excluded |= heavy | outliers
    if outliers:
        boards = {device: board for device, board in boards.items() if device not in outliers}
        seen = _sum(boards, advance)
    frames = {device: board.frames for device, board in boards.items()}
    calibration = _calibration(facts, seen, method, frames)
    provenance = {"fleet": fleet, "observed": facts.observed, "boards": frames, "excluded": excluded}
    return MergedCalibration(replace(calibration, merged=provenance), distances, limits, excluded)


def examine_upload(path: Path) -> ExaminedUpload:
    """Read an upload whole. Raises MessageError for what is none, and for one with values that are not finite."""
    content = path.read_bytes()
    facts, histograms = read_facts(content), dict(read_upload(content))
    broken = {tensor: each.nonfinite for tensor, each in histograms.items() if each.nonfinite}
    if broken:
        found = f"NaN or infinite values in {len(broken)} tensors, '{min(broken)}' with {broken[min(broken)]}"
        raise MessageError("histograms.nonfinite", found, "finite activations", "see to the board's model and camera")
    tensors = sorted(histograms)
    bits = [(tensor, histograms[tensor].bits) for tensor in tensors]
    same = [facts.model, facts.observed, facts.preprocessing, sorted(map(sorted, facts.shared)), bits]
    kind = hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()
    return ExaminedUpload(path, kind, facts.frames, Sketch.from_histograms(histograms, tensors))


def _examine(uploads: Mapping[str, Path], advance: Advance) -> tuple[dict[str, ExaminedUpload], dict[str, str]]:
    """Those that can be read, and why the others cannot."""
    boards, excluded = dict[str, ExaminedUpload](), dict[str, str]()
    for number, (device, path) in enumerate(sorted(uploads.items())):
        advance("looking", number / len(uploads))
        try:
            boards[device] = examine_upload(path)
        except (MessageError, OSError) as error:
            excluded[device] = str(error)
    return boards, excluded


def _alike(boards: Mapping[str, ExaminedUpload]) -> tuple[dict[str, ExaminedUpload], dict[str, str]]:
    """The largest group of boards whose histograms merge, and why the others are not in it."""
    kinds = Counter(board.kind for board in boards.values())
    if not kinds:
        return {}, {}
    kind = max(kinds, key=lambda each: (kinds[each], each))
    why = "another model, plan, input or number of bins than most boards have"
    others = {device: why for device, board in boards.items() if board.kind != kind}
    return {device: board for device, board in boards.items() if device not in others}, others


def _distances(
    group: Group, boards: Mapping[str, ExaminedUpload], advance: Advance
) -> tuple[dict[str, AbsHistogram], dict[str, Distance]]:
    """The sum of all boards, and how far each is from the group."""
    merger, to_board = Merger(), dict[str, float]()
    for number, (device, board) in enumerate(boards.items()):
        advance("comparing", number / len(boards))
        histograms = dict(read_upload(board.path.read_bytes()))
        to_board[device] = group.cost_to_board_db(histograms)
        merger.add(histograms.items())
    seen, sketches = merger.histograms, iter([board.sketch for board in boards.values()])
    to_group: list[float] = []
    while some := list(islice(sketches, _AT_ONCE)):
        to_group += group.costs_to_group_db(seen, some)
    rows = zip(to_board.items(), to_group, strict=True)
    return seen, {device: Distance(cost, harm) for (device, cost), harm in rows}


def _sum(boards: Mapping[str, ExaminedUpload], advance: Advance) -> dict[str, AbsHistogram]:
    merger = Merger()
    for number, board in enumerate(boards.values()):
        advance("merging", number / len(boards))
        merger.add(read_upload(board.path.read_bytes()))
    return merger.histograms


def _calibration(facts: Facts, seen: Mapping[str, AbsHistogram], method: str, frames: Mapping[str, int]) -> Calibration:
    return calibrate_histograms(
        seen,
        tuple(tuple(group) for group in facts.shared),
        model_sha256=facts.model,
        method=method,
        frames=sum(frames.values()),
        source=f"merged of {len(frames)} boards",
        preprocessing=facts.preprocessing,
    )


def write_bundle(calibration: Calibration, path: Path) -> None:
    """Beside the .json of a merged calibration. Raises AgentError (`merge.write`)."""
    try:
        replace_files({path.with_suffix(BUNDLE): bundle(calibration)})
    except OSError as error:
        found, remedy = f"{path.with_suffix(BUNDLE)}: {error.strerror}", "make room, or choose another -o"
        raise AgentError("merge.write", found, "a writable place", remedy) from error


def bundle(calibration: Calibration) -> bytes:
    """What boards get of a merged calibration: its histograms, and of how many boards they are, not of which."""
    merged = calibration.merged
    of: dict[str, JsonValue] = {
        "boards": len(merged["boards"]),
        "excluded": len(merged["excluded"]),
        "calibration": calibration.id,
    }
    facts = Facts(
        model=calibration.model_sha256,
        observed=merged["observed"],
        method=calibration.method,
        frames=calibration.frames,
        preprocessing=dict(calibration.preprocessing),
        merged=of,
    )
    return write_upload(facts, calibration.histograms)
