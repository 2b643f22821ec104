"""llama-server's ways to normalise an embedding, by its numbers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_NONE, _MAX_ABS, _EUCLIDEAN = -1, 0, 2
_INT16 = 32760.0  # the largest component that `_MAX_ABS` gives


def normalised(vector: npt.NDArray[np.float32], kind: int) -> npt.NDArray[np.float32]:
    """-1: as it is; 0: the largest component becomes 32760; 1: taxicab; 2: euclidean; p above: the p-norm."""
    if kind == _NONE:
        return vector
    values = np.abs(vector.astype(np.float64))
    if kind == _MAX_ABS:
        size = values.max(initial=0.0) / _INT16
    elif kind == _EUCLIDEAN:
        size = float(np.sqrt(np.square(values).sum()))
    else:
        largest = values.max(initial=0.0)  # taken out, so that a high power neither ends at 0 nor at infinity
        size = largest * float(np.power(np.power(values / (largest or 1.0), kind).sum(), 1.0 / kind))
    return (vector / size if size > 0 else np.zeros_like(vector)).astype(np.float32)
