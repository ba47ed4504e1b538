"""Merge the histograms of many boards into one calibration.

The merge is exact: the result is, bit for bit, what a single machine would have counted that had seen all the frames.
It needs no order, and merging the results of several mergers gives the same. Memory does not grow with the number of
boards: it holds the sums, one upload, and a sketch of each board. `merge_calibration` also excludes boards:
1. uploads that cannot be read;
2. boards of another model, plan, input or number of bins than most boards;
3. boards that have so many values that no other board would count;
4. outliers (see `outliers`).
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

BUNDLE = ".bundle"  # in the place of a calibration's .json: the file for boards
_AT_ONCE = 32  # boards whose scales are compared with the group's histograms together

Advance = Callable[[str, float], None]  # called with what is being done, and which fraction of it is done


@dataclass(frozen=True)
class ExaminedUpload:
    """An upload that can be read. kind: a hash of everything that must be equal for histograms to merge."""

    path: Path
    kind: str
    frames: int
    sketch: Sketch


@dataclass(frozen=True)
class MergedCalibration:
    """A calibration whose `merged` names its boards. excluded: by device, why it is not among them."""

    calibration: Calibration
    distances: Mapping[str, Distance]
    excluded: Mapping[str, str]


def merge_calibration(
    uploads: Mapping[str, Path], method: str, fleet: str = "", advance: Advance = lambda _doing, _fraction: None
) -> MergedCalibration:
    """Merge uploads into one calibration. Each file is read twice, and a third time if there are outliers.

    Args:
        uploads: Files by device.
        method: How amax is chosen, as in `tared calibrate`.
        fleet: Name of the fleet, for the record.
        advance: Reports progress.

    Raises AgentError: merge.empty  no upload is left to merge; and CalibrationError as `calibrate_histograms`.
    """
    boards, excluded = _examine(uploads, advance)
    boards, others = _largest_kind(boards)
    excluded |= others
    _check_any(boards, excluded)
    content = next(iter(boards.values())).path.read_bytes()
    facts, tensors = read_facts(content), sorted(tensor for tensor, _ in read_upload(content))
    group = Group(tensors, [board.sketch for board in boards.values()])
    excluded |= {device: why for device, board in boards.items() if (why := group.outweighed(board.sketch))}
    boards = {device: board for device, board in boards.items() if device not in excluded}
    _check_any(boards, excluded)  # each may count too much, in a tensor of its own
    sums, distances = _measure_distances(group, boards, advance)
    limits = OutlierLimits.from_distances(list(distances.values()))
    outliers = {device: why for device, each in distances.items() if (why := limits.reason(each))}
    if outliers:
        excluded |= outliers
        boards = {device: board for device, board in boards.items() if device not in outliers}
        merger = Merger()
        for number, board in enumerate(boards.values()):
            advance("merging", number / len(boards))
            merger.add(read_upload(board.path.read_bytes()))
        sums = merger.histograms
    frames = {device: board.frames for device, board in boards.items()}
    calibration = calibrate_histograms(
        sums,
        tuple(tuple(shared) for shared in facts.shared),
        model_sha256=facts.model,
        method=method,
        frames=sum(frames.values()),
        source=f"merged of {len(frames)} boards",
        preprocessing=facts.preprocessing,
    )
    provenance = {"fleet": fleet, "observed": facts.observed, "boards": frames, "excluded": excluded}
    return MergedCalibration(replace(calibration, merged=provenance), distances, excluded)


def _check_any(boards: Mapping[str, ExaminedUpload], excluded: Mapping[str, str]) -> None:
    """Raise AgentError (`merge.empty`) without a board."""
    if not boards:
        why = next(iter(excluded.values()), "no board has sent any")
        raise AgentError(
            "merge.empty", f"no histograms to merge: {why}", "the upload of at least one board", "check the boards"
        )


class Merger:
    """Sum histograms, tensor by tensor; no histogram that is added is kept."""

    def __init__(self) -> None:
        self._sums: dict[str, HistogramSum] = {}

    @property
    def histograms(self) -> dict[str, AbsHistogram]:
        """A copy of the sums so far, by tensor."""
        return {tensor: each.result() for tensor, each in self._sums.items()}

    def add(self, histograms: Iterable[tuple[str, AbsHistogram]]) -> None:
        """Add the histograms of a board, as `agent.contract.histograms.read_upload` yields them, or of another merger.

        Raises CalibrationError as `merge`. The histograms before the one that does not fit have been added then.
        """
        for tensor, histogram in histograms:
            if tensor not in self._sums:
                self._sums[tensor] = HistogramSum(histogram.bits)
            self._sums[tensor].add(histogram)


def examine_upload(path: Path) -> ExaminedUpload:
    """Read an upload whole. Raises MessageError if it is not an upload, or has values that are not finite."""
    content = path.read_bytes()
    facts, histograms = read_facts(content), dict(read_upload(content))
    broken = {tensor: each.nonfinite for tensor, each in histograms.items() if each.nonfinite}
    if broken:
        found = f"NaN or infinite values in {len(broken)} tensors, '{min(broken)}' with {broken[min(broken)]}"
        raise MessageError("histograms.nonfinite", found, "finite activations", "check the board's model and camera")
    tensors = sorted(histograms)
    bits = [(tensor, histograms[tensor].bits) for tensor in tensors]
    same = [facts.model, facts.observed, facts.preprocessing, sorted(map(sorted, facts.shared)), bits]
    kind = hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()
    return ExaminedUpload(path, kind, facts.frames, Sketch.from_histograms(histograms, tensors))


def _examine(uploads: Mapping[str, Path], advance: Advance) -> tuple[dict[str, ExaminedUpload], dict[str, str]]:
    """Return the uploads that can be read, and why the others cannot."""
    boards, excluded = dict[str, ExaminedUpload](), dict[str, str]()
    for number, (device, path) in enumerate(sorted(uploads.items())):
        advance("looking", number / len(uploads))
        try:
            boards[device] = examine_upload(path)
        except (MessageError, OSError) as error:
            excluded[device] = str(error)
    return boards, excluded


def _largest_kind(boards: Mapping[str, ExaminedUpload]) -> tuple[dict[str, ExaminedUpload], dict[str, str]]:
    """Return the largest group of boards whose histograms merge, and why the others are not in it."""
    kinds = Counter(board.kind for board in boards.values())
    kind = max(kinds, key=lambda each: (kinds[each], each), default="")
    why = "another model, plan, input or number of bins than most boards have"
    others = {device: why for device, board in boards.items() if board.kind != kind}
    return {device: board for device, board in boards.items() if device not in others}, others


def _measure_distances(
    group: Group, boards: Mapping[str, ExaminedUpload], advance: Advance
) -> tuple[dict[str, AbsHistogram], dict[str, Distance]]:
    """Return the sums of all boards, and how far each board is from the group."""
    merger, to_board = Merger(), dict[str, float]()
    for number, (device, board) in enumerate(boards.items()):
        advance("comparing", number / len(boards))
        histograms = dict(read_upload(board.path.read_bytes()))
        to_board[device] = group.cost_to_board_db(histograms)
        merger.add(histograms.items())
    sums, sketches = merger.histograms, iter([board.sketch for board in boards.values()])
    to_group: list[float] = []
    while some := list(islice(sketches, _AT_ONCE)):
        to_group += group.costs_to_group_db(sums, some)
    rows = zip(to_board.items(), to_group, strict=True)
    return sums, {device: Distance(cost, harm) for (device, cost), harm in rows}


def write_bundle(calibration: Calibration, path: Path) -> None:
    """Write the bundle next to the .json of a merged calibration. Raises AgentError (`merge.write`)."""
    try:
        replace_files({path.with_suffix(BUNDLE): bundle(calibration)})
    except OSError as error:
        found, remedy = f"{path.with_suffix(BUNDLE)}: {error.strerror}", "free some space, or choose another -o"
        raise AgentError("merge.write", found, "a folder that you may write to", remedy) from error


def bundle(calibration: Calibration) -> bytes:
    """Return what boards get of a merged calibration: its histograms, and how many boards they are of, not which."""
    merged = calibration.merged
    counts: dict[str, JsonValue] = {
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
        merged=counts,
    )
    return write_upload(facts, calibration.histograms)
