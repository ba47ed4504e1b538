"""Reports hold the figures of what they are about, and nothing that fetches, runs or misleads."""

from __future__ import annotations

import json
import re
import shutil
import stat
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from candidate_bench import backend as backend
from candidate_bench import collected, frames, observed, request
from candidate_bench import model as model
from kept import kept_in, spoil
from plan_evidence import evidence

from agent.cli.main import main
from agent.common.html.pages import Section, Table, render_report
from agent.core.state import JobState
from agent.jobs.candidate import run_job
from agent.jobs.job import JobJournal, read_journal
from agent.jobs.request import write_job
from agent.models.model import Model, calibrate
from agent.monitoring.history import History, HistoryRow
from agent.reports.calibration import tensor_facts
from agent.reports.plan import plan_facts, plan_sections
from calibrate.plan import PrecisionPlan, Repairs
from engines.calibration import load_calibration, save_calibration
from engines.interface import Backend

EVIL = "<script>alert('x')</script>\u202e\"&'" + "x" * 10_000
VOID = {"meta", "input", "img"}


class Checked(HTMLParser):
    """Well-formed; nothing in it leads elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.scripts = 0
        self.feed(text)
        assert self.open == []
        assert self.scripts == 1  # the page's own, which its policy names by its hash
        assert "http://" not in text
        assert "https://" not in text
        assert "\u202e" not in text

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        named = dict(attrs)
        assert (named.get("href") or "#").startswith("#")
        assert (named.get("src") or "data:image/").startswith("data:image/")
        assert not {name for name in named if name.startswith("on") or name == "style"}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def words(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.text))


def report(subject: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, Checked]:
    """Its kind, and the page that the command wrote."""
    output = subject.parent / "report.html"
    assert main(["report", str(subject), "-o", str(output), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["bytes"] == output.stat().st_size
    assert stat.S_IMODE(output.stat().st_mode) == 0o600
    return printed["kind"], Checked(output.read_text())


@pytest.fixture
def job(model: Model, backend: Backend, tmp_path: Path) -> Path:
    """A state directory in which a job has built an engine."""
    tensors = frames(24)
    write_job(tmp_path / "job", request(model, tmp_path), collected(model, backend, tensors[:16], tensors[16:]))
    outcome = run_job(tmp_path / "job", lambda _: None)
    assert outcome.artefact is not None
    (tmp_path / "state" / "current").symlink_to(outcome.artefact)
    return tmp_path / "state"


def test_a_calibration_shows_each_tensor_with_what_its_range_clips(
    model: Model, backend: Backend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibration = calibrate(model, observed(model, backend, frames(8)), "percentile:90", 8, EVIL[:60], backend)
    save_calibration(calibration, tmp_path / "calibration.json")
    kind, page = report(tmp_path / "calibration.json", capsys)
    assert kind == "calibration"
    facts = tensor_facts(load_calibration(tmp_path / "calibration.json"))
    assert {each.name for each in facts} == set(calibration.amax)
    for each in facts:
        histogram = calibration.histograms[each.name]
        above = histogram.counts[np.arange(histogram.counts.size) * histogram.bin_width > each.amax].sum()
        if histogram.total > 1000:  # of fewer one value on the edge of a bin counts
            assert each.clipped == pytest.approx(above / histogram.total, abs=0.01)
        assert f"{each.amax:.4g}" in page.words
        assert each.name in page.words
    assert sum(each.clipped > 0.02 for each in facts) > 0  # the 90th percentile clips


def test_a_job_leaves_the_report_on_its_engine(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (left,) = (job / "reports").iterdir()
    assert left.stem == (job / "current").resolve().name
    assert stat.S_IMODE(left.stat().st_mode) == 0o600
    page = Checked(left.read_text())
    kind, again = report(job / "current", capsys)
    assert kind == "artefact"
    manifest = json.loads((job / "current" / "manifest.json").read_text())
    for shown in (page, again):
        assert f"{manifest['verdict']['fidelity']:.3f}" in shown.words
        assert "Agreement by class" in shown.words
        assert "Precision map" in shown.words
        assert "All " in shown.words


def test_a_state_directory_shows_its_engines_jobs_and_history(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = JobJournal(kept_in(job))
    journal.start("j1", "alarm", {}, [])
    journal.enter("j1", JobState.COLLECTING)
    history = History(job, lambda _: None, is_live=False)
    for ts in range(0, 60, 5):
        engine, drift = ("e1", "calm") if ts < 30 else ("e2", "alarm")
        gain = (0.02, 0.0, 0.05) if drift == "alarm" else ()
        history.add(float(ts), [HistoryRow(float(ts), "yard", engine, True, (0.9, 0.8, 1.0), (), drift, 3.0, gain)])
    (job / "artefacts" / "0123456789abcdef").mkdir()
    (job / "artefacts" / "0123456789abcdef" / "manifest.json").write_text("{")
    assert [each.trigger for each in read_journal(job)] == ["alarm"]
    kind, page = report(job, capsys)
    assert kind == "state"
    current = (job / "current").resolve().name
    for words in (
        current,
        "in service",
        "alarm",
        "COLLECTING",
        "Fidelity",
        "a recalibration would gain, with its interval",
        "new engine",
        "Not usable",
    ):
        assert words in page.words


def test_a_row_that_no_journal_has_written_ends_no_report(tmp_path: Path) -> None:
    JobJournal(kept_in(tmp_path)).start("j1", "alarm", {}, [])
    spoil(tmp_path, "UPDATE jobs SET error = '[1]'")
    assert len(read_journal(tmp_path)) == 1


def test_a_plan_by_hand_and_one_with_repairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = PrecisionPlan({"Conv_1": EVIL[:80]}, Repairs(divisors={"Conv_2": (1.0, 2.0)}, methods={"t": "mse"}))
    (tmp_path / "plan.json").write_text(plan.to_json())
    kind, page = report(tmp_path / "plan.json", capsys)
    assert kind == "plan"
    for words in ("Conv_1", "Conv_2", "input divided channel by channel", "mse"):
        assert words in page.words


@pytest.mark.parametrize("content", [None, "", "[]", "{}", "[" * 100_000, '{"floats": 3, "schema": 3}', "\x00\xff"])
def test_other_folders_and_files_are_refused_by_name(
    tmp_path: Path, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    subject = tmp_path / "thing.json"
    if content is not None:
        subject.write_text(content)
    assert main(["report", str(subject), "-o", str(tmp_path / "r.html")]) == 2
    printed = capsys.readouterr().err
    assert re.search(r"error: (report\.subject|plan\.format)", printed)
    assert not (tmp_path / "r.html").exists()


def test_a_damaged_engine_has_no_report(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree((job / "current").resolve(), copy)
    (copy / "calibration.json").write_text("{}")
    assert main(["report", str(copy), "-o", str(tmp_path / "r.html")]) == 2
    assert "artefact.damaged" in capsys.readouterr().err
    assert main(["report", str(job / "current"), "-o", str(tmp_path / "none" / "r.html")]) == 2
    assert "report.write" in capsys.readouterr().err


def test_a_searched_plan_shows_the_loss_beside_the_score_on_labels() -> None:
    found = evidence()
    found["candidates"][1]["trial"]["ious"] = {"car": 1.0, "pole": 0.5}
    plan = PrecisionPlan({"head": "why"}, evidence=found)
    facts = plan_facts(plan)
    assert (facts["loss allowed"], facts["score on labels"]) == ("0.050", "map 0.335, float 0.340 (coco.zip)")
    assert "the worst is 'pole', 0.500" in facts["IoU with float"]


def test_a_searched_plan_says_what_training_could_win() -> None:
    *_, section = plan_sections(PrecisionPlan({"head": "why"}, evidence=evidence()))
    assert section.title == "What training could win"
    assert "would have to win 0.285 of fidelity" in section.text[0]
    nothing = {**evidence(), "retraining": {"loss": 0.0, "noisiest": [], "target": None}}
    *_, section = plan_sections(PrecisionPlan({"head": "why"}, evidence=nothing))
    assert len(section.text) == 1
    (section,) = plan_sections(PrecisionPlan({"head": "why"}, evidence={**evidence(), "schema": 2}))
    assert section.text[0].startswith("Another version of tared made this plan.")


def test_words_of_strangers_are_text_in_every_place_of_a_report() -> None:
    table = Table(((EVIL[:50], False), ("n", True)), [(EVIL, (EVIL, 1.0))], EVIL[:50], filters=True)
    section = Section(EVIL[:50], [EVIL], {EVIL[:50]: EVIL}, tables=[table], pictures=[(b"\x89PNG", EVIL)])
    page = Checked(render_report(EVIL, EVIL, [section, section], {"a": EVIL}))
    assert "alert('x')" in page.words


def test_no_daemon_imports_what_draws_reports() -> None:
    source = "import sys, agent.daemon.run, agent.jobs.candidate; assert 'jinja2' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
