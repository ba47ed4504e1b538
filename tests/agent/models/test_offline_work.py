"""`start` and `calibration.file` name files that the board cannot begin with."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from candidate_bench import backend as backend
from candidate_bench import frames, observed
from candidate_bench import model as model

from agent.models.build import build_artefact
from agent.models.model import Model, calibrate
from agent.models.offline_work import CALIBRATION_FILE, START, OfflineWork
from calibrate.errors import TaredError
from calibrate.plan import PrecisionPlan
from engines.calibration import Calibration, save_calibration
from engines.interface import Backend, silent

KEY = bytes(range(32))
Make = Callable[["Maker"], None]


class Maker:
    """Makes an artefact and a calibration.json in a folder, as `tared build` and `tared calibrate` do."""

    def __init__(self, model: Model, backend: Backend, folder: Path) -> None:
        self.model, self.backend = model, backend
        self.artefact, self.file = folder / "engine", folder / "calibration.json"
        self.calibration = calibrate(model, observed(model, backend, frames(4)), "max", 4, "clip.mp4")

    def build(self, precision: str = "int8", **changes: str) -> None:
        model = replace(self.model, sha256=changes.get("sha256", self.model.sha256))
        calibration = replace(self.calibration, model_sha256=model.sha256) if precision == "int8" else None
        build_artefact(
            model, self.backend, lambda _: self.artefact, silent, calibration=calibration, precision=precision
        )

    def save(self, calibration: Calibration | None = None) -> None:
        save_calibration(calibration or self.calibration, self.file)

    def change_document(self, **values: object) -> None:
        self.save()
        self.file.write_text(json.dumps({**json.loads(self.file.read_text()), **values}))


@pytest.fixture
def maker(model: Model, backend: Backend, tmp_path: Path) -> Maker:
    return Maker(model, backend, tmp_path)


def damaged_engine(maker: Maker) -> None:
    maker.build()
    engine = maker.artefact / "engine.onnx"
    engine.write_bytes(engine.read_bytes()[:-1])


def without_histograms(maker: Maker) -> None:
    maker.save()
    maker.file.with_suffix(".npz").unlink()


def of_another_input(maker: Maker) -> None:
    maker.save(replace(maker.calibration, preprocessing={**maker.calibration.preprocessing, "scale": 1.0}))


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda _: None, "artefact.missing: no manifest.json in "),
        (damaged_engine, "artefact.damaged: "),
        (lambda maker: maker.build("fp32"), "artefact.precision: an artefact of precision fp32; expected int8"),
        (lambda maker: maker.build(sha256="0" * 64), "artefact.model: an artefact of model 000000000000; expected one"),
    ],
)
def test_an_artefact_that_cannot_be_begun_with(maker: Maker, make: Make, error: str) -> None:
    make(maker)
    with pytest.raises(TaredError) as caught:
        OfflineWork(START, maker.artefact).load(maker.model, maker.backend, None)
    assert str(caught.value).startswith(error)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda _: None, "calibration.unreadable: "),
        (lambda maker: maker.file.write_text("[" * 100_000), "calibration.unreadable: "),
        (lambda maker: maker.change_document(frames=5), "calibration.unreadable: "),
        (without_histograms, "calibration.unreadable: "),
        (lambda maker: maker.save(replace(maker.calibration, model_sha256="0" * 64)), "calibration.model: "),
        (of_another_input, "calibration.input: "),
    ],
)
def test_a_calibration_that_cannot_be_begun_with(maker: Maker, make: Make, error: str) -> None:
    make(maker)
    with pytest.raises(TaredError) as caught:
        OfflineWork(CALIBRATION_FILE, maker.file).load(maker.model, maker.backend, None)
    assert str(caught.value).startswith(error)


def test_an_artefact_for_another_input_cannot_be_begun_with(maker: Maker) -> None:
    maker.build()
    spec = maker.model.spec
    other = replace(maker.model, spec=spec.model_copy(update={"input": spec.input.model_copy(update={"scale": 1.0})}))
    with pytest.raises(TaredError, match=r"calibration\.input: "):
        OfflineWork(START, maker.artefact).load(other, maker.backend, None)


def test_a_board_with_a_key_begins_with_what_the_key_has_signed(maker: Maker) -> None:
    maker.build()
    work = OfflineWork(START, maker.artefact)
    with pytest.raises(TaredError, match=r"artefact\.signature: .* with no signature; expected one made with the key"):
        work.load(maker.model, maker.backend, KEY)
    maker.save()
    assert OfflineWork(CALIBRATION_FILE, maker.file).load(maker.model, maker.backend, KEY).content


def test_todays_rules_hold_for_an_artefact_of_yesterday(maker: Maker) -> None:
    maker.build()
    spec = maker.model.spec
    ruled = spec.model_copy(update={"precision": spec.precision.model_copy(update={"keep_float": ("Conv_t2",)})})
    under_rules = replace(maker.model, spec=ruled).with_plan(PrecisionPlan({"Conv_t2": "keep_float: Conv_t2"}))
    loaded = OfflineWork(START, maker.artefact).load(under_rules, maker.backend, None)
    assert set(loaded.model.plan.floats) == {"Conv_t2"}
    assert loaded.misfit is not None
    assert loaded.misfit.code == "artefact.plan"


def test_an_engine_of_another_runtime_is_built_anew(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    maker.build()
    here = maker.backend.describe()
    monkeypatch.setattr(maker.backend, "describe", lambda: {**here, "runtime": "another 1.0"})
    loaded = OfflineWork(START, maker.artefact).load(maker.model, maker.backend, None)
    assert loaded.misfit is not None
    assert loaded.misfit.code == "artefact.runtime"
