"""Ours beside the peers', same inputs, same run; ratios, not absolute times. Results: RESULTS.md."""

import engines  # noqa: F401  # before any benchmark imports ONNX Runtime, which would report elsewhere
