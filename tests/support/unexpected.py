"""A callback for errors that must not come."""

from __future__ import annotations

import pytest


def unexpected(error: object) -> None:
    """Fail the test with the error."""
    pytest.fail(f"unexpected: {error}")
