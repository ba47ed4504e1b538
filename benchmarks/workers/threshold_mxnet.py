"""MXNet's C++ entropy search, which TVM took over; with TVM's scale, a 128th of the threshold."""

from __future__ import annotations

import mxnet as mx
import numpy as np


def amax(counts: np.ndarray) -> float:
    """127 times the scale, in bins. The middle one of an odd number of bins lies across zero."""
    signed = np.concatenate((counts[:0:-1], [2 * counts[0]], counts[1:])).astype(np.float32)
    edges = np.arange(-counts.size + 1, counts.size + 1, dtype=np.float32)
    threshold, _ = mx.nd.contrib.calibrate_entropy(mx.nd.array(signed), mx.nd.array(edges), num_quantized_bins=255)
    return float(threshold.asnumpy()[0]) * 127.0 / 128.0
