"""transformers models with a fused LM head."""

from .fused_forward import FusedForwardHandle, install_fused_forward
from .outputs import FusedCausalLMOutput
from .reduced import reduce_memory

__all__ = [
    "FusedCausalLMOutput",
    "FusedForwardHandle",
    "install_fused_forward",
    "reduce_memory",
]
