"""The seam between tared and the inference runtimes. Knows calibrate, never agent."""

from __future__ import annotations

import os

# From its import on ONNX Runtime, 1.29 and later, tells Microsoft what runs here, by way of a thread and a database in
# the user's cache. Only what is set before that import keeps it from all of it. Source: Privacy.md in its package.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
