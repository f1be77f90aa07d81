from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

class _BuildInfo(TypedDict):
    version: str
    compiler: str
    cxx_standard: int
    build_type: str
    sanitized: bool

def build_info() -> _BuildInfo: ...
def best_fit_decreasing(
    lengths: NDArray[np.int64], capacity: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
