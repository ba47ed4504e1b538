"""A board for tests of decisions: values alone, on a clock that tests turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from raising_world import config_of, observer_state

from agent.common.errors import AgentError
from agent.config import Config
from agent.core import actions as act
from agent.core import facts as fact
from agent.core.decide import decide
from agent.core.state import Attempt, State
from agent.monitoring.camera_monitor import CameraState
from agent.monitoring.drift import Regime
from agent.validation.verdict import Verdict

DAY_S = 86_400.0
SCENE = Regime("scene", {"x": 0.5}, {"x": 3.0}, {"x": (0.25, 0.125)})
VERDICT = Verdict(True, "", 32, 0, 0.95, 0.9, 0.0, 0.0, 1.0, 1.0, 1.0)


def refusal(code: str = "recalibration.refused") -> AgentError:
    return AgentError(code, "a loss of 0.45", "at most 0.1", "keep layers float")


@dataclass
class DecidedBoard:
    """Takes events, and keeps the actions. Their effects come at once, unless a test says else.

    Args:
        fails: Returns the error of an action that is to fail, else None.
        serving: Id of the engine in service.
    """

    settings: Config = field(default_factory=config_of)
    state: State = field(default_factory=State)
    serving: str = "day"
    is_degraded: bool = False
    monotonic_s: float = 1000.0
    wall_s: float = 1.8e9
    actions: list[act.Action] = field(default_factory=list)
    fails: Callable[[act.Action], AgentError | None] = lambda _: None
    facts: dict[str, Any] = field(default_factory=dict)
    jobs: int = 0

    def __post_init__(self) -> None:
        self.state = replace(self.state, memory=replace(self.state.memory, raised_under="rules"))
        self.state = replace(self.state, ahead_s=self.wall_s - self.monotonic_s)
        self.camera = observer_state(self.settings, (0.95, 1.0, 200))
        if self.is_degraded:
            self.camera = replace(self.camera, drift=None)

    def take(self, event: fact.Event) -> list[act.Action]:
        """Take an event, and those that follow from it; return all actions."""
        done: list[act.Action] = []
        events = deque([event])
        while events:
            decision = decide(self.now, self.settings, self.state, self.look(), events.popleft())
            self.state = decision.state
            for action in decision.actions:
                done.append(action)
                error = self.fails(action)
                if error is not None:
                    events.appendleft(fact.Failed(action, error))
                    break
                events.extend(self.follows(action))
        self.actions += done
        return done

    def follows(self, action: act.Action) -> list[fact.Event]:
        """Return what an action that succeeds brings about at once."""
        if isinstance(action, act.Begin):
            return [fact.Begun(action.job.id)]
        if isinstance(action, act.HandOver):
            attempt = Attempt(f"settings of {self.serving}", SCENE) if action.job.kind.calibrates else None
            return [fact.HandedOver(action.job.id, attempt, self.settings.max_loss)]
        if isinstance(action, act.Load):
            return [fact.Loaded(action.job.id, action.artefact)]
        if isinstance(action, act.Keep):
            return [fact.CandidateKept(action.job.id)]
        if isinstance(action, act.MakeCurrent):
            self.serving, self.is_degraded = action.artefact, False
            return [fact.MadeCurrent(action.job.id, action.artefact), fact.SettingsChanged()]
        return []

    @property
    def now(self) -> fact.Now:
        return fact.Now(self.monotonic_s, self.wall_s)

    def look(self) -> fact.BoardFacts:
        self.jobs += 1
        known: dict[str, Any] = {
            "fresh": f"job{self.jobs}",
            "cameras": {"camera": self.camera},
            "serving": self.serving,
            "is_degraded": self.is_degraded,
            "settings": f"settings of {self.serving}",
            "raising": "rules",
            "collected": (10_000, 100),
            "probation": fact.ProbationNow(True, None) if self.state.trial is not None else None,
        }
        return fact.BoardFacts(**{**known, **self.facts})

    def turn(self, seconds: float) -> None:
        self.monotonic_s += seconds
        self.wall_s += seconds

    def tick(self, times: int = 1, **changes: Any) -> list[act.Action]:
        """Look so many times. changes: of the camera's state, from now on."""
        self.camera = replace(self.camera, **changes)
        return [action for _ in range(times) for action in self.take(fact.Tick())]

    def alarm(self) -> CameraState:
        assert self.camera.drift is not None
        self.camera = replace(self.camera, drift=replace(self.camera.drift, state="alarm", serving_db=9.0))
        return self.camera

    def child_ends(self, error: AgentError | None = None, artefact: str = "night") -> list[act.Action]:
        """The child of the running job ends with an accepted candidate, or with an error."""
        assert self.state.job is not None
        return self.take(fact.ChildEnded(self.state.job.id, artefact, None if error else VERDICT, error))

    def serves(self) -> list[act.Action]:
        """The candidate answers its first frame."""
        assert self.state.job is not None
        return self.take(fact.CandidateServes(self.state.job.id, 1.0, 0))

    @property
    def trigger(self) -> str:
        """Of the running job; empty for none."""
        return self.state.job.kind.trigger.value if self.state.job is not None else ""

    @property
    def held_back(self) -> str:
        return self.state.held_back.code if self.state.held_back is not None else ""

    def count(self, kind: type[act.Action]) -> int:
        return sum(isinstance(action, kind) for action in self.actions)
