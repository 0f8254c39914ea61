"""The arrays of the pipeline's messages."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
