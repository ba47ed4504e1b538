"""The page of jobs: their kinds, and the states that they go through, as the decisions of agent.core make them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace

from agent.common.errors import AgentError
from agent.common.schema import validate
from agent.config import Config
from agent.core import actions as act
from agent.core import facts as fact
from agent.core.decide import decide
from agent.core.kinds import (
    DriftAlarm,
    FirstStart,
    FleetCalibration,
    Kind,
    NewModel,
    OfflineStart,
    OperatorRollback,
    RaisedPrecision,
    Rebuild,
    Recall,
    Requested,
    Scheduled,
    Switch,
    WrongReference,
)
from agent.core.state import Job, JobState, State
from docs.tools.reference.markdown import code, fenced, heading, page, paragraph, prose, table

_INTRODUCTION = """\
A job makes a new engine, or puts another one in service. One runs at a time. Each of its states is in the journal
before anything of the state is started. [Swaps](../concepts/swaps.md) explains what happens in each."""

KINDS: tuple[Kind, ...] = (
    FirstStart(),
    OfflineStart("start", "artefact", "attempt"),
    DriftAlarm(),
    WrongReference(),
    Scheduled("2026-01-31 03:00"),
    RaisedPrecision(1, 0.8, "day"),
    Requested(),
    FleetCalibration("file", "file"),
    NewModel("content"),
    Switch("night"),
    OperatorRollback("night"),
    Recall("day"),
    Rebuild("day"),
)
_STEPS = (JobState.PLANNING, JobState.BUILDING, JobState.VALIDATING)
_BROKEN = AgentError("recalibration.child", "found", "expected", "remedy")
_SETTINGS = {"model": {"path": "model.onnx", "task": "raw"}, "camera": {"source": "rtsp://camera"}}


def jobs_page() -> str:
    """Return the page."""
    rows = [
        (
            code(type(kind).__name__),
            code(kind.trigger.value),
            prose(inspect.getdoc(type(kind)).split("\n\n")[0].split(". ")[0].replace("\n", " ").rstrip(".")),  # type: ignore[union-attr]
            "yes" if kind.is_own else "",
            "yes" if kind.collects else "",
            "yes" if kind.calibrates else "",
        )
        for kind in KINDS
    ]
    heads = ("Kind", "Trigger", "What asks for it", "Counts for the limits", "Collects frames", "A refusal holds")
    explained = (
        "What counts for the limits starts by itself: at most recalibration.per_day of these jobs begin in a day, and "
        "none within recalibration.cooldown_s of a failure. A refusal holds until the settings or the scene change: "
        "until then no such job begins by itself. The trigger is the word in events and in the journal."
    )
    drawn = ["stateDiagram-v2", "  direction LR", "  [*] --> REQUESTED", *(f"  {a} --> {b}" for a, b in transitions())]
    states = (
        "The diagram shows every change of state in the runs of all kinds, but for two ends: an unfinished job may "
        "become FAILED or CANCELLED in each state. A child process reports the steps from CALIBRATING to VALIDATING."
    )
    return page(
        "Jobs",
        _INTRODUCTION,
        [
            heading(2, "kinds", "Kinds"),
            table(heads, rows),
            paragraph(prose(explained)),
            heading(2, "states", "States"),
            paragraph(prose(states)),
            fenced("\n".join(drawn), "mermaid"),
        ],
    )


def transitions() -> list[tuple[str, str]]:
    """Return the changes of state that decisions make, in the order of the states."""
    found = {edge for kind in KINDS if not isinstance(kind, (Rebuild, Recall)) for edge in _changes(kind)}
    found |= {(JobState.REQUESTED, JobState.BUILDING), (JobState.BUILDING, JobState.COMMITTED)}  # Rebuild, at a start
    order = list(JobState)
    return [(a.value, b.value) for a, b in sorted(found, key=lambda edge: (order.index(edge[0]), order.index(edge[1])))]


def _changes(kind: Kind) -> Iterator[tuple[JobState, JobState]]:
    """Yield the changes of state of one kind, whose run may end well, or be taken back."""
    for last in ((fact.CandidateKept("job"), fact.MadeCurrent("job", "night")), (fact.CandidateLeft("job", _BROKEN),)):
        settings = validate(Config, _SETTINGS, "the page of jobs")
        state = State(pending=Job("job", kind, 0.0))
        at = JobState.REQUESTED
        served = fact.CandidateServes("job", 1.0, 0)
        steps = [fact.ChildAdvanced("job", each.value, 50) for each in _STEPS]
        child = [fact.Tick(), *steps, fact.ChildEnded("job", "night"), fact.Loaded("job", "night")]
        for event in (fact.Begun("job"), *(() if kind.is_proven else child), served, *last):
            if isinstance(event, fact.ChildAdvanced) and not at.may_become(JobState(event.step)):
                continue  # a new model is not planned
            facts = fact.BoardFacts(
                "fresh", {}, "day", collected=(10_000, 100), probation=fact.ProbationNow(False, None)
            )
            decision = decide(fact.Now(1.0, 1.0), settings, replace(state, is_untidy=False), facts, event)
            state = decision.state
            for action in decision.actions:
                if not isinstance(action, (act.Enter, act.End)):
                    continue
                now = action.state if isinstance(action, act.End) else action.job.state
                if now is not at:
                    yield at, now
                at = now
