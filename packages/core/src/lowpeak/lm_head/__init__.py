"""The fused LM head: log-probabilities and statistics of every token, never the logits."""

from .head import fused_lm_head
from .output import LMHeadOutput
from .transform import LogitTransform

__all__ = ["LMHeadOutput", "LogitTransform", "fused_lm_head"]
