"""Where the tests find the project's files, and what Python processes that they start have to see."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
FAKES = ROOT / "tests" / "fakes"

# PYTHONPATH of a process that imports the product and the tests' own modules.
TEST_PATH = os.pathsep.join(map(str, (ROOT, SUPPORT, FAKES)))
# The same on a machine whose `tensorrt` and `pycuda` are the fakes.
FAKE_MACHINE_PATH = os.pathsep.join((str(FAKES / "fake_machine"), TEST_PATH))
