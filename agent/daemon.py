"""`tared run`: everything around the supervisor, from the broker to the summary."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from importlib.metadata import version
from pathlib import Path

from agent.accuracy import Truth
from agent.broker import EmbeddedBroker
from agent.camera import parse_source
from agent.config import Config, MqttConfig
from agent.console import say
from agent.detections import LabelledBoxes
from agent.errors import AgentError, ConfigError
from agent.link import MqttLink
from agent.messages import Birth
from agent.model import open_model, read_plan, slower_here
from agent.mqtt import Endpoint
from agent.review import Panel, read_classes, read_labels, review
from agent.signals import handling_signals, interrupt
from agent.summary import RunSummary
from agent.supervisor import Supervisor
from agent.topics import Topics
from calibrate.errors import TaredError
from calibrate.plan import ALL_INT8
from engines.backend import open_backend
from engines.board import board
from engines.seal import find_key
from engines.store import read_artefact


def run_daemon(config: Config, frame_limit: int = 0) -> RunSummary:
    """Serve until the source ends or a signal comes; on labelled video, review the engines afterwards.

    Raises TaredError for what cannot start, and what stopped the frame path.
    """
    labels = _labels(config)
    with _owning(config.state_dir):
        return _run(config, frame_limit, labels)


def _run(config: Config, frame_limit: int, labels: Mapping[int, Truth] | None) -> RunSummary:
    backend = open_backend(config.backend, config.backend_options())
    model = open_model(config.model, read_plan(config.plan) if config.plan else ALL_INT8)
    if warning := slower_here(model.plan, backend.describe()):
        say(f"warning: {warning}")
    birth = Birth(
        agent_version=version("tared"), hardware=dict(board()), runtimes=dict(backend.describe()), model=model.sha256
    )
    with handling_signals(interrupt), _link(config.mqtt, birth) as link:
        summary = Supervisor(config, model, backend, link, birth, frame_limit, labels).run()
    boxes = {frame: truth for frame, truth in (labels or {}).items() if isinstance(truth, LabelledBoxes)}
    if labels is not None and config.model.task == "detect" and not summary.stopped_by and summary.periods():
        ids = dict.fromkeys(swap.artefact for swap in summary.swaps)
        artefacts = [read_artefact(config.state_dir / "artefacts" / identity, find_key()) for identity in ids]
        try:
            with closing(Panel(model, backend, artefacts)) as panel:
                summary.accuracy = review(panel, parse_source(config.camera.source), boxes, summary.periods())
        except TaredError as error:
            say(f"no review: {error}")  # the run itself was good, and its summary is still to be told
    return summary


def _labels(config: Config) -> Mapping[int, Truth] | None:
    """Raises ConfigError (`labels.task`), DatasetError (`labels.unreadable`)."""
    path, spec = config.camera.labels, config.model
    if path is None:
        return None
    if spec.task == "detect":
        return read_labels(path)
    if spec.task == "classify":
        return read_classes(path, spec.labels)
    found = f"camera.labels with a model of task '{spec.task}'"
    raise ConfigError("labels.task", found, "task detect or classify", "set camera.labels to null")


@contextmanager
def _owning(state_dir: Path) -> Iterator[None]:
    """Hold the state directory: one daemon at a time. The lock goes with the process, however it ends.

    Raises AgentError: `state.unwritable`, `state.locked`.
    """
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        lock = (state_dir / "lock").open("w")
    except OSError as error:
        found = f"{state_dir}: {error.strerror}"
        raise AgentError("state.unwritable", found, "a writable folder", "correct state_dir") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise AgentError(
                "state.locked",
                f"another daemon on {state_dir}",
                "one at a time",
                "stop it, or choose another state_dir",
            ) from None
        yield


@contextmanager
def _link(config: MqttConfig, birth: Birth) -> Iterator[MqttLink | None]:
    """The link to the configured broker, or to an embedded one; None when there is neither: the video goes on."""
    topics = Topics(config.fleet, config.device)
    with ExitStack() as stack:
        if config.host is not None:
            host, port = config.host, config.port
        else:
            try:
                broker = stack.enter_context(EmbeddedBroker())
            except AgentError as error:
                say(f"no MQTT: {error}")
                yield None
                return
            host, port = broker.host, broker.port
            say(f"embedded MQTT broker; watch it: mosquitto_sub -h {host} -p {port} -v -t 'tared/v1/#'")
        endpoint = Endpoint(host, port, config.keepalive_s, config.username, config.password_file)
        yield stack.enter_context(MqttLink(endpoint, topics, birth))
