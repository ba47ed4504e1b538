"""Define the errors of this package; calibrate/errors.py has their base."""

from __future__ import annotations

from calibrate.errors import TaredError


class DeviceError(TaredError):
    """Report a GPU, its driver, its compiler or a launch that cannot be used."""


class EngineError(TaredError):
    """Report a model, graph, artefact or runtime that cannot be used."""
