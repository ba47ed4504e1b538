"""Keep the frames that were drawn for labelling, with both engines' answers and the labels: `labels.sqlite`, pictures.

The daemon draws frames (sampling.py), `tared label` shows them to people, and both read what the labels come to
(accuracy.py). All of it stays in the folder `labelling` of the state directory: SQLite for what is known of a frame,
one JPEG for each picture, which nobody else on the board may read.
"""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.common.database import Database
from agent.common.errors import AgentError
from agent.vision.answer import Answer
from agent.vision.labels import LabelError, LabelKind, Truth
from agent.vision.tasks.opening import label_kind
from calibrate.statistics.sampling import STRATA
from engines.store.files import remove, replace_files

FOLDER = "labelling"
_DATABASE = "labels.sqlite"
KEPT_ASIDE = "these labels are of another task than the model spec's: they are kept, and count for that task alone"
_PATIENCE_S = 5.0  # for another process, which may write a picture to a slow card just then
_OWNER_ONLY = 0o600
_OWNERS_FOLDER = 0o700

Floats = NDArray[np.float64]
Cell = tuple[str, str]  # camera, and the artefact in service: its regime

# Lists of STRATA numbers, as JSON. seconds: of all frames, by stratum; expected: frames to be drawn, in the mean.
_MIGRATIONS = (
    """
    CREATE TABLE models (model TEXT PRIMARY KEY, task TEXT NOT NULL, labels TEXT NOT NULL, cuts TEXT NOT NULL);
    CREATE TABLE seen (
        model TEXT NOT NULL, camera TEXT NOT NULL, regime TEXT NOT NULL,
        seconds TEXT NOT NULL, expected TEXT NOT NULL,
        PRIMARY KEY (model, camera, regime)
    );
    CREATE TABLE frames (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        model TEXT NOT NULL, camera TEXT NOT NULL, regime TEXT NOT NULL,
        frame INTEGER NOT NULL, ts REAL NOT NULL, drawn_s REAL NOT NULL,
        width INTEGER NOT NULL, height INTEGER NOT NULL,
        stratum INTEGER NOT NULL, weight REAL NOT NULL, probability REAL NOT NULL, seen TEXT NOT NULL,
        served TEXT NOT NULL, reference TEXT NOT NULL,
        label TEXT, labelled_s REAL, suggested INTEGER NOT NULL DEFAULT 0, skipped INTEGER NOT NULL DEFAULT 0
    );
    CREATE INDEX frames_by_model ON frames (model, id);
    """,
)
_FRAME_COLUMNS = (  # the names of fields of DrawnFrame
    "id, camera, regime, frame, ts, drawn_s, width, height, stratum, weight, probability, seen, served, reference, "
    "label, labelled_s, suggested, skipped"
)


@dataclass(frozen=True, eq=False)
class Counted:
    """Sums over all frames of a cell, drawn or not: seconds and the expected number of drawn ones; (STRATA,) each."""

    seconds: Floats
    expected: Floats


NOTHING_COUNTED = Counted(np.zeros(STRATA), np.zeros(STRATA))


@dataclass(frozen=True, eq=False, kw_only=True)
class Draw:
    """An observed frame that was drawn for labelling.

    camera, regime: Of the frame, and the artefact that answered it. frame, ts: Its id, and its capture time in s.
    stratum, weight, probability, seen: As in SampledTotals.add (calibrate.statistics.sampling). served, reference: What
    the engine in service and the float reference answered.
    """

    camera: str
    regime: str
    frame: int
    ts: float
    stratum: int
    weight: float
    probability: float
    seen: Sequence[float]
    served: Answer
    reference: Answer

    @property
    def cell(self) -> Cell:
        return self.camera, self.regime


@dataclass(frozen=True, eq=False, kw_only=True)
class DrawnFrame(Draw):
    """A draw as it was kept.

    drawn_s: Unix time. width, height: Of its picture in pixels. label: None without one. labelled_s: Unix time of the
    label, which is another one for each change of it. suggested: the label began as the reference's answer. skipped:
    nobody could say what it shows.
    """

    id: int
    drawn_s: float
    width: int
    height: int
    label: Truth | None
    labelled_s: float | None
    suggested: bool
    skipped: bool

    @property
    def is_labelled(self) -> bool:
        return self.label is not None

    @property
    def is_waiting(self) -> bool:
        """True until it has a label or is skipped."""
        return not (self.is_labelled or self.skipped)


class LabelStore:
    """The drawn frames of one model, for one task. Raises AgentError `state.*` (agent/common/database.py).

    Each call opens the file again: the daemon and `tared label` use it at the same time, and neither of them often. If
    the spec names another task for the same model, that begins without frames. Those of the task before are kept, and
    count again with it.

    >>> import tempfile
    >>> from agent.vision.tasks.classify import Classification
    >>> folder = tempfile.TemporaryDirectory()
    >>> store = LabelStore(Path(folder.name), "3f29", "classify")
    >>> draw = Draw(camera="gate", regime="a1b2", frame=7, ts=1.4, stratum=0, weight=1.0, probability=0.1,
    ...             seen=[1.0, 0, 0, 0, 0, 0], served=Classification(3, 0.9), reference=Classification(3, 0.8))
    >>> store.add(draw, b"the JPEG", (480, 640), NOTHING_COUNTED)
    >>> (frame,) = store.frames()
    >>> store.label(frame.id, 3)
    >>> [each.label for each in store.frames()], store.picture(frame.id)
    ([3], b'the JPEG')
    >>> folder.cleanup()
    """

    def __init__(self, state_dir: Path, model: str, task: str) -> None:
        """model: the hash of its file. task: its name."""
        self.folder = state_dir / FOLDER
        self.task = task
        self._model = model
        self._database = Database(
            self.folder / _DATABASE,
            name="state",
            holds="frames drawn for labelling",
            loss="the labels so far are in the file that was set aside",
            migrations=_MIGRATIONS,
            pragmas=("journal_mode = WAL", "synchronous = FULL"),
            patience_s=_PATIENCE_S,
        )

    @property
    def kind(self) -> LabelKind[Any, Any]:
        """What the label of a frame is."""
        return label_kind(self.task)

    @property
    def exists(self) -> bool:
        """True once a daemon has drawn or counted frames here."""
        return self._database.path.is_file()

    def stamp(self) -> tuple[int, ...]:
        """Return what changes with every write: times and sizes of the files. Empty where there are none."""
        stats = []
        for path in (self._database.path, self._database.path.with_name(f"{_DATABASE}-wal")):
            with suppress(FileNotFoundError):  # the last connection to close removes the log
                stats.append(path.stat())
        return tuple(value for each in stats for value in (each.st_mtime_ns, each.st_size))

    def revision(self) -> tuple[int, float]:
        """Return what changes with each label and each skipped frame of this model, and with nothing else."""
        query = "SELECT count(labelled_s), total(labelled_s) FROM frames WHERE model = ?"
        with self._database.transaction("read") as db:
            labels, times_s = db.execute(query, (self._key(db),)).fetchone()
        return int(labels), float(times_s)

    def class_names(self) -> Sequence[str] | None:
        """Return the names of the classes that frames were drawn with; None before any."""
        with self._database.transaction("read") as db:
            row = db.execute("SELECT labels FROM models WHERE model = ?", (self._key(db),)).fetchone()
        return json.loads(row[0]) if row is not None else None

    def labels_of_other_tasks(self) -> dict[str, int]:
        """Return how many labels of this model are for other tasks, by task."""
        query = (
            "SELECT models.task, count(label) FROM models JOIN frames USING (model) "
            "WHERE (models.model = ? OR models.model GLOB ? || ' *') AND models.task != ? GROUP BY models.task"
        )
        with self._database.transaction("read") as db:
            rows = db.execute(query, (self._model, self._model, self.task)).fetchall()
        return {task: labels for task, labels in rows if labels}

    def _key(self, db: sqlite3.Connection) -> str:
        """Return the name by which rows are kept: the model's, and the task behind it if another one came first."""
        row = db.execute("SELECT task FROM models WHERE model = ?", (self._model,)).fetchone()
        return self._model if row is None or row[0] == self.task else f"{self._model} {self.task}"

    def strata(self) -> list[float] | None:
        """Return the cuts between the strata of this model; None before they are fixed."""
        with self._database.transaction("read") as db:
            row = db.execute("SELECT cuts FROM models WHERE model = ?", (self._key(db),)).fetchone()
        return self._numbers(row[0], STRATA - 1) if row is not None else None

    def fix_strata(self, cuts: Sequence[float], labels: Sequence[str]) -> None:
        """Keep the cuts between the strata of this model, for good, and the names of its classes.

        Counts by other cuts are forgotten: they came from a file that is gone.
        """
        self._make_folder()
        row = (self.task, json.dumps(list(labels)), json.dumps(list(cuts)))
        with self._database.transaction("write") as db:
            key = self._key(db)
            if db.execute("INSERT OR IGNORE INTO models VALUES (?, ?, ?, ?)", (key, *row)).rowcount:
                db.execute("DELETE FROM seen WHERE model = ?", (key,))

    def counted(self) -> dict[Cell, Counted]:
        """Return what was counted of all frames, for each cell."""
        query = "SELECT camera, regime, seconds, expected FROM seen WHERE model = ?"
        with self._database.transaction("read") as db:
            rows = db.execute(query, (self._key(db),)).fetchall()
        return {
            (camera, regime): Counted(*(np.array(self._numbers(each, STRATA)) for each in lists))
            for camera, regime, *lists in rows
        }

    def keep_counted(self, counted: Mapping[Cell, Counted]) -> None:
        """Replace what was counted of these cells."""
        self._make_folder()
        with self._database.transaction("write") as db:
            self._write_counted(db, counted)

    def add(self, draw: Draw, jpeg: bytes, size: tuple[int, int], counted: Counted) -> None:
        """Keep a drawn frame whole, or not at all.

        size: (height, width) of its picture in pixels. counted: of its cell, with this frame.
        """
        self._make_folder()
        served, reference = (json.dumps(self.kind.answer_document(each)) for each in (draw.served, draw.reference))
        with self._database.transaction("write") as db:
            added = db.execute(
                "INSERT INTO frames (model, camera, regime, frame, ts, drawn_s, height, width, stratum, weight, "
                "probability, seen, served, reference) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(self._key(db), draw.camera, draw.regime, draw.frame, draw.ts, time.time(), *size),
                    *(draw.stratum, draw.weight, draw.probability, json.dumps(list(draw.seen)), served, reference),
                ),
            )
            self._write_counted(db, {draw.cell: counted})
            assert added.lastrowid is not None
            replace_files({self._picture_path(added.lastrowid): jpeg}, _OWNER_ONLY)

    def frames(self) -> list[DrawnFrame]:
        """Return the drawn frames of this model in the order of their draws; rows that no tared wrote are left out."""
        with self._database.transaction("read") as db:
            query = f"SELECT {_FRAME_COLUMNS} FROM frames WHERE model = ? ORDER BY id"
            rows = db.execute(query, (self._key(db),)).fetchall()
        return list(_parsed(rows, self.kind))

    def label(self, frame: int, truth: Truth, suggested: bool = False) -> None:
        """Set or replace the label of a frame, by its id here. Raises AgentError (`labelling.unknown`) without it."""
        self._set({frame: truth}, suggested)

    def label_all(self, truths: Mapping[int, Truth], suggested: bool = False) -> None:
        """Set or replace the labels of several frames, by their ids here; all or none. Raises as `label`."""
        self._set(truths, suggested)

    def skip(self, frame: int) -> None:
        """Note that nobody can say what a frame shows. Raises as `label`."""
        self._set({frame: None})

    def picture(self, frame: int) -> bytes:
        """Return the JPEG of a frame. Raises AgentError (`labelling.picture`) where it is gone."""
        try:
            return self._picture_path(frame).read_bytes()
        except OSError as error:
            found = f"{self._picture_path(frame)}: {error.strerror}"
            remedy = "raise labelling.keep in config.yaml, so that pictures are kept for longer"
            raise AgentError("labelling.picture", found, "the picture of a drawn frame", remedy) from error

    def prune(self, keep: int) -> None:
        """Remove the pictures of all labelled or skipped frames but the newest `keep`; what is known of them stays."""
        query = "SELECT id FROM frames WHERE label IS NOT NULL OR skipped ORDER BY id DESC LIMIT -1 OFFSET ?"
        with self._database.transaction("read") as db:
            done = {row[0] for row in db.execute(query, (keep,))}
        with self._database.translating_errors("write"):
            for path in self.folder.glob("*.jpg"):
                if path.stem.isdecimal() and int(path.stem) in done:
                    remove(path)

    def _numbers(self, text: str, count: int) -> list[float]:
        """Return so many numbers. Raises AgentError (`state.damaged`) for what no tared wrote."""
        try:
            numbers = [float(each) for each in json.loads(text)]
        except (ValueError, TypeError):
            numbers = []
        if len(numbers) != count:
            raise self._database.set_aside(f"{text!r:.80} in place of {count} numbers")
        return numbers

    def _write_counted(self, db: sqlite3.Connection, counted: Mapping[Cell, Counted]) -> None:
        key = self._key(db)
        rows = [
            (key, *cell, json.dumps(each.seconds.tolist()), json.dumps(each.expected.tolist()))
            for cell, each in counted.items()
        ]
        db.executemany("INSERT OR REPLACE INTO seen VALUES (?, ?, ?, ?, ?)", rows)

    def _set(self, truths: Mapping[int, Truth | None], suggested: bool = False) -> None:
        """Set the labels of frames; None: it is skipped."""
        statement = "UPDATE frames SET label = ?, labelled_s = ?, suggested = ?, skipped = ? WHERE model = ? AND id = ?"
        now_s = time.time()
        with self._database.transaction("write") as db:
            key = self._key(db)
            for frame, truth in truths.items():
                label = json.dumps(self.kind.document(truth)) if truth is not None else None
                if not db.execute(statement, (label, now_s, suggested, truth is None, key, frame)).rowcount:
                    found = f"no frame {frame} of this model and task in {self._database.path}"
                    remedy = "see them with `tared label --list`"
                    raise AgentError("labelling.unknown", found, "a frame that was drawn", remedy)

    def _picture_path(self, frame: int) -> Path:
        return self.folder / f"{frame:08d}.jpg"

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(_OWNERS_FOLDER, parents=True, exist_ok=True)
        except OSError as error:
            raise self._database.access_error("write", error.strerror or str(error)) from error


class _CompactFrame(DrawnFrame):
    """One whose answers and label are parsed when they are asked for: the masks of thousands would fill the memory."""

    def __init__(self, frame: DrawnFrame, kind: LabelKind[Any, Any], texts: Mapping[str, str | None]) -> None:
        parsed = {"served", "reference", "label"}
        vars(self).update({name: value for name, value in vars(frame).items() if name not in parsed})
        vars(self).update(_kind=kind, _texts=texts)

    @property
    def served(self) -> Answer:
        return self._answer("served")

    @property
    def reference(self) -> Answer:
        return self._answer("reference")

    @property
    def is_labelled(self) -> bool:
        return vars(self)["_texts"]["label"] is not None

    @property
    def label(self) -> Truth | None:
        text = vars(self)["_texts"]["label"]
        return vars(self)["_kind"].read(json.loads(text)) if text is not None else None

    def _answer(self, engine: str) -> Answer:
        answer: Answer = vars(self)["_kind"].read_answer(json.loads(vars(self)["_texts"][engine]))
        return answer


def _parsed(rows: Iterable[Sequence[Any]], kind: LabelKind[Any, Any]) -> Iterator[DrawnFrame]:
    for row in rows:
        values = dict(zip(_FRAME_COLUMNS.split(", "), row, strict=True))
        try:
            frame = DrawnFrame(
                **{
                    **values,
                    "seen": [float(each) for each in json.loads(values["seen"])],
                    "served": kind.read_answer(json.loads(values["served"])),
                    "reference": kind.read_answer(json.loads(values["reference"])),
                    "label": kind.read(json.loads(values["label"])) if values["label"] is not None else None,
                    "suggested": bool(values["suggested"]),
                    "skipped": bool(values["skipped"]),
                }
            )
            if kind.form == "shapes":
                frame = _CompactFrame(frame, kind, {name: values[name] for name in ("served", "reference", "label")})
            is_drawn = 0 <= frame.stratum < STRATA and 0.0 < frame.probability <= 1.0 and 0.0 < frame.weight < math.inf
        except (LabelError, ValueError, KeyError, TypeError, OverflowError):  # a damaged row costs itself alone
            continue
        if is_drawn and len(frame.seen) == STRATA:
            yield frame
