"""The command `histograms`: what the calibration in service has counted, for the fleet, where the owner lets it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pydantic import JsonValue

from agent.commands import Handler, Report
from agent.commands_config import PrivacyConfig
from agent.errors import AgentError, CommandError
from agent.histogram_upload import MAX_UPLOAD_BYTES, Facts, write_upload
from agent.histogram_upload_chunks import Upload
from agent.link import MqttLink
from agent.requests import HistogramsArgs
from agent.service import Service
from engines.calibration import Calibration

SENDING = "SENDING"  # the step at which chunks are on their way


class HistogramOrders:
    """`handlers` has the one. In the supervisor's thread, where `post` has a function run."""

    def __init__(
        self,
        privacy: PrivacyConfig,
        service: Service,
        link: MqttLink,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._privacy = privacy
        self._service = service
        self._link = link
        self._post = post
        self._report: Report | None = None
        self._upload: Upload | None = None
        self._of = ""  # the artefact that it is of
        self.handlers: Mapping[str, Handler] = {"histograms": self._on_histograms}

    def _on_histograms(self, args: HistogramsArgs, report: Report) -> None:
        """Raises CommandError."""
        if not self._privacy.histograms:
            found, remedy = "privacy.histograms is false", "let the board's owner set it in config.yaml"
            raise CommandError("command.privacy", found, "leave to send histograms", remedy)
        if self._report is not None and not self._report.latest.final:
            found, remedy = "an upload under way", "wait for its end, then ask for what is missing"
            raise CommandError("command.busy", found, "none", remedy)
        upload = self._content(self._service.calibration)
        wanted = args.missing if args.upload == upload.sha256 else None
        numbers = [number for number in range(upload.total) if wanted is None or number in wanted]
        self._report = report
        count = len(numbers)
        told: dict[str, JsonValue] = {
            "upload": upload.name,
            "sha256": upload.sha256,
            "total": upload.total,
            "bytes": len(upload.content),
        }
        report.progress(SENDING, 0.0, told)
        if not count:
            report.succeed(told)
            return

        def advance(left: int, refusal: str) -> None:
            if refusal:
                found, remedy = "a broker that refuses its chunks", f"see to {refusal}"
                report.fail(AgentError("command.histograms", found, "one that takes them", remedy))
            elif not left:
                report.succeed(told)
            else:
                report.progress(SENDING, round(100.0 * (count - left) / count, 1), told)

        self._link.send_histograms(upload, numbers, lambda left, refusal: self._post(lambda: advance(left, refusal)))

    def _content(self, calibration: Calibration | None) -> Upload:
        """What would be sent now. Raises CommandError."""
        if calibration is None:
            found, remedy = "the float reference serves", "recalibrate first"
            raise CommandError("command.histograms", found, "a calibration in service", remedy)
        if calibration.merged:
            found, remedy = "a merged calibration in service, of other boards too", "recalibrate first"
            raise CommandError("command.histograms", found, "one of this board's own frames", remedy)
        serving = self._service.serving.id
        if self._upload is None or self._of != serving:
            content = write_upload(self._facts(calibration), calibration.histograms)
            if len(content) > MAX_UPLOAD_BYTES:
                found, remedy = f"histograms of {len(content)} bytes", "a model with fewer tensors"
                raise CommandError("command.histograms", found, f"at most {MAX_UPLOAD_BYTES}", remedy)
            self._upload, self._of = Upload.of(content), serving
        return self._upload

    def _facts(self, calibration: Calibration) -> Facts:
        model = self._service.planned
        return Facts(
            model=calibration.model_sha256,
            observed=model.observed_id,
            method=calibration.method,
            frames=calibration.frames,
            preprocessing=dict(calibration.preprocessing),
            shared=[list(group) for group in model.placement.shared],
        )
