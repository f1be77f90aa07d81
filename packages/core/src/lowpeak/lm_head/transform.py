"""The logit transform of a language model's head, as its user states it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to its raw logits x before the softmax.

    z = softcap * tanh(scale * x / softcap) / temperature, without the cap where `softcap` is None.

    Args:
        scale: multiplier of the raw logits (Cohere's `logit_scale`, 1 / Granite's
            `logits_scaling`).
        softcap: bound of the logits (Gemma's `final_logit_softcapping`); the cap comes before the
            temperature.
        temperature: positive divisor: a number, or a tensor with the shape of the targets. It is
            treated as a constant.

    Raises:
        ValueError: for a softcap or temperature that is not positive, a scale that is not finite,
            or a temperature tensor that requires a gradient.
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float | Tensor = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise ValueError(f"scale={self.scale} is not finite")
        if self.softcap is not None and not (self.softcap > 0 and math.isfinite(self.softcap)):
            raise ValueError(
                f"softcap={self.softcap} is not positive and finite: pass None for no cap"
            )
        if isinstance(self.temperature, Tensor):
            if self.temperature.requires_grad:
                raise ValueError(
                    "temperature requires a gradient, which fused_lm_head does not compute: "
                    "pass temperature.detach()"
                )
        elif not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ValueError(
                f"temperature={self.temperature} is not positive and finite: "
                "for greedy decisions use is_top1"
            )
