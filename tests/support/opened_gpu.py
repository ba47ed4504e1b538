"""The GPU of this machine, once for all tests."""

from __future__ import annotations

import os

import pytest

from engines.cuda.gpu import Gpu
from engines.errors import DeviceError


def opened_gpu() -> Gpu:
    try:
        return Gpu()
    except DeviceError as error:
        if os.environ.get("REQUIRE_GPU") == "1":
            pytest.fail(f"REQUIRE_GPU=1, and {error}")
        pytest.skip(str(error))
