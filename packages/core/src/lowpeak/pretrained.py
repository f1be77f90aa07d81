"""The transformers model inside what a user holds."""

from __future__ import annotations

import sys

from torch import nn
from transformers import PreTrainedModel


def pretrained_model(model: nn.Module) -> PreTrainedModel:
    """`model` itself, or the model inside it if it is a `PeftModel`.

    Raises:
        TypeError: for anything else.
    """
    peft = sys.modules.get("peft")
    base = model.get_base_model() if peft and isinstance(model, peft.PeftModel) else model
    if not isinstance(base, PreTrainedModel):
        raise TypeError(
            f"model is a {type(model).__name__}: pass the transformers PreTrainedModel itself, "
            "before it is wrapped for training (a PeftModel may be passed)"
        )
    return base
