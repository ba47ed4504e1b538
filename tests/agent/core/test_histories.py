"""Random histories of a board: whatever happens, in whatever order, decisions keep their promises."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace

from decisions import DAY_S, VERDICT, DecidedBoard, refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from raising_world import config_of

from agent.common.errors import AgentError
from agent.contract.commands import SwitchArgs
from agent.core import actions as act
from agent.core import facts as fact
from agent.core.kinds import FleetCalibration, NewModel, Recall, Requested
from agent.core.state import Job, JobState, State

PER_DAY, COOLDOWN_S = 3, 600.0
STEPS = ("CALIBRATING", "PLANNING", "BUILDING", "VALIDATING", "SINGING")
CODES = ("recalibration.refused", "recalibration.disk", "recalibration.memory", "precision.exhausted", "model.answers")
# Actions that the system may refuse; all others report their own errors.
MAY_FAIL = (act.Begin, act.Join, act.Enter, act.MakeRoom, act.HandOver, act.Load, act.StartTrial,
            act.MakeCurrent, act.InstallModel)  # fmt: skip


@dataclass
class Witness:
    """Checks each action against those before it."""

    open: dict[str, Job] = field(default_factory=dict)
    accepted: set[str] = field(default_factory=set)
    tried: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)
    own_s: list[float] = field(default_factory=list)
    failed_s: float = -math.inf
    asked: set[str] = field(default_factory=set)
    answers: Counter[str] = field(default_factory=Counter)
    refused: list[act.Action] = field(default_factory=list)

    def see(self, action: act.Action, refused: bool, now_s: float) -> None:
        if refused:
            self.refused.append(action)
            return
        if isinstance(action, act.Begin):
            self._begins(action.job, now_s)
        elif isinstance(action, act.Join):
            self.open[action.job.id] = action.job
        elif isinstance(action, act.StartTrial):
            assert action.job.id in self.accepted or action.job.kind.is_proven, "no engine is tried without a verdict"
            self.tried.add(action.job.id)
        elif isinstance(action, act.MakeCurrent):
            assert action.job.id in self.kept, "no engine becomes current that was not on trial"
        elif isinstance(action, act.End):
            self._ends(action, now_s)
        elif isinstance(action, act.AnswerCommand):
            self.answers[action.command] += 1

    def _begins(self, job: Job, now_s: float) -> None:
        if not isinstance(job.kind, Recall):
            others = [each for each in self.open.values() if not isinstance(each.kind, Recall)]
            assert not others, "never two jobs"
        if job.kind.is_own:
            assert now_s - self.failed_s >= COOLDOWN_S, "a failure is followed by a pause"
            self.own_s.append(now_s)
            assert sum(now_s - each < DAY_S for each in self.own_s) <= PER_DAY, "the daily cap holds"
        self.open[job.id] = job

    def _ends(self, action: act.End, now_s: float) -> None:
        job = self.open.pop(action.job.id, None)
        assert job is not None, "a job that began ends once"
        if job.kind.is_own and action.state in (JobState.FAILED, JobState.ROLLED_BACK):
            self.failed_s = now_s
        for command in action.job.commands:
            self.answers[command] += 1


class Walk:
    """A board to which things happen; the executor's part is played by `DecidedBoard`."""

    def __init__(self) -> None:
        self.board = DecidedBoard(config_of(per_day=PER_DAY, cooldown_s=COOLDOWN_S))
        self.board.settings = self.board.settings.model_copy(
            update={"probation": self.board.settings.probation.model_copy(update={"rollbacks_per_day": 2})}
        )
        self.board.fails = self._fails
        self.board.facts["known"] = ("day", "dusk")
        self.witness, self.next_fails, self.commands = Witness(), "", 0
        self.board.facts["collected"] = (10_000, 100)
        self.take(fact.Started(0))

    def _fails(self, action: act.Action) -> AgentError | None:
        error = None
        if self.next_fails == type(action).__name__:
            self.next_fails, error = "", refusal("store.write")
        self.witness.see(action, error is not None, self.board.monotonic_s)
        return error

    def take(self, event: fact.Event) -> None:
        if isinstance(event, fact.ChildEnded) and event.error is None:
            self.witness.accepted.add(event.job)
        if isinstance(event, (fact.CandidateServes, fact.TrialEnded)):
            self.witness.kept.add(event.job)
        self.board.take(event)
        state = self.board.state
        assert state.pending is None, "what is about to begin has begun, or has failed"
        assert state.trial is None or state.job is not None
        assert state.job is None or not state.job.state.is_finished
        running = [job for job in self.witness.open.values() if not isinstance(job.kind, Recall)]
        assert [job.id for job in running] == ([state.job.id] if state.job is not None else [])

    def command(self) -> str:
        self.commands += 1
        self.witness.asked.add(f"c{self.commands}")
        return f"c{self.commands}"

    @property
    def job(self) -> str:
        """The running job, or one of long ago, whose late messages count for nothing."""
        return self.board.state.job.id if self.board.state.job is not None else "gone"

    def kill(self) -> None:
        """The process ends at once; the next one ends the jobs in the journal, and answers all commands."""
        state, witness = self.board.state, self.witness
        on_probation = state.trial is not None and state.job is not None and not state.job.kind.is_proven
        for command in witness.asked:  # those of jobs by the journal, all others by the log of commands
            witness.answers.setdefault(command, 1)
        witness.open.clear()
        self.board.state = State(state.memory, state.answered, state.vain, ahead_s=state.ahead_s)
        self.take(fact.Started(int(on_probation)))

    def _decides_every_trial(self) -> None:
        """A candidate that has answered enough is kept, or goes back: none stays on probation for ever."""
        self.board.facts["probation"] = fact.ProbationNow(True, None)
        self.take(fact.Tick())
        trial = self.board.state.trial
        assert trial is None or not trial.serves or trial.leaves is not None or self.board.state.needs_new_run
        asked_back = {action.job.id for action in self.board.actions if isinstance(action, act.GoBack)}
        assert trial is None or trial.leaves is None or self.job in asked_back, "it leaves once it was asked to"

    def end(self) -> None:
        """The daemon ends, and every command has been answered, but that of a model for the next run."""
        self.next_fails = ""
        self._decides_every_trial()
        self.take(fact.Stopping("the source has ended"))
        waits = self.board.state.job.commands if self.board.state.job is not None else ()
        for command in self.witness.asked - set(waits):
            assert self.witness.answers[command], f"{command} was never answered"
        assert self.board.state.job is None or self.board.state.needs_new_run


def happens(walk: Walk, what: str, number: int) -> None:
    """Let one thing happen."""
    board, drift = walk.board, walk.board.camera.drift
    assert drift is not None
    match what:
        case "tick":
            for _ in range(1 + number % 3):
                walk.take(fact.Tick())
        case "time":
            board.turn((1.0, 61.0, 601.0, 90_000.0)[number % 4])
        case "clock":
            board.wall_s += (-1e8, -3600.0, 3600.0, 1e8)[number % 4]
        case "light":
            state = ("calm", "alarm", "alarm", "warning")[number % 4]
            board.camera = replace(board.camera, drift=replace(drift, state=state, serving_db=9.0))
        case "regime":
            wanted = ("", "dusk")[number % 2]
            board.camera = replace(board.camera, drift=replace(drift, switch_to=wanted, serving_db=9.0))
        case "view":
            trouble = ("", "blind", "moved", "frozen")[number % 4]
            board.camera = replace(board.camera, view=replace(board.camera.view, trouble=trouble))
        case "frames":
            board.facts["collected"] = ((0, 0), (10_000, 100))[number % 2]
        case "heat":
            board.facts["headroom"] = ("", "hot", refusal("headroom.delay"))[number % 3]
        case "fails":
            walk.next_fails = MAY_FAIL[number % len(MAY_FAIL)].__name__
        case "asked":
            kind = (Requested(), Requested(64), FleetCalibration("f", "f"))[number % 3]
            walk.take(fact.Asked(walk.command(), kind))
        case "cancelled":
            walk.take(fact.AskedToCancel(walk.command()))
        case "back":
            walk.take(fact.AskedToGoBack(walk.command(), ("dusk", "")[number % 2]))
        case "switch":
            walk.take(
                fact.AskedToSwitch(walk.command(), SwitchArgs(regime=("dusk", "nowhere", board.serving)[number % 3]))
            )
        case "model":
            walk.take(fact.ModelChanged(("another", "a third", "")[number % 3]))
        case "delivered":
            walk.take(fact.ModelDelivered(f"content {number}", walk.command()))
        case "child":
            if board.state.job is not None and board.state.job.child_since_s is not None:
                walk.take(fact.ChildAdvanced(walk.job, STEPS[number % len(STEPS)], number % 101))
        case "built":
            if board.state.job is not None and board.state.job.child_since_s is not None:
                walk.take(fact.ChildEnded(walk.job, "dawn", VERDICT))
        case "not built":
            if board.state.job is not None and board.state.job.child_since_s is not None:
                walk.take(fact.ChildEnded(walk.job, "", None, refusal(CODES[number % len(CODES)])))
        case "serves":
            if board.state.trial is not None and not board.state.trial.serves:
                board.facts["probation"] = fact.ProbationNow(bool(number % 2), None)
                walk.take(fact.CandidateServes(walk.job, 1.0, 0))
        case "judged":
            objection = refusal("probation.fidelity") if number % 3 == 0 else None
            board.facts["probation"] = fact.ProbationNow(number % 3 == 1, objection)
            walk.take(fact.Tick())
        case "left":
            if board.state.trial is not None:
                code = ("probation.hang", "probation.recalled", "recalibration.cancelled")[number % 3]
                walk.take(fact.CandidateLeft(walk.job, refusal(code), 2.0, bool(number % 2)))
        case "frames end":
            if board.state.trial is not None:
                walk.take(fact.TrialEnded(walk.job))
        case "wrong reference":
            walk.take(fact.ReferenceWrong())
        case "disk":
            walk.take(fact.DecisionFailed(refusal("control.failed")))
        case "killed":
            walk.kill()


THINGS = (
    "tick", "tick", "tick", "time", "clock", "light", "regime", "view", "frames", "heat", "fails", "asked",
    "cancelled", "back", "switch", "model", "delivered", "child", "built", "built", "not built", "serves", "serves",
    "judged", "left", "frames end", "wrong reference", "disk", "killed",
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(THINGS), st.integers(0, 11)), max_size=60))
def test_whatever_happens_decisions_keep_their_promises(history: list[tuple[str, int]]) -> None:
    """Never two jobs, no engine without a verdict, limits kept, each command answered, whatever fails."""
    walk = Walk()
    for what, number in history:
        happens(walk, what, number)
    walk.end()


def test_a_model_that_was_kept_ends_the_run_and_its_job_is_the_next_ones() -> None:
    walk = Walk()
    walk.take(fact.ModelDelivered("new", walk.command()))
    for what in ("tick", "tick", "built"):
        happens(walk, what, 1)
    happens(walk, "serves", 1)
    assert walk.board.state.needs_new_run
    assert isinstance(walk.board.state.job and walk.board.state.job.kind, NewModel)
    walk.end()
