"""Build an engine in one step, and read the code of an engine's error: for the tests of the CPU backends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from onnx import ModelProto

from engines.errors import EngineError
from engines.interface import Backend, BuildRequest, Engine


def built(backend: Backend, model: ModelProto, **more: object) -> Engine:
    """more: further fields of the build request."""
    made = backend.build(BuildRequest(model, **more))  # type: ignore[arg-type]  # fields of several types
    return backend.load(made.engine)


def code_of(call: Callable[[], object]) -> str:
    """Fails unless the call raises an EngineError that says what was found, what was expected, and the remedy."""
    with pytest.raises(EngineError) as caught:
        call()
    assert all((caught.value.found, caught.value.expected, caught.value.remedy))
    return caught.value.code
