"""Failures that users of other tools reported: packed rows."""

from __future__ import annotations

import pytest
import torch
import transformers
from attention_oracle import alone, assert_near, documents, packed_row, tiny, twin
from family_configs import tiny_config

from lowpeak.attention import choose_attention, register_attention


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register_attention()


def test_c1_gpt_oss_is_refused(device: torch.device) -> None:
    torch.manual_seed(0)
    config = tiny_config(transformers.GptOssConfig)
    model = transformers.GptOssForCausalLM(config).to(device)
    choice = choose_attention(model)
    assert (choice.name, choice.separates_documents) == ("eager", False)
    assert choice.reason == "its attention has sinks"
    parts = documents([7, 5, 9, 3], device)
    packed = model(**packed_row(parts, marks=False)).logits
    with pytest.raises(AssertionError):  # its later documents do see the earlier ones
        assert_near(packed, alone(model, parts), 1e-3)
    model.set_attn_implementation("lowpeak")
    with pytest.raises(ValueError, match=r"attention sinks \(s_aux\)"):
        model(**packed_row(parts))


@pytest.mark.parametrize("name", ["llama", "gemma3_window_4"])
def test_c3_ones_beside_positions_that_start_again(name: str, device: torch.device) -> None:
    model = tiny(name, "lowpeak", device)
    parts = documents([7, 5, 9], device)
    row = packed_row(parts)
    wanted = alone(twin(model, "eager"), parts)
    assert_near(model(**row).logits, wanted, 1e-5)
    mask = torch.ones_like(row["input_ids"])
    assert_near(model(**row, attention_mask=mask).logits, wanted, 1e-5)


@pytest.mark.parametrize("lengths", [[7, 5, 9], [8, 8], [4, 1, 6]], ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral_window_4", "gemma3_window_4"])
def test_c4_positions_start_again_with_each_document(
    name: str, lengths: list[int], device: torch.device
) -> None:
    model = tiny(name, "lowpeak", device)
    parts = documents(lengths, device)
    row = packed_row(parts)
    assert row["position_ids"][0].tolist() == [i for n in lengths for i in range(n)]
    wanted = alone(twin(model, "eager"), parts)
    assert_near(model(**row).logits, wanted, 1e-5)
    straight = {**row, "position_ids": torch.arange(sum(lengths), device=device)[None]}
    if name == "llama":  # rotary embeddings are relative: boundaries alone decide
        assert_near(model(**straight).logits, wanted, 1e-4)


def test_c5_no_target_crosses_a_boundary(device: torch.device) -> None:
    trl_sft = pytest.importorskip("trl.trainer.sft_trainer")
    lengths = [7, 5, 9]
    model = tiny("gemma3_window_4", "lowpeak", device)
    parts = documents(lengths, device)
    collator = trl_sft.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    row = collator([{"input_ids": ids[0].tolist()} for ids in parts])
    labels = row["labels"].to(device)
    assert int((labels != -100).sum()) == sum(n - 1 for n in lengths)
    row = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in row.items()}
    packed = model(**row, use_cache=False).loss
    each = [model(input_ids=ids, labels=ids, use_cache=False).loss for ids in parts]
    wanted = sum(loss * (n - 1) for loss, n in zip(each, lengths, strict=True))
    assert_near(packed, wanted / (sum(lengths) - len(lengths)), 1e-5)
