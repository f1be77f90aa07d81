"""Errors of the offload helper, and the texts that autograd uses for the same events."""

import torch

HINT = (
    " Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
    "with torch.autograd.set_detect_anomaly(True)."
)
HINT_IN_ANOMALY_MODE = (
    " Hint: the backtrace further above shows the operation that failed to compute its gradient. "
    "The variable in question was changed in there or anywhere later. Good luck!"
)


class OffloadError(RuntimeError):
    """A saved tensor could not be brought back; the message names it and its size."""


class OffloadHostMemoryError(OffloadError):
    """The host has no more memory that a device can copy to; the tensor stays on its device."""


def mutation_error(
    type_name: str, size: tuple[int, ...], origin: str, version: int, expected: int
) -> RuntimeError:
    """The error that autograd raises for a saved tensor changed in place, word for word.

    `origin` is ", which is output 0 of ReluBackward0," or empty. Source of the text: torch's
    autograd/saved_variable.cpp.
    """
    hint = HINT_IN_ANOMALY_MODE if torch.is_anomaly_enabled() else HINT
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{type_name} {list(size)}]{origin} is at version {version}; expected version "
        f"{expected} instead.{hint}"
    )
