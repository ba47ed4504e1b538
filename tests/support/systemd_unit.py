"""The units as systemd reads them."""

from __future__ import annotations

import configparser
import os
import shutil
from pathlib import Path

import pytest
from places import ROOT

UNIT = ROOT / "systemd" / "tared.service"
DROP_INS = ROOT / "systemd" / "tared.service.d"
DROP_IN = DROP_INS / "jit-hardened.conf"
MAX_EXPOSURE = 2.0  # of 10, by systemd-analyze


def read_unit(section: str = "Service", path: Path = UNIT) -> configparser.SectionProxy:
    """A section of the unit, or of a drop-in."""
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # keeps the case of keys
    unit.read(path)
    return unit[section]


@pytest.fixture
def systemd_analyze() -> str:
    """The program. TARED_REQUIRE_SYSTEMD=1 turns its absence into a failure."""
    program = shutil.which("systemd-analyze")
    if program is None:
        if os.environ.get("TARED_REQUIRE_SYSTEMD") == "1":
            pytest.fail("systemd-analyze is not installed: apt-get install systemd")
        pytest.skip("systemd-analyze is not installed: apt-get install systemd")
    return program
