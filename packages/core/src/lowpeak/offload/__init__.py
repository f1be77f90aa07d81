"""Activation offload: saved tensors live on the host between forward and backward."""

from lowpeak.offload.context import OffloadActivations
from lowpeak.offload.engine import CopyEngine
from lowpeak.offload.errors import OffloadError, OffloadHostMemoryError
from lowpeak.offload.keeping import kept_on_device
from lowpeak.offload.pinned_pool import PinnedPool, PinnedPoolStats
from lowpeak.offload.policy import SavedTensor
from lowpeak.offload.sim_engine import SimEngine
from lowpeak.offload.telemetry import Amount, OffloadStats

__all__ = [
    "Amount",
    "CopyEngine",
    "OffloadActivations",
    "OffloadError",
    "OffloadHostMemoryError",
    "OffloadStats",
    "PinnedPool",
    "PinnedPoolStats",
    "SavedTensor",
    "SimEngine",
    "kept_on_device",
]
