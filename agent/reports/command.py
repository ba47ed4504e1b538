"""Make the report that `tared report` asks for: it finds out what it was given."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from agent.common.errors import AgentError
from agent.common.html.pages import render_report
from agent.reports.artefact import artefact_report
from agent.reports.calibration import calibration_facts, calibration_sections
from agent.reports.plan import plan_facts, plan_sections
from agent.reports.state import JobRow, state_report
from calibrate.plan import PrecisionPlan
from engines.calibration import load_calibration
from engines.store.artefact import read_artefact
from engines.store.files import read_text, replace_files

_OWNER_ONLY = 0o600  # a report may show frames


def make_report(
    subject: Path, output: Path, key: bytes | None, read_jobs: Callable[[Path], Sequence[JobRow]]
) -> dict[str, object]:
    """Write the report on a calibration, a plan, an artefact or a state directory; return what --json prints.

    Args:
        read_jobs: Returns the jobs in the journal of a state directory.

    Raises AgentError: `report.subject` for anything else, `report.write` where the file cannot be written; and
    TaredError as reading the subject does.
    """
    kind, content = _report(subject, key, read_jobs)
    try:
        replace_files({output: content.encode()}, mode=_OWNER_ONLY)
    except OSError as error:
        found = f"{output}: {error.strerror or error}"
        raise AgentError("report.write", found, "a writable folder with room", "choose another with -o") from error
    return {"subject": str(subject), "kind": kind, "output": str(output), "bytes": len(content.encode())}


def _report(subject: Path, key: bytes | None, read_jobs: Callable[[Path], Sequence[JobRow]]) -> tuple[str, str]:
    if (subject / "manifest.json").exists():
        return "artefact", artefact_report(read_artefact(subject, key))
    if (subject / "artefacts").is_dir():
        return "state", state_report(subject, read_jobs(subject), key)
    document = _document(subject)
    if document.keys() >= {"tensors", "method"}:
        calibration = load_calibration(subject)
        lead = f"Calibrated by {calibration.method}, on {calibration.frames} frames of {calibration.source}."
        facts, sections = calibration_facts(calibration), calibration_sections(calibration)
        return "calibration", render_report(f"Calibration {subject.name}", lead, sections, facts)
    if "floats" in document:
        plan = PrecisionPlan.from_json(subject.read_text(encoding="utf-8"))
        lead = str(plan.evidence.get("verdict", "A precision plan."))
        return "plan", render_report(f"Precision plan {subject.name}", lead, plan_sections(plan), plan_facts(plan))
    raise _not_a_subject(subject)


def _document(subject: Path) -> dict[str, object]:
    """Return the JSON object in a file. Raises AgentError (`report.subject`)."""
    try:
        document = json.loads(read_text(subject))
    except (OSError, RecursionError, ValueError) as error:
        raise _not_a_subject(subject) from error
    if not isinstance(document, dict):
        raise _not_a_subject(subject)
    return document


def _not_a_subject(subject: Path) -> AgentError:
    found = f"{subject}" if subject.exists() else f"no file or folder {subject}"
    expected = "a calibration.json, a plan.json, an artefact's folder or a state directory"
    return AgentError("report.subject", found, expected, "give the path of one of them")
