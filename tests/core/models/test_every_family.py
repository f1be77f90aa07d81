"""All causal language models of the installed transformers: none is silently another model."""

import pytest
from family_verdicts import (
    NOT_BUILDABLE,
    REFUSED,
    RIGHT,
    check,
    check_vision,
    families,
    vision_families,
)

# Much used ones that tiny_models.py does not have; all of them in the slow test.
QUICK = (
    "cohere2",
    "deepseek_v3",
    "falcon",
    "gemma3_text",
    "glm4_moe",
    "mistral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_next",
    "smollm3",
    "starcoder2",
)
# What cannot be tried alone: two assistants that need another model's keys and values, and a model
# that needs timm.
NOT_BUILT = {"gemma3n", "gemma4_assistant", "gemma4_unified_assistant"}
# Several heads (one a codebook), and logits that are not made of the hidden states.
REFUSED_FAMILIES = {"musicgen", "musicgen_melody", "prophetnet"}
pytestmark = [
    # what the constructors and forwards of families say about configurations this small
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(120),
]


@pytest.mark.parametrize("family", QUICK)
def test_much_used_family_is_right(family: str) -> None:
    verdict = check(family)
    assert (verdict.result, verdict.training) == (RIGHT, "yes"), verdict


@pytest.mark.slow
@pytest.mark.parametrize("family", families())
def test_no_family_is_silently_different(family: str) -> None:
    verdict = check(family)  # raises where something is different
    if verdict.result == NOT_BUILDABLE:
        assert family in NOT_BUILT, verdict
        pytest.skip(verdict.reason)
    if verdict.result == REFUSED:
        assert family in REFUSED_FAMILIES, verdict


@pytest.mark.slow
@pytest.mark.parametrize("family", vision_families())
def test_no_vision_family_is_silently_different(family: str) -> None:
    verdict = check_vision(family)
    if verdict.result == NOT_BUILDABLE:
        pytest.skip(verdict.reason)
    assert verdict.result != REFUSED, verdict
