"""PEFT adapters on the LM head: what they add to its logits, or why only PEFT itself can tell."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lowpeak.lm_head import LowRank


@dataclass(frozen=True)
class HeadAdapters:
    """The adapters that a head applies at this call.

    Args:
        low_rank: LoRA and rsLoRA.
        biases: those of the adapters, each with its scale.
        names: of the adapters that are active.
        detour: why the head's own module has to compute its logits; None where it need not.
    """

    low_rank: tuple[LowRank, ...] = ()
    biases: tuple[tuple[Tensor, float], ...] = ()
    names: tuple[str, ...] = ()
    detour: str | None = None

    def added_to(self, bias: Tensor | None) -> Tensor | None:
        """The bias of the head with those of its adapters, [V]."""
        for of_adapter, scale in self.biases:
            scaled = of_adapter * scale
            bias = scaled if bias is None else bias + scaled
        return bias


def is_adapter_layer(module: nn.Module) -> bool:
    """Whether PEFT wrapped `module` to put adapters on it; the wrapper of `modules_to_save` is
    none."""
    # A head can carry an adapter only if peft was imported; importing it here would cost seconds.
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return tuners is not None and isinstance(module, tuners.BaseTunerLayer)


def read_adapters(module: nn.Module) -> HeadAdapters:
    """The adapters of a head, none for one that PEFT did not wrap."""
    if not is_adapter_layer(module):
        return HeadAdapters()
    layer: Any = module
    if layer.disable_adapters:
        detour = "its adapters are merged and disabled" if layer.merged else None
        return HeadAdapters(detour=detour)
    if layer.merged:
        return HeadAdapters()
    names = tuple(layer.active_adapters)
    lora: Any = sys.modules.get("peft.tuners.lora")
    # exactly: what is derived from it computes otherwise
    if lora is None or type(layer) is not lora.Linear:
        return HeadAdapters(names=names, detour=f"its adapter is a {type(layer).__name__} layer")
    active = [name for name in names if name in layer.lora_A]
    detour = next((why for name in active if (why := _why_not_low_rank(layer, name))), None)
    if detour is not None:
        return HeadAdapters(names=names, detour=detour)
    factors = [(layer.lora_A[name], layer.lora_B[name], layer.scaling[name]) for name in active]
    return HeadAdapters(
        tuple(LowRank(a.weight, b.weight, float(scale)) for a, b, scale in factors),
        tuple((b.bias, float(scale)) for _, b, scale in factors if b.bias is not None),
        names,
    )


def _why_not_low_rank(layer: Any, name: str) -> str | None:
    """Why an adapter is more than a product of two matrices; None if it is not."""
    if name in layer.lora_variant:
        return f"its adapter {name!r} is a {type(layer.lora_variant[name]).__name__}"
    dropout = layer.lora_dropout[name]
    if isinstance(dropout, nn.Dropout):
        if dropout.training and dropout.p > 0:
            return f"its adapter {name!r} has lora_dropout={dropout.p:g}"
    elif not isinstance(dropout, nn.Identity):
        return f"its adapter {name!r} begins with a {type(dropout).__name__}"
    for factor in (layer.lora_A[name], layer.lora_B[name]):
        if type(factor) is not nn.Linear:
            return f"its adapter {name!r} is made of a {type(factor).__name__}"
    return "its weight is stored transposed" if layer.fan_in_fan_out else None
