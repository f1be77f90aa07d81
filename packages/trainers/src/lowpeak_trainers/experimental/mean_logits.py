"""The mean logit of many positions, from their hidden states.

TRL logs it over every position of a batch, prompts and padding among them, where no other output of
the head is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.utils.generic import ModelOutput

from lowpeak import fused_lm_head
from lowpeak.models import FusedForwardHandle
from lowpeak.models.inspection import Head, backbone_names, read_head
from lowpeak.models.self_test import Route


class HiddenStates:
    """The hidden states that the backbone of `model` returned last, without gradient."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._by_name: dict[str, Tensor] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record while this is open."""
        hooks = [
            self._model.get_submodule(name).register_forward_hook(self._recorder(name))
            for name in backbone_names(self._model)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def of(self, backbone_name: str) -> Tensor:
        """What the module of this name returned."""
        return self._by_name[backbone_name]

    def _recorder(self, name: str) -> Any:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, ModelOutput) and "last_hidden_state" in output:
                self._by_name[name] = output["last_hidden_state"].detach()

        return record


@torch.no_grad()
def mean_logits(
    model: Any,
    handle: FusedForwardHandle,
    groups: tuple[Tensor, ...],
    tokens: Tensor,
    scratch_bytes: int | None,
) -> tuple[Tensor, ...]:
    """Mean of each group, a scalar, over its positions and the whole vocabulary.

    Without a soft cap it is the product of two means, that of the hidden states and that of the
    rows of the head; else the positions go through the head in tiles.

    Args:
        model: the causal LM.
        handle: of its fused forward, which has been called.
        groups: hidden states [..., H] that its backbone returned.
        tokens: any of its labels.
        scratch_bytes: for the tiles.
    """
    route, head = handle.fused.route(model, tokens), read_head(model)
    groups = tuple(group.to(head.weight.device) for group in groups)
    if route.transform is not None and route.transform.softcap is None:
        scale = route.transform.scale
        return tuple(scale * mean for mean in _products_of_means(groups, head))
    head.require_whole_weight()
    return tuple(_by_tiles(route, head, group, scratch_bytes) for group in groups)


def _products_of_means(groups: tuple[Tensor, ...], head: Head) -> Iterator[Tensor]:
    dtype = torch.promote_types(head.weight.dtype, torch.float32)
    row = _whole(head.weight.mean(0, dtype=dtype))
    for low in head.adapters.low_rank:
        row = row + low.scale * (low.b.mean(0, dtype=dtype) @ low.a.to(dtype))
    bias = None if head.bias is None else _whole(head.bias.mean(dtype=dtype))
    for hidden in groups:
        mean = hidden.mean(tuple(range(hidden.dim() - 1)), dtype=dtype) @ row
        yield mean if bias is None else mean + bias


def _whole(mean: Tensor) -> Tensor:
    return mean.full_tensor() if isinstance(mean, DTensor) else mean


def _by_tiles(route: Route, head: Head, hidden: Tensor, scratch_bytes: int | None) -> Tensor:
    targets = torch.zeros(hidden.shape[:-1], dtype=torch.long, device=hidden.device)
    names = ("log_probs", "mean_logits")
    if route.transform is None:
        scored = route.own_head.statistics(
            hidden, targets, 1.0, names, scratch_bytes, head.weight.size(0)
        )
    else:
        scored = fused_lm_head(
            hidden,
            head.weight,
            targets,
            bias=head.bias,
            low_rank=head.adapters.low_rank,
            transform=route.transform,
            outputs=names,
            scratch_bytes=scratch_bytes,
        )
    logits = scored.mean_logits
    assert logits is not None
    average: Tensor = logits.mean()
    return average
