"""A TileMetrics is refused by trainers derived from SFTTrainer whose loss is another."""

import pytest
import recipes
import tiny

from lowpeak_trainers.tile_metrics import MeanRank


def test_refused(tmp_path):
    further = {"compute_metrics": MeanRank(), "teacher_model": tiny.llama(seed=1)}
    with pytest.raises(ValueError, match="which GKDTrainer cannot feed: only SFTTrainer"):
        recipes.build("lowpeak_trainers", "GKD", tmp_path, further=further)
