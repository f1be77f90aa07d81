"""TRL trainers with lowpeak inside: change the import and nothing else."""

from .compatibility import UnsupportedTrlError
from .distillation import DistillationConfig, DistillationMixin, DistillationTrainer
from .dpo import DPOConfig, DPOTrainer
from .fused_forward import add_fused_lm_head
from .grpo import GRPOConfig, GRPOTrainer
from .kto import KTOConfig, KTOTrainer
from .mixin import LowpeakMixin, enabled
from .reward import RewardConfig, RewardTrainer
from .rloo import RLOOConfig, RLOOTrainer
from .sft import SFTConfig, SFTTrainer
from .tile_metrics import TileMetrics

__all__ = [
    "DPOConfig",
    "DPOTrainer",
    "DistillationConfig",
    "DistillationMixin",
    "DistillationTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "KTOConfig",
    "KTOTrainer",
    "LowpeakMixin",
    "RLOOConfig",
    "RLOOTrainer",
    "RewardConfig",
    "RewardTrainer",
    "SFTConfig",
    "SFTTrainer",
    "TileMetrics",
    "UnsupportedTrlError",
    "add_fused_lm_head",
    "enabled",
]
