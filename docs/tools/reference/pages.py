"""All pages of the reference, by their path in the repository."""

from __future__ import annotations

from docs.tools.reference.command_line import command_line_page
from docs.tools.reference.configuration import configuration_page, model_page
from docs.tools.reference.errors import errors_page
from docs.tools.reference.events import events_page
from docs.tools.reference.jobs import jobs_page
from docs.tools.reference.metrics import metrics_page
from docs.tools.reference.mqtt import mqtt_page

_PAGES = {
    "configuration": configuration_page,
    "model-spec": model_page,
    "command-line": command_line_page,
    "mqtt": mqtt_page,
    "events": events_page,
    "metrics": metrics_page,
    "errors": errors_page,
    "jobs": jobs_page,
}


def pages() -> dict[str, str]:
    """Return the text of every page by its path; it depends on no date, machine or terminal."""
    return {f"docs/reference/{name}.md": make() for name, make in _PAGES.items()}
