"""Ranges for Nsight Systems: there when asked for, nothing when not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import numpy as np
import pytest

from calibrate.errors import TaredError
from engines import trace


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ranges that NVIDIA's package would show."""
    events: list[str] = []

    @contextmanager
    def annotate(name: str) -> Iterator[None]:
        events.append(f"{name} (")
        yield
        events.append(f") {name}")

    module = ModuleType("nvtx")
    module.annotate = annotate  # type: ignore[attr-defined]  # a module made here has no types
    monkeypatch.setitem(sys.modules, "nvtx", module)
    monkeypatch.setattr(trace, "_annotate", None)
    return events


def test_ranges_are_traced_only_on_request(reported: list[str]) -> None:
    with trace.span("infer"):
        pass
    assert reported == []
    trace.start_tracing()
    with trace.span("observe"), trace.span("infer"):
        pass
    assert reported == ["observe (", "infer (", ") infer", ") observe"]


def test_every_frame_is_waited_for_in_a_range(reported: list[str]) -> None:
    trace.start_tracing()
    frames = [(0.0, np.zeros(1)), (0.1, np.ones(1))]
    assert list(trace.spanned("capture", iter(frames))) == frames
    assert reported == ["capture (", ") capture"] * 3  # the third finds the end


def test_without_the_package_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(TaredError, match=r"trace\.missing.*pip install nvtx"):
        trace.start_tracing()
