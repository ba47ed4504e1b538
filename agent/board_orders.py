"""The operator's commands to the board: its settings, its log, its process, its picture. In the supervisor's thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from agent.commands import Handler, Report
from agent.errors import CommandError
from agent.link import MqttLink
from agent.model_delivery import ModelDelivery
from agent.picture import annotated, encode_jpeg
from agent.pipeline import Pipeline
from agent.requests import LogLevelArgs, ModelArgs, RestartArgs, SetArgs, SnapshotArgs
from agent.settings import Settings

RESTART = "restart"  # why the run has ended
MAX_SNAPSHOT_BYTES = 512 * 1024
_SNAPSHOT_PERIOD_S = 1.0

log = logging.getLogger(__name__)


class BoardOrders:
    """`handlers` has one for each. stop: ends the run for this reason. link: None where nobody could give orders."""

    def __init__(
        self,
        settings: Settings,
        pipeline: Pipeline,
        delivery: ModelDelivery,
        link: MqttLink | None,
        stop: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._pipeline = pipeline
        self._delivery = delivery
        self._link = link
        self._stop = stop
        self._next_snapshot_s = 0.0  # monotonic
        self.handlers: Mapping[str, Handler] = {
            "set": self._on_set,
            "log_level": self._on_log_level,
            "restart": self._on_restart,
            "snapshot": self._on_snapshot,
            "model": self._on_model,
        }

    def _on_set(self, args: SetArgs, report: Report) -> None:
        self._settings.set(args.values, report.mandate)
        reported = self._settings.reported()
        report.succeed({"version": reported.version, "values": reported.values})

    def _on_log_level(self, args: LogLevelArgs, report: Report) -> None:
        set_log_level(args.level)
        report.succeed({"level": args.level})

    def _on_restart(self, _args: RestartArgs, report: Report) -> None:
        """The result is on its way before the link closes, and published again by the next process if it was lost."""
        report.succeed()
        self._stop(RESTART)

    def _on_snapshot(self, args: SnapshotArgs, report: Report) -> None:
        config = self._settings.config
        if not config.privacy.snapshot:
            found, remedy = "privacy.snapshot is false", "let the board's owner set it in config.yaml"
            raise CommandError("command.privacy", found, "leave to send a picture", remedy)
        camera = args.camera if args.camera is not None else next(iter(self._pipeline.feeds))
        if camera not in self._pipeline.feeds:
            found, expected = f"camera {camera[:64]!a}", " or ".join(ascii(name) for name in self._pipeline.feeds)
            raise CommandError("command.camera", found, expected, "send it again with one of these")
        served, now_s = self._pipeline.feeds[camera].newest, time.monotonic()
        if served is None or self._link is None:
            raise CommandError("command.snapshot", "no frame yet", "one", "send it again in a moment")
        if now_s < self._next_snapshot_s:
            raise CommandError("command.busy", "a snapshot a moment ago", "one a second", "send it again in a moment")
        self._next_snapshot_s = now_s + _SNAPSHOT_PERIOD_S
        frame = served.frame
        image = annotated(served, config.model) if args.annotated else frame.image
        jpeg, (height, width) = encode_jpeg(image, MAX_SNAPSHOT_BYTES)
        self._link.send_snapshot(jpeg)
        report.succeed(
            {
                "camera": camera,
                "frame": frame.id,
                "ts": frame.ts,
                "width": width,
                "height": height,
                "bytes": len(jpeg),
            }
        )

    def _on_model(self, args: ModelArgs, report: Report) -> None:
        self._delivery.begin(args, report, time.time())


def set_log_level(level: str) -> None:
    """Of everything that is logged here."""
    log.info("log_level=%s", level)
    logging.getLogger().setLevel(level.upper())
