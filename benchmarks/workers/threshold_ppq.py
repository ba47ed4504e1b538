"""PPQ's KL search, in its own environment."""

from __future__ import annotations

import numpy as np
import torch
from ppq.core import QuantizationPolicy, QuantizationProperty, TensorQuantizationConfig
from ppq.IR import Variable
from ppq.quantization.observer.range import TorchHistObserver

_POLICY = QuantizationProperty.SYMMETRICAL | QuantizationProperty.LINEAR | QuantizationProperty.PER_TENSOR
_CONFIG = TensorQuantizationConfig(QuantizationPolicy(_POLICY.value if hasattr(_POLICY, "value") else _POLICY))


def amax(counts: np.ndarray) -> float:
    """127 times PPQ's scale, in bins."""
    observer = TorchHistObserver(Variable("x"), _CONFIG, hist_bins=counts.size)
    scale, _ = observer.hist_to_scale_offset(torch.from_numpy(counts.astype(np.int32)), counts.size, 1.0, _CONFIG)
    return 127.0 * float(scale)
