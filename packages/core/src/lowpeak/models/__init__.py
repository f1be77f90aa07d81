"""transformers models with a fused LM head."""

from .expected_loss import SUM_OF_LOG_PROBS, ExpectedLoss, expecting
from .fused_forward import FusedForwardHandle, install_fused_forward
from .layout import BatchLayout, Rearranged, SeveralCalls
from .logit_tiles import LogitTile, watching_logits
from .outputs import FusedCausalLMOutput
from .reduced import reduce_memory
from .split import SplitCausalLM

__all__ = [
    "SUM_OF_LOG_PROBS",
    "BatchLayout",
    "ExpectedLoss",
    "FusedCausalLMOutput",
    "FusedForwardHandle",
    "LogitTile",
    "Rearranged",
    "SeveralCalls",
    "SplitCausalLM",
    "expecting",
    "install_fused_forward",
    "reduce_memory",
    "watching_logits",
]
