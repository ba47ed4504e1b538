"""Who carries out what is said to the board over MQTT: the handler of every command, and who takes deliveries."""

from __future__ import annotations

from collections.abc import Callable

from agent.authority import Authority
from agent.board_orders import BoardOrders
from agent.calibration_delivery import CalibrationDelivery
from agent.delivery import Deliverers
from agent.histogram_upload_orders import HistogramOrders
from agent.labels import LabelsDesk
from agent.link import MqttLink
from agent.model_delivery import ModelDelivery
from agent.operations import Operations
from agent.orders import Orders
from agent.pipeline import Pipeline
from agent.recalibration import Post
from agent.releases import Releases
from agent.remote import Remote
from agent.reporting import Reporter
from agent.service import Service
from agent.settings import Settings


def open_remote(
    link: MqttLink,
    settings: Settings,
    service: Service,
    pipeline: Pipeline,
    operations: Operations,
    labels: LabelsDesk,
    authority: Authority | None,
    reporter: Reporter,
    watched: bool,
    post: Post,
    stop: Callable[[str], None],
) -> Remote:
    """watched: whether the model's file is, so that a delivered one is seen. post: runs a function in the supervisor's
    thread. stop: ends the daemon, for a reason."""
    config = settings.config
    releases = Releases(authority, config.state_dir / "releases.json")
    if releases.damage is not None:
        reporter.error(releases.damage)
    models = ModelDelivery(
        config.state_dir / "incoming",
        config.model.path,
        watched,
        config.store.reserve_bytes,
        releases,
        post,
        operations.new_model.bring,
    )
    calibrations = CalibrationDelivery(
        config.state_dir / "incoming_calibration",
        config.store.reserve_bytes,
        lambda: service.planned,
        post,
        operations.try_calibration,
    )
    deliveries = Deliverers((models, calibrations))
    handlers = {
        **Orders(operations, service, pipeline, deliveries).handlers,
        **BoardOrders(settings, pipeline, models, link, stop).handlers,
        **HistogramOrders(config.privacy, service, link, post).handlers,
        "calibration": calibrations.on_calibration,
    }
    return Remote(link, config.state_dir, handlers, settings, deliveries, labels, authority, reporter)
