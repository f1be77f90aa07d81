"""transformers models with a fused LM head."""

from .fused_forward import FusedForwardHandle, install_fused_forward
from .layout import BatchLayout, Rearranged
from .outputs import FusedCausalLMOutput
from .reduced import reduce_memory

__all__ = [
    "BatchLayout",
    "FusedCausalLMOutput",
    "FusedForwardHandle",
    "Rearranged",
    "install_fused_forward",
    "reduce_memory",
]
