"""What lowpeak may do to a model: the options, and the switch that turns techniques off."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

DISABLE_VARIABLE = "LOWPEAK_DISABLE"
TECHNIQUES = ("head", "attention", "padding_free", "packing", "token_budget", "offload")


@dataclass
class MemoryConfig:
    """Options of lowpeak, also a mixin in front of a `transformers.TrainingArguments` dataclass.

    Every field is a number, a bool, a string or None, so that it can be written to JSON and given
    on a command line. None means that lowpeak decides; an explicit value is never overridden.

    `class MyConfig(MemoryConfig, TrainingArguments)` has the fields of both.

    Raises:
        ValueError: in `validate_memory_config`, for a scratch size that is not positive and an
            attention that is no name.
    """

    fused_lm_head: bool | None = field(
        default=None,
        metadata={
            "help": "Compute losses and log-probabilities without the logits of the whole batch. "
            "None is on, unless the environment variable LOWPEAK_DISABLE names 'head'."
        },
    )
    lm_head_scratch_bytes: int | None = field(
        default=None,
        metadata={
            "help": "Most bytes of scratch memory of the fused LM head. None lets lowpeak choose "
            "by the shape of the head."
        },
    )
    attention: str | None = field(
        default=None,
        metadata={
            "help": "Attention of the model. None keeps what the user named, and otherwise takes "
            "'lowpeak', which needs no mask of tokens by tokens, where it serves the model; 'off' "
            "leaves the model as it is; any other name is given to the model. The environment "
            "variable LOWPEAK_DISABLE=attention is the same as 'off'."
        },
    )

    def validate_memory_config(self) -> None:
        """Check the values; called where the config is used, since a mixin has no __post_init__.

        Raises:
            ValueError: for `lm_head_scratch_bytes` below 1, and an `attention` that is no string.
        """
        if self.lm_head_scratch_bytes is not None and self.lm_head_scratch_bytes < 1:
            raise ValueError(
                f"lm_head_scratch_bytes={self.lm_head_scratch_bytes} is not positive: "
                "pass a number of bytes, or None to let lowpeak choose"
            )
        attention: object = self.attention
        if attention is not None and not isinstance(attention, str):
            raise ValueError(
                f"attention={attention!r} is no name: pass that of an implementation, "
                "'off' to leave the model as it is, or None to let lowpeak choose"
            )


def why_attention_is_off(config: MemoryConfig) -> str | None:
    """What keeps lowpeak from choosing the attention of a model, or None where it may."""
    if config.attention == "off":
        return "attention='off'"
    if "attention" in disabled_techniques():
        return f"{DISABLE_VARIABLE}=attention"
    return None


def disabled_techniques() -> frozenset[str]:
    """Techniques that the environment variable LOWPEAK_DISABLE switches off, a comma list.

    Raises:
        ValueError: for a name that is no technique.
    """
    names = [name.strip() for name in os.environ.get(DISABLE_VARIABLE, "").split(",")]
    chosen = frozenset(name for name in names if name)
    unknown = sorted(chosen - set(TECHNIQUES))
    if unknown:
        raise ValueError(
            f"{DISABLE_VARIABLE} names {', '.join(unknown)}, which lowpeak does not know: "
            f"use names among {', '.join(TECHNIQUES)}, separated by commas"
        )
    return chosen


def technique_enabled(name: str, flag: bool | None) -> bool:
    """Whether the technique `name` is on, given its field of a MemoryConfig.

    LOWPEAK_DISABLE is the last word, whatever the flag says: it serves to repeat a run without a
    technique and without a change of its code.
    """
    return flag is not False and name not in disabled_techniques()
