"""Errors of the offload helper, and the texts that autograd uses for the same events."""

import threading
from functools import lru_cache

import torch


class OffloadError(RuntimeError):
    """A saved tensor could not be brought back; the message names it and its size."""


class OffloadHostMemoryError(OffloadError):
    """The host has no more memory that a device can copy to; the tensor stays on its device."""


def mutation_error(
    type_name: str, size: str, origin: str, version: int, expected: int
) -> RuntimeError:
    """The error that autograd raises for a saved tensor changed in place, word for word.

    `origin` is ", which is output 0 of ReluBackward0," or empty. Source of the text: torch's
    autograd/saved_variable.cpp.
    """
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{type_name} {size}]{origin} is at version {version}; expected version "
        f"{expected} instead.{_hint(torch.is_anomaly_enabled())}"
    )


@lru_cache(maxsize=2)
def _hint(anomaly_enabled: bool) -> str:
    """The hint at the end of autograd's error, which differs between versions: asked for once.

    In a thread of its own, where no saved-tensor hook is installed.
    """
    texts: list[str] = []

    def provoke() -> None:
        changed = torch.ones((), requires_grad=True).exp()
        changed.detach().zero_()
        try:
            changed.backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            texts.append(str(error))

    thread = threading.Thread(target=provoke)
    thread.start()
    thread.join()
    (text,) = texts
    return text[text.index(" Hint:") :]
