"""Errors of the offload helper, and the texts that autograd uses for the same events."""

import threading
from functools import lru_cache

import torch

HINT_IN_ANOMALY_MODE = (
    " Hint: the backtrace further above shows the operation that failed to compute its gradient. "
    "The variable in question was changed in there or anywhere later. Good luck!"
)


@lru_cache(maxsize=1)
def hint() -> str:
    """How torch ends the message outside of anomaly mode, cut from an error provoked for it.

    Torch 2.13 says "set_detect_anomaly(True, check_nan=False)", older versions less. Autograd
    compares versions only on threads without saved-tensor hooks, hence on one of its own.
    """
    found: list[str] = []

    def provoke() -> None:
        value = torch.ones(1, requires_grad=True).exp()
        value.add_(1.0)
        try:
            value.backward()
        except RuntimeError as error:
            found.append(str(error))

    thread = threading.Thread(target=provoke, name="lowpeak-offload-hint")
    thread.start()
    thread.join()
    return found[0].rpartition("expected version 0 instead.")[2]


class OffloadError(RuntimeError):
    """A saved tensor could not be brought back; the message names it and its size."""


class OffloadHostMemoryError(OffloadError):
    """The host has no more memory that a device can copy to; the tensor stays on its device."""


def mutation_error(
    type_name: str, size: tuple[int, ...], origin: str, version: int, expected: int
) -> RuntimeError:
    """The error that autograd raises for a saved tensor changed in place, word for word.

    `origin` is ", which is output 0 of ReluBackward0," or empty: the node at saving, where torch
    names the one at the time of the error. Source of the text: torch's autograd/saved_variable.cpp.
    """
    ending = HINT_IN_ANOMALY_MODE if torch.is_anomaly_enabled() else hint()
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{type_name} {list(size)}]{origin} is at version {version}; expected version "
        f"{expected} instead.{ending}"
    )
