"""Run Triton through its interpreter where there is no GPU, and share the oracle of the fused head."""

import os
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    # Triton reads this once, when a kernel is decorated: before any kernel module is imported.
    os.environ["TRITON_INTERPRET"] = "1"

sys.path.insert(0, str(Path(__file__).parents[1] / "core" / "lm_head"))
