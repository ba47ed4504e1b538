"""All kinds of input, by their names in the table."""

from __future__ import annotations

from collections.abc import Mapping

from attack import archives, documents, onnx_files, pictures, requests, state_files, yaml_texts
from attack.case import Kind

KINDS: Mapping[str, Kind] = {
    "YAML": yaml_texts.cases,
    "ONNX": onnx_files.cases,
    "pictures": pictures.cases,
    "archives, data sets": archives.cases,
    "MQTT, to a board": documents.board_cases,
    "MQTT, to a collector": documents.collector_cases,
    "MQTT, uploads, chunks": documents.upload_cases,
    "state files": state_files.cases,
    "HTTP": requests.cases,
}
