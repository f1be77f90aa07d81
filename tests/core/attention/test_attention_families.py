"""All causal language models of the installed transformers: isolated or refused, none contaminated.

`python tools/attention_table.py` writes the same into docs/attention.md.
"""

import pytest
import torch
from attention_verdicts import NOT_BUILDABLE, check_attention
from family_verdicts import families

# What people train most must be served.
SERVED = (
    "deepseek_v3",
    "gemma3_text",
    "glm4_moe",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "starcoder2",
)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(180)]


@pytest.mark.parametrize("family", SERVED)
def test_much_used_family_is_served(family: str, device: torch.device) -> None:
    verdict = check_attention(family, device)
    found = (verdict.attention, verdict.separates_documents, verdict.shares_prefixes)
    assert found == ("lowpeak", True, True), verdict


@pytest.mark.slow
@pytest.mark.parametrize("family", families())
def test_no_family_is_contaminated(family: str, device: torch.device) -> None:
    verdict = check_attention(family, device)  # raises where documents see each other
    if verdict.attention == NOT_BUILDABLE:
        pytest.skip(verdict.reason)
    assert verdict.reason
