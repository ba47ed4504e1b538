"""Replace the model that is served: a child process tries the new one, and the next run of the daemon serves it.

A new model arrives in one of two ways: the model's file on the disk changes, or a model is delivered by command. A job
builds its float reference, compares its answers with those of today, and tries it on live frames. A delivered model
takes the place of the model's file once it has passed that probation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from agent.commands.deliveries import StagedModel
from agent.commands.dispatcher import CANCELLED
from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError
from agent.jobs.job import MODEL, Job, JobRegistry, JobTracker
from agent.jobs.recalibration import CHANGED, Recalibration
from agent.validation.model_change import ANSWERS
from calibrate.errors import TaredError

# Seconds until the next try, after an error that says nothing of the model: no headroom, a full disk, a rollback.
_RETRY_S = 60.0
_SUPERSEDED = "superseded by a newer model"


class NewModel:
    """The new model, if there is one. Runs in the supervisor's thread.

    A delivered model is tried once, and the result is reported to its sender, who may send it again.

    Attributes:
        needs_new_run: This run has to end: the next one serves what the model's file holds.
    """

    def __init__(
        self,
        jobs: Recalibration,
        registry: JobRegistry,
        withdraw: Callable[[JobTracker, str], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """withdraw: takes the engine of this job back, for this reason, where it is on probation."""
        self._jobs = jobs
        self._registry = registry
        self._withdraw = withdraw
        self._clock = clock
        self._content = ""
        self._staged: StagedModel | None = None
        self._is_untried = False
        self._trial: JobTracker | None = None
        self._try_at_s = 0.0
        self.needs_new_run = False

    def content_changed(self, content: str) -> None:
        """The model's file holds other content; empty: the served content again. The running job is superseded."""
        if self.needs_new_run and content == self._content:  # a delivered one, in its place by now
            return
        if not content and self._staged is not None:  # the delivered one is to be tried all the same
            return
        job = self._jobs.job
        if content or (job is not None and job.tracker.trigger == MODEL):
            self._jobs.abandon(_SUPERSEDED)
        self._expect(content)

    def deliver(self, staged: StagedModel) -> None:
        """A model was delivered. The running job is superseded."""
        self._jobs.abandon(_SUPERSEDED)
        self._expect(staged.content)
        self._staged = staged

    def commit(self, tracker: JobTracker) -> None:
        """The model has passed its probation: put a delivered one in the place of the model's file.

        The next run ends the job; where the disk refuses, the job fails, and the next run serves the model of before.
        """
        self.needs_new_run = True
        if self._staged is not None:
            try:
                self._staged.install()
            except AgentError as error:
                tracker.fail(error)
                return
            self._staged = None

    def drop(self, reason: str) -> bool:
        """Cancel a delivered model that waits for its trial; False where there is none."""
        staged, self._staged = self._staged, None
        if staged is None:
            return False
        self._end_trial(reason)
        self._is_untried = False
        staged.discard()
        staged.progress.fail(
            AgentError(CANCELLED, reason, "a delivery that may run to its end", "send the command again")
        )
        return True

    def tick(self, idle: bool) -> None:
        """Try the model as soon as the daemon is idle, and again if a trial said nothing of the model.

        Raises AgentError (`state.write`).
        """
        if self._trial is not None and self._trial.state.is_finished:
            try_again = not self.drop("its trial has ended")  # the job has reported to the sender
            self._trial, self._is_untried, self._try_at_s = None, try_again, self._clock.monotonic_s() + _RETRY_S
        if self._is_untried and idle and self._clock.monotonic_s() >= self._try_at_s:
            staged = self._staged
            command = staged.progress if staged is not None else None
            on_failure = partial(self._on_failure, self._content)
            tracker = self._registry.start(MODEL, {"content": self._content}, command, on_failure)
            self._trial, self._is_untried = tracker, False
            self._jobs.start(Job(tracker, staged=staged))

    def _expect(self, content: str) -> None:
        self.drop(_SUPERSEDED)
        self._end_trial(_SUPERSEDED)
        self._content, self._is_untried, self.needs_new_run = content, bool(content), False
        self._try_at_s = 0.0

    def _end_trial(self, reason: str) -> None:
        """Forget the trial; a model that answers live frames already is taken back, so that nothing is committed."""
        trial, self._trial = self._trial, None
        if trial is not None and not trial.state.is_finished:
            self._withdraw(trial, reason)

    def _on_failure(self, content: str, error: TaredError) -> None:
        """Try this content no more where the error is the model's own; a sender may send it again."""
        if content != self._content:  # another one has come meanwhile
            return
        if error.code not in (CHANGED, ANSWERS) and not error.code.startswith("probation."):
            return
        staged, self._trial, self._staged = self._staged, None, None
        if staged is None:
            return
        if error.code == CHANGED:
            staged.forget()
        else:  # the received file stays, so that consent to it costs no second transfer
            staged.discard()
