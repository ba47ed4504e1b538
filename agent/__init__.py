"""The daemon on a board, and the commands that work without it.

Each package opens with its purpose, its reading order and its public names; docs/architecture.md has all of them on one
page. Reading order, along a frame and then along a change of engine: camera, serving, vision, results; monitoring,
collection, control, jobs, planning, models, validation; then what reports and obeys: contract, mqtt, uplink, commands,
daemon; and cli, inspection, doctor, system, common. `config` is the schema of config.yaml; `detections` has a name that
decoders of others import.
"""

from __future__ import annotations

import os

# The threads of NumPy's OpenBLAS spin after each product, and no product here is large enough to need them. OpenBLAS
# reads the variable when NumPy is first imported; child processes inherit it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
