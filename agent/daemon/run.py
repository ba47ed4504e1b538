"""Run the daemon (`tared run`): open the model, the broker and the outputs, serve, review, and return the summary.

After a change of the model's file a new Supervisor takes over; the broker, the outputs and the metrics stay open.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from importlib.metadata import version
from typing import TypeVar

from agent.camera.gstreamer import check_gstreamer
from agent.camera.reader import source_length, source_seconds
from agent.collection.selection import HELD_OUT_EVERY
from agent.commands.authority import Authority
from agent.commands.recognition import CommandRecognition
from agent.common.console import say
from agent.common.errors import AgentError, CameraError, ConfigError
from agent.common.http.addresses import is_loopback
from agent.config import Config
from agent.contract.messages import Birth
from agent.contract.topics import Topics
from agent.control.snapshot import BoardSnapshot
from agent.control.summary import RunSummary
from agent.core.kinds import Trigger
from agent.daemon.review import Panel, read_labels, review
from agent.daemon.supervisor import Supervisor
from agent.models.external_data import external_names
from agent.models.model import Model, open_model, read_plan, slower_here
from agent.models.model_watch import content_of
from agent.models.offline_work import not_used
from agent.mqtt.client import Endpoint
from agent.results.file_output import ResultsFile
from agent.results.mqtt_output import ResultsTopic
from agent.results.preview import Preview
from agent.results.socket_output import ResultsSocket
from agent.results.writer import Output, ResultsWriter
from agent.state.store import StateStore
from agent.system.process import ending_in_time, handling_signals, notify_service_manager, raise_interrupt
from agent.system.state_dir import lock_state_dir
from agent.uplink.home_assistant import Discovery
from agent.uplink.link import MqttLink
from agent.uplink.outbox import Outbox
from agent.validation.verdict import MIN_INFORMATIVE
from agent.vision.labels import Truth
from agent.vision.tasks.opening import open_task
from calibrate.errors import TaredError
from calibrate.plan import PrecisionPlan
from engines.board import board
from engines.registry import choose_backend
from engines.store.artefact import Store, read_artefact
from engines.store.signing import find_key

log = logging.getLogger(__package__)

_COLLECTED_WITHIN = 0.25  # share of a recording; the rest shows the new engine
_SAFELY = 0.8  # share of the frames that a recording has for a calibration: a busy machine observes fewer
_OWNER_ONLY = 0o077  # umask
_FEWEST = (HELD_OUT_EVERY - 1) * MIN_INFORMATIVE  # frames, before which too few are held out for a verdict


T = TypeVar("T")
Pages = Callable[[Endpoint], AbstractContextManager[None]]


def run_daemon(config: Config, frame_limit: int = 0, pages: Pages | None = None) -> RunSummary:
    """Serve until the sources end or a signal comes; then review the engines if a single labelled video was served.

    pages: serves the board's pages while the block runs, by the broker.

    Raises TaredError for what cannot start, and what stopped the frame path.
    """
    labels = {
        camera.name: read_labels(camera.labels, config.model)
        for camera in config.every_camera
        if camera.labels is not None
    }
    for camera in config.every_camera:
        check_gstreamer(camera.to_source())
    os.umask(_OWNER_ONLY)  # as the service's unit has it: held-out frames, say, are private from the first byte
    with ending_in_time(), lock_state_dir(config.state_dir):
        state = StateStore(config.state_dir)
        return _run(config, state, frame_limit, labels, pages or (lambda _endpoint: nullcontext()))


def _run(
    config: Config, state: StateStore, frame_limit: int, labels: Mapping[str, Mapping[int, Truth]], pages: Pages
) -> RunSummary:
    content, model, unused_plan = _open_model(config)
    in_float = model.build_request(model.master, "fp32")
    chosen = choose_backend(config.backend, config.backend_options(), in_float)
    backend = chosen.backend
    log.info("backend=%s not_taken=%r", backend.name, dict(chosen.not_taken))
    config = config.model_copy(update={"backend": backend.name})  # the children open the same
    if warning := slower_here(model.plan, backend.describe()):
        say(f"warning: {warning}")
    config = _fit_to_recordings(config)
    mqtt = config.mqtt
    authority = Authority(config.commands, Topics(mqtt.fleet, mqtt.device), is_loopback(mqtt.host))
    if authority.warning:
        say(f"warning: {authority.warning}")
    birth = Birth(
        agent_version=version("tared"),
        hardware=dict(board()),
        runtimes={**backend.describe(), **{f"not {name}": why for name, why in chosen.not_taken.items()}},
        model=model.sha256,
        commands=authority.description,
    )
    with (
        handling_signals(raise_interrupt),
        _open_metrics(config) as set_metrics_source,
        _open_link(config, state, birth, authority, pages) as link,
        _open_results(config, link) as results,
        _open_preview(config) as preview,
    ):

        def serve() -> RunSummary:
            supervisor = Supervisor(
                config,
                state,
                model,
                backend,
                link,
                birth,
                frame_limit,
                labels,
                content,
                authority,
                results,
                unused_plan,
                preview,
            )
            set_metrics_source(lambda: supervisor.newest, link)
            return supervisor.run()

        summary = serve()
        while summary.stopped_by == Trigger.MODEL:
            notify_service_manager("WATCHDOG=1")
            try:
                content, model, unused_plan = _open_model(config)
            except TaredError as error:  # changed again since it was tried: the previous model serves on
                say(f"warning: {error}")
            birth = birth.model_copy(update={"model": model.sha256})
            summary = serve()
    camera = config.every_camera[0]
    kind = open_task(config.model).labels
    unnamed = kind.unnamed if kind is not None else None  # nothing is there
    reviewed = unnamed is not None and camera.name in labels and len(config.every_camera) == 1
    if reviewed and not camera.loop and not summary.stopped_by and summary.periods():
        ids = dict.fromkeys(swap.artefact for swap in summary.swaps)
        artefacts = [read_artefact(config.state_dir / "artefacts" / identity, find_key()) for identity in ids]
        try:
            with closing(Panel(model, backend, artefacts)) as panel:
                summary.accuracy = review(panel, camera.to_source(), labels[camera.name], unnamed, summary.periods())
        except TaredError as error:
            say(f"no review: {error}")  # the run itself was good: return its summary
    summary.backend = chosen.text
    return summary


def _fit_to_recordings(config: Config) -> Config:
    """Let frames for the calibration be collected within a quarter of the longest recording, if that is shorter.

    A recording that is too short for a calibration is named, with the settings that would do. Raises CameraError if the
    only recording cannot be read. Of several, the feed of the unreadable one reports it.
    """
    sources = [camera.to_source() for camera in config.every_camera]
    try:
        lengths_s = [source_seconds(source) for source in sources]
        frames = sum(source_length(source) or 0 for source in sources)
    except CameraError:
        if len(config.every_camera) == 1:
            raise
        return config
    known_s = [length_s for length_s in lengths_s if length_s is not None and length_s > 0.0]
    if len(known_s) < len(lengths_s):
        return config
    if shortage := shortage_of_frames(config, frames, max(known_s)):
        say(f"warning: {shortage}")
    within_s = min(config.calibration.within_s, _COLLECTED_WITHIN * max(known_s))
    return config.model_copy(update={"calibration": config.calibration.model_copy(update={"within_s": within_s})})


def shortage_of_frames(config: Config, frames: int, length_s: float) -> str:
    """Return what a calibration needs and recordings do not have, with the settings that would do; empty if they do.

    A first calibration that begins with work done offline needs frames for its verdict alone.

    Args:
        frames: In all recordings together.
        length_s: Of the longest, in s of media time.
    """
    calibration, calibrating = config.calibration, 1.0 - 1.0 / HELD_OUT_EVERY
    usable = int(calibrating * min(frames, length_s / config.observe.alert_period_s))
    if calibration.frames <= usable or config.start is not None or calibration.file is not None:
        return ""
    enough = int(_SAFELY * usable)
    found = (
        f"a calibration needs {calibration.frames} frames over {calibration.within_s:g} s, this recording has "
        f"{length_s:.0f} s, in which at most {usable} are observed for it"
    )
    smaller = f"set calibration: {{frames: {enough}}}, or " if enough >= _FEWEST else "set "
    return f"{found}; {smaller}camera.loop: true"


def _open_model(config: Config) -> tuple[str, Model, AgentError | None]:
    """Return the content of the model's file, the model, and why the configured plan is not used; None where it is.

    A plan that cannot be used stops no board: the model is under the plan of `current` then, so that it serves on.

    Raises TaredError as `open_model`, and ConfigError (`model.unreadable`) if the file goes meanwhile.
    """
    path = config.model.path
    try:
        content = content_of(path, external_names) if path.is_file() else ""
    except OSError as error:
        found = f"{path}: {error.strerror}"
        raise ConfigError(
            "model.unreadable", found, "an ONNX file that the daemon's user may read", "put the model's file there"
        ) from error
    if config.plan is None:
        return content, open_model(config.model), None
    try:
        return content, open_model(config.model, read_plan(config.plan)), None
    except TaredError as error:
        if not error.code.startswith("plan."):
            raise
        unused = not_used("plan", config.plan, error)
    with suppress(TaredError):
        current = Store(config.state_dir, find_key()).read("current")
        if current is not None:
            plan = PrecisionPlan.from_json(current.read_file("plan.json").decode())
            return content, open_model(config.model, plan), unused
    return content, open_model(config.model), unused


@contextmanager
def _open_link(
    config: Config, state: StateStore, birth: Birth, authority: Authority, pages: Pages
) -> Iterator[MqttLink | None]:
    """Yield the link to the configured broker, or to an embedded one; None if neither works: the video goes on.

    pages: opened beside the broker.
    """
    mqtt = config.mqtt
    topics = Topics(mqtt.fleet, mqtt.device)
    with ExitStack() as stack:
        if mqtt.host is not None:
            endpoint = mqtt.endpoint()
            if endpoint.exposes_password:
                say("warning: the broker's password crosses the network unencrypted; set mqtt.tls")
        else:
            from agent.mqtt.embedded_broker import EmbeddedBroker  # asyncio's 2 MiB: only for the sample

            try:
                broker = stack.enter_context(EmbeddedBroker())
            except AgentError as error:
                say(f"no MQTT: {error}")
                yield None
                return
            endpoint = Endpoint(broker.host, broker.port, mqtt.keepalive_s, protocol="3.1.1")
            say(f"embedded MQTT broker; watch it: mosquitto_sub -h {broker.host} -p {broker.port} -v -t 'tared/v1/#'")
        stack.enter_context(pages(endpoint))
        try:
            outbox = stack.enter_context(Outbox(config.state_dir / "outbox.sqlite", topics, mqtt.outbox))
            discovery = Discovery(
                topics,
                [camera.name for camera in config.every_camera],
                birth,
                state,
                mqtt.home_assistant,
                button=authority.allows_unsigned,  # Home Assistant signs nothing
            )
            recognition = CommandRecognition(authority)
            made = MqttLink(endpoint, topics, birth, outbox, discovery=discovery, recognise=recognition)
            link = stack.enter_context(made)
        except OSError as error:  # a descriptor is refused
            say(f"no MQTT: {error}")
            link = None
        yield link


@contextmanager
def _open_metrics(config: Config) -> Iterator[Callable[[Callable[[], BoardSnapshot], MqttLink | None], None]]:
    """Yield `DaemonMetrics.set_source`; without metrics.port nothing is loaded, and nothing happens."""
    if config.metrics.port is None:
        yield lambda *_: None
        return
    from agent.daemon.prometheus import DaemonMetrics, serve_metrics

    metrics = DaemonMetrics()
    with _going_without("metrics", lambda: serve_metrics(config, metrics)):
        yield metrics.set_source


@contextmanager
def _open_results(config: Config, link: MqttLink | None) -> Iterator[ResultsWriter | None]:
    """Yield the writer of the configured outputs; None without any. Raises ConfigError as `ResultsSocket`."""
    outputs: list[Output] = []
    if config.results.file is not None:
        outputs.append(ResultsFile(config.results.file))
    if config.results.socket is not None:
        outputs.append(ResultsSocket(config.results.socket))
    if config.results.mqtt_per_s and link is not None:
        outputs.append(ResultsTopic(link.send_detections, config.results.mqtt_per_s))
    if not outputs:
        yield None
        return
    with _going_without("results", lambda: ResultsWriter(config, outputs)) as results:
        yield results


def _open_preview(config: Config) -> AbstractContextManager[Preview | None]:
    """Return the preview, whose context it is; without an address there is none."""
    return _going_without("preview", lambda: Preview(config)) if config.preview.address is not None else nullcontext()


@contextmanager
def _going_without(name: str, part: Callable[[], AbstractContextManager[T]]) -> Iterator[T | None]:
    """Yield a part that only reports; None, after a warning, where the system has no port or descriptor for it."""
    with ExitStack() as stack:
        entered: T | None = None
        try:
            entered = stack.enter_context(part())
        except OSError as error:
            say(f"warning: no {name}: {error.strerror or error}; restart the daemon once there is room for it")
        yield entered
