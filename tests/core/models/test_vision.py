"""Vision language models: text behind an image is scored as their own logits score it."""

import pytest
import transformers
from test_families import assert_equals_own, gradients, own_scores
from vision_models import MODELS, image_batch, tiny_vision_model


@pytest.mark.parametrize("name", MODELS)
def test_text_behind_an_image_equals_own_logits(name: str) -> None:
    if not hasattr(transformers, MODELS[name][0]):
        pytest.skip(f"this transformers has no {name}")
    model = tiny_vision_model(name)
    batch = image_batch(name)
    fused = assert_equals_own(model, temperature=0.7, batch=batch)
    trained = gradients(model, model(**batch, fused_lm_head=True).loss)
    assert max(g.abs().max() for part, g in trained.items() if "vis" in part) > 0
    # it saw the image: behind another one the same text is scored otherwise
    batch["pixel_values"] = batch["pixel_values"].flip(0)
    other = own_scores(model, batch, 0.7)["log_probs"]
    assert (fused.log_probs - other).abs().max() > 1e-3
