"""Deprecated: kept for one release for decoders that users wrote; import from agent.vision.detections instead."""

from agent.vision.detections import Detections as Detections
