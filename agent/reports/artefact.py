"""Show an artefact: the verdict that it passed, its plan and its calibration."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent.common.html.pages import Section, Table, render_report, show_bytes, show_share
from agent.reports.calibration import calibration_facts, calibration_sections
from agent.reports.plan import plan_sections, show_ious
from calibrate.plan import PrecisionPlan
from engines.calibration import load_calibration
from engines.store.artefact import Artefact
from engines.store.files import replace_files
from engines.store.signing import MANIFEST

_REPORTS = "reports"  # a folder of the state directory: an artefact's own folder is sealed
_OWNER_ONLY = 0o600  # a report shows frames: the user of the daemon may read it, and nobody else on the board
_PLAN, _CALIBRATION = "plan.json", "calibration.json"


def artefact_report(artefact: Artefact, missed: Sequence[tuple[bytes, str]] = ()) -> str:
    """Return the report on an artefact, one HTML file.

    missed: JPEGs of frames on which its engine and the float reference differ, each with what each of them saw.
    Raises EngineError and CalibrationError for a damaged plan or calibration.
    """
    manifest, sections = artefact.manifest, list[Section]()
    verdict = manifest.get("verdict")
    if verdict is not None:
        sections.append(_verdict(verdict, missed))
    if _PLAN in manifest["files"]:
        sections += plan_sections(PrecisionPlan.from_json(artefact.read_file(_PLAN).decode("utf-8")))
    facts = _facts(artefact)
    if _CALIBRATION in manifest["files"]:
        calibration = load_calibration(artefact.path / _CALIBRATION)
        facts |= {name: fact for name, fact in calibration_facts(calibration).items() if name not in facts}
        sections += calibration_sections(calibration)
    lead = str(verdict["reason"]) if verdict is not None else "This engine was built by hand: no verdict has judged it."
    return render_report(f"Engine {artefact.id}", lead, sections, facts)


def keep_report(state_dir: Path, artefact_id: str, content: str) -> None:
    """Write the report on an artefact of a state directory, and remove those whose artefact has gone.

    Raises OSError.
    """
    folder = state_dir / _REPORTS
    folder.mkdir(mode=0o700, exist_ok=True)
    kept = {each.name for each in (state_dir / "artefacts").iterdir()}
    for report in folder.glob("*.html"):
        if report.stem not in kept:
            report.unlink(missing_ok=True)
    replace_files({folder / f"{artefact_id}.html": content.encode()}, mode=_OWNER_ONLY)


def _facts(artefact: Artefact) -> dict[str, str]:
    manifest = artefact.manifest
    runtime = manifest["inputs"].get("backend", {})
    facts = {
        "precision": str(manifest["inputs"].get("precision", "")).upper(),
        "work in INT8": show_share(manifest.get("int8_macs_share")),
        "runtime": f"{runtime.get('runtime', '?')} {str(runtime.get('version', '')).partition('-')[0]}",
        "size": show_bytes(manifest.get("engine_bytes", 0)),
        "made": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime((artefact.path / MANIFEST).stat().st_mtime)),
    }
    return {name: fact for name, fact in facts.items() if fact}


def _verdict(verdict: Mapping[str, Any], missed: Sequence[tuple[bytes, str]]) -> Section:
    """Return the section on the comparison with the reference, on held-out frames."""
    facts = {
        "fidelity to float": f"{verdict['fidelity']:.3f}",
        "held-out frames": f"{verdict['frames']}, {verdict['empty_frames']} of them empty",
        "time": f"{verdict['latency_ms']:.3g} ms",
    }
    if verdict.get("fidelity_serving") is not None:
        facts["fidelity of the engine before"] = f"{verdict['fidelity_serving']:.3f}"
        facts["gain, with 95 % confidence"] = f"{verdict['gain_low']:+.3f} to {verdict['gain_high']:+.3f}"
    if verdict.get("ious"):
        facts["IoU with float, all pixels"] = show_ious(verdict["ious"])
    for name, key in (("time of the engine before", "latency_serving_ms"), ("time in float", "latency_float_ms")):
        if verdict.get(key) is not None:
            facts[name] = f"{verdict[key]:.3g} ms"
    tables = []
    if verdict.get("classes"):
        tables.append(_classes(verdict["classes"]))
    if verdict.get("confused"):
        rows = [(words,) for words in verdict["confused"]]
        tables.append(Table((("classes newly confused", False),), rows))
    text = ["The job compared this engine with the float reference, frame by frame, before it was put into service."]
    if missed:
        text.append("The pictures show frames on which the two differ. They stay on this board.")
    return Section("Verdict", text, facts, tables=tables, pictures=missed)


def _classes(classes: Mapping[str, Sequence[int]]) -> Table:
    rows = [
        (name, (show_share(kept / seen if seen else 1.0), kept / seen if seen else 1.0), (str(seen), seen))
        for name, (kept, seen) in classes.items()
    ]
    heads = (("class, as the reference sees it", False), ("the engine agrees", True), ("frames with it", True))
    return Table(heads, rows, "Agreement by class")
