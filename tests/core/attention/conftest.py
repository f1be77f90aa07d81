"""Make the helpers of this folder and of its neighbours importable."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "models"), str(HERE.parent / "lm_head")]
