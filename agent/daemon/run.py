"""`tared run`: everything around the supervisor, from the broker to the summary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from importlib.metadata import version
from pathlib import Path

from agent.camera.opencv import check_readable
from agent.camera.reader import source_seconds
from agent.commands.authority import Authority
from agent.common.console import say
from agent.common.errors import AgentError, CameraError, ConfigError
from agent.config import Config
from agent.contract.messages import Birth
from agent.contract.topics import Topics
from agent.control.summary import RunSummary
from agent.daemon.review import Panel, read_classes, read_labels, review
from agent.daemon.status import DaemonSnapshot
from agent.daemon.supervisor import Supervisor
from agent.jobs.job import MODEL
from agent.models.model import Model, open_model, read_plan, slower_here
from agent.models.model_watch import content_of
from agent.monitoring.accuracy import Truth
from agent.mqtt.client import Endpoint
from agent.mqtt.endpoint import is_loopback
from agent.results.file_output import ResultsFile
from agent.results.mqtt_output import ResultsTopic
from agent.results.socket_output import ResultsSocket
from agent.results.writer import Output, ResultsWriter
from agent.system.process import handling_signals, interrupt, notify_service_manager
from agent.system.state_dir import lock_state_dir
from agent.uplink.home_assistant import Discovery
from agent.uplink.link import MqttLink
from agent.uplink.outbox import Outbox
from agent.vision.detections import LabelledBoxes
from agent.vision.spec import ModelSpec
from calibrate.errors import TaredError
from calibrate.plan import ALL_INT8
from engines.board import board
from engines.registry import open_backend
from engines.store.artefact import read_artefact
from engines.store.signing import find_key

_COLLECTED_WITHIN = 0.25  # of a recording: what is to be seen of the engine comes after that


def run_daemon(config: Config, frame_limit: int = 0) -> RunSummary:
    """Serve until the sources end or a signal comes; review the engines then, on a labelled video that was alone.

    Raises TaredError for what cannot start, and what stopped the frame path.
    """
    labels = _labels(config)
    for camera in config.every_camera:
        check_readable(camera.opened())
    with lock_state_dir(config.state_dir):
        return _run(config, frame_limit, labels)


def _run(config: Config, frame_limit: int, labels: Mapping[str, Mapping[int, Truth]]) -> RunSummary:
    backend = open_backend(config.backend, config.backend_options())
    content, model = _open(config)
    if warning := slower_here(model.plan, backend.describe()):
        say(f"warning: {warning}")
    config = _fitted(config)
    authority = _authority(config)
    birth = Birth(
        agent_version=version("tared"),
        hardware=dict(board()),
        runtimes=dict(backend.describe()),
        model=model.sha256,
        commands=authority.described,
    )
    with (
        handling_signals(interrupt),
        _scraped(config) as follow,
        _link(config, birth, authority) as link,
        _results(config, link) as results,
    ):

        def serve() -> RunSummary:
            supervisor = Supervisor(
                config, model, backend, link, birth, frame_limit, labels, content, authority, results
            )
            follow(supervisor.moment)
            return supervisor.run()

        summary = serve()
        while summary.stopped_by == MODEL:
            notify_service_manager("WATCHDOG=1")
            try:
                content, model = _open(config)
            except TaredError as error:  # changed once more since it was tried: the one before serves on
                say(f"warning: {error}")
            birth = birth.model_copy(update={"model": model.sha256})
            summary = serve()
    camera = config.every_camera[0]
    boxes = {frame: truth for frame, truth in labels.get(camera.name, {}).items() if isinstance(truth, LabelledBoxes)}
    reviewed = config.model.task == "detect" and camera.name in labels and len(config.every_camera) == 1
    if reviewed and not summary.stopped_by and summary.periods():
        ids = dict.fromkeys(swap.artefact for swap in summary.swaps)
        artefacts = [read_artefact(config.state_dir / "artefacts" / identity, find_key()) for identity in ids]
        try:
            with closing(Panel(model, backend, artefacts)) as panel:
                summary.accuracy = review(panel, camera.opened(), boxes, summary.periods())
        except TaredError as error:
            say(f"no review: {error}")  # the run itself was good, and its summary is still to be told
    return summary


def _authority(config: Config) -> Authority:
    """Raises ConfigError as `Authority`."""
    mqtt = config.mqtt
    authority = Authority(config.commands, Topics(mqtt.fleet, mqtt.device), is_loopback(mqtt.host))
    if authority.warning:
        say(f"warning: {authority.warning}")
    return authority


def _fitted(config: Config) -> Config:
    """Recordings that are shorter than collecting takes have a quarter of their time to collect in. Raises CameraError
    where an only one cannot be read; of several its feed tells so."""
    try:
        lengths_s = [source_seconds(camera.opened()) for camera in config.every_camera]
    except CameraError:
        if len(config.every_camera) == 1:
            raise
        return config
    known_s = [length_s for length_s in lengths_s if length_s is not None and length_s > 0.0]
    if len(known_s) < len(lengths_s):
        return config
    within_s = min(config.calibration.within_s, _COLLECTED_WITHIN * max(known_s))
    return config.model_copy(update={"calibration": config.calibration.model_copy(update={"within_s": within_s})})


def _open(config: Config) -> tuple[str, Model]:
    """The model, and the content of its file. Raises TaredError as `open_model` and `read_plan`, and ConfigError
    (`model.unreadable`) where the file goes meanwhile."""
    path = config.model.path
    try:
        content = content_of(path) if path.is_file() else ""
    except OSError as error:
        found = f"{path}: {error.strerror}"
        raise ConfigError("model.unreadable", found, "a model's file that can be read", "put one there") from error
    return content, open_model(config.model, read_plan(config.plan) if config.plan else ALL_INT8)


def _labels(config: Config) -> Mapping[str, Mapping[int, Truth]]:
    """By camera, of those that have any. Raises ConfigError (`labels.task`), DatasetError (`labels.unreadable`)."""
    paths = {camera.name: camera.labels for camera in config.every_camera}
    return {name: _read_labels(path, config.model) for name, path in paths.items() if path is not None}


def _read_labels(path: Path, spec: ModelSpec) -> Mapping[int, Truth]:
    """Raises as `_labels`."""
    if spec.task == "detect":
        return read_labels(path)
    if spec.task == "classify":
        return read_classes(path, spec.labels)
    found = f"labels of a camera with a model of task '{spec.task}'"
    raise ConfigError("labels.task", found, "task detect or classify", "take labels away")


@contextmanager
def _link(config: Config, birth: Birth, authority: Authority) -> Iterator[MqttLink | None]:
    """The link to the configured broker, or to an embedded one; None when there is neither: the video goes on."""
    mqtt = config.mqtt
    topics = Topics(mqtt.fleet, mqtt.device)
    with ExitStack() as stack:
        if mqtt.host is not None:
            endpoint = mqtt.endpoint()
            if endpoint.exposes_password:
                say("warning: the broker's password goes over the network as it is; set mqtt.tls")
        else:
            from agent.mqtt.embedded_broker import EmbeddedBroker  # asyncio's 2 MiB are for the sample, not for boards

            try:
                broker = stack.enter_context(EmbeddedBroker())
            except AgentError as error:
                say(f"no MQTT: {error}")
                yield None
                return
            endpoint = Endpoint(broker.host, broker.port, mqtt.keepalive_s, protocol="3.1.1")
            say(f"embedded MQTT broker; watch it: mosquitto_sub -h {broker.host} -p {broker.port} -v -t 'tared/v1/#'")
        outbox = stack.enter_context(Outbox(config.state_dir / "outbox.sqlite", topics, mqtt.outbox))
        discovery = _discovery(config, topics, birth, authority)
        yield stack.enter_context(MqttLink(endpoint, topics, birth, outbox, discovery=discovery))


@contextmanager
def _scraped(config: Config) -> Iterator[Callable[[Callable[[], DaemonSnapshot]], None]]:
    """Takes whom a scrape is to ask. What nobody scrapes is not loaded."""
    if config.metrics.port is None:
        yield lambda _: None
        return
    from agent.daemon.prometheus import exposing

    with exposing(config.metrics.host, config.metrics.port) as exposition:
        yield exposition.follow


@contextmanager
def _results(config: Config, link: MqttLink | None) -> Iterator[ResultsWriter | None]:
    """Who gives the answers away; None where nobody wants them. Raises ConfigError as `ResultsSocket`."""
    wanted = config.results
    outputs: list[Output] = []
    if wanted.file is not None:
        outputs.append(ResultsFile(wanted.file))
    if wanted.socket is not None:
        outputs.append(ResultsSocket(wanted.socket))
    if wanted.mqtt_per_s and link is not None:
        outputs.append(ResultsTopic(link.send_detections, wanted.mqtt_per_s))
    if not outputs:
        yield None
        return
    with ResultsWriter(config, outputs) as results:
        yield results


def _discovery(config: Config, topics: Topics, birth: Birth, authority: Authority) -> Discovery:
    """The button is for boards that obey whoever does not sign: nobody signs for Home Assistant."""
    wanted = config.mqtt.home_assistant
    return Discovery(
        topics,
        [camera.name for camera in config.every_camera],
        birth,
        config.state_dir / "home_assistant",
        enabled=wanted.enabled,
        prefix=wanted.prefix,
        button=authority.unsigned,
    )
