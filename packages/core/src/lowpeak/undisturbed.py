"""Run a model aside from its training: for tests of what lowpeak is about to do with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode for a while, after which nothing tells that anything ran.

    The mode of each module and the state of the random generators come back. Autocast caches no
    weight meanwhile: one cast without gradient would serve the training step that follows, and its
    parameter would get no gradient. Quantised layers run in train mode: on a CPU, bitsandbytes
    packs a 4-bit weight anew at its first forward in eval mode, and rounds its scales to bfloat16.
    """
    modes = {module: module.training for module in model.modules()}
    devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    kind = next(iter(devices)).type if devices else "cpu"
    autocast = torch.autocast(
        kind,
        enabled=torch.is_autocast_enabled(kind),
        dtype=torch.get_autocast_dtype(kind),
        cache_enabled=False,
    )
    generators = torch.random.fork_rng(
        devices=[device.index for device in devices],
        device_type="cuda" if kind == "cpu" else kind,
    )
    with generators, autocast:
        model.eval()
        for module in modes:
            if any(not p.is_floating_point() for p in module.parameters(recurse=False)):
                module.training = True
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode
