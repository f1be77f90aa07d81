"""Padded batches as one packed row: the oracle is each sequence alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from lowpeak.models import install_fused_forward
from lowpeak_trainers.padding_free import PaddingFree

OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
VOCABULARY = 61


def padding_free(multiple: int | None = None) -> PaddingFree:
    layout = PaddingFree()
    layout.switch(True, multiple)
    return layout


SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SMALL))


def mistral() -> Any:
    return MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4))


def gpt2() -> Any:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        initializer_range=0.2,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def padded_batch(lengths: list[int], left: list[int], prompt: int) -> dict[str, Tensor]:
    """Rows of `lengths` tokens, `left` of padding before them, the first `prompt` unlabelled."""
    generator = torch.Generator().manual_seed(1)
    width = max(n + pad for n, pad in zip(lengths, left, strict=True)) + 1
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, (n, pad) in enumerate(zip(lengths, left, strict=True)):
        tokens = torch.randint(1, VOCABULARY, (n,), generator=generator)
        ids[row, pad : pad + n], mask[row, pad : pad + n] = tokens, 1
        labels[row, pad + prompt : pad + n] = tokens[prompt:]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def alone(model: Any, batch: dict[str, Tensor]) -> Any:
    """Per-token fields of the batch with each row computed without its padding."""
    rows = []
    for ids, mask, labels in zip(*(batch[k] for k in batch), strict=True):
        real = mask.bool()
        out = model(
            input_ids=ids[real].unsqueeze(0), labels=labels[real].unsqueeze(0), fused_lm_head=True
        )
        rows.append((real, out))
    fields = {}
    for name in OUTPUTS:
        parts = []
        for real, out in rows:
            values = getattr(out, name)[0]
            places = real.nonzero().squeeze(1)[1:]
            parts.append(values.new_zeros(real.numel()).index_copy(0, places, values)[1:])
        fields[name] = torch.stack(parts)
    return fields


def gradients(model: Any, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("make", [llama, mistral, gpt2])
@pytest.mark.parametrize(
    ("lengths", "left"),
    [([5, 9, 2, 9], [0, 0, 0, 0]), ([5, 9, 2], [4, 0, 7]), ([1, 6], [3, 2]), ([7], [0])],
    ids=["right", "left", "short", "one"],
)
@pytest.mark.parametrize("multiple", [None, 16])
def test_g4_every_sequence_as_if_alone(
    make: Any, lengths: list[int], left: list[int], multiple: int | None, device: torch.device
) -> None:
    torch.manual_seed(0)
    model = make().double().to(device)
    batch = {k: v.to(device) for k, v in padded_batch(lengths, left, prompt=1).items()}
    handle = install_fused_forward(model, outputs=OUTPUTS)
    expected = alone(model, batch)
    wanted = gradients(model, expected["log_probs"].sum() + expected["entropy"].sum())
    handle.remove()

    install_fused_forward(model, outputs=OUTPUTS, layout=padding_free(multiple))
    out = model(**batch, fused_lm_head=True)
    for name in OUTPUTS:
        torch.testing.assert_close(getattr(out, name), expected[name], atol=1e-10, rtol=1e-10)
    assert torch.equal(out.label_mask, batch["labels"][:, 1:] != -100)
    count = out.label_mask.sum()
    torch.testing.assert_close(out.loss, -expected["log_probs"].sum() / count)
    for got, want in zip(
        gradients(model, out.log_probs.sum() + out.entropy.sum()), wanted, strict=True
    ):
        torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)


def test_backbone_sees_no_padding() -> None:
    torch.manual_seed(0)
    model = llama()
    seen: list[torch.Size] = []
    model.model.embed_tokens.register_forward_hook(lambda m, args, out: seen.append(args[0].shape))
    install_fused_forward(model, layout=padding_free())
    model(**padded_batch([5, 9, 2], [0, 3, 1], 1), fused_lm_head=True)
    assert seen[-1] == (1, 16)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("label behind padding", lambda b: b["labels"][1].__setitem__(3, 5)),
        ("label of padding", lambda b: b["labels"][0].__setitem__(-1, 5)),
        ("hole in a row", lambda b: b["attention_mask"][1].__setitem__(6, 0)),
        ("no token at all", lambda b: b["attention_mask"].zero_()),
    ],
)
def test_left_padded_where_packing_would_change_the_meaning(name: str, change: Any) -> None:
    batch = padded_batch([5, 9], [0, 3], 1)
    change(batch)
    labels = batch.pop("labels")
    assert padding_free()(batch, labels) is None


def test_other_arguments_stay_padded() -> None:
    batch = padded_batch([5, 9], [0, 3], 1)
    labels = batch.pop("labels")
    layout = padding_free()
    assert layout(batch, labels) is not None
    assert layout({**batch, "pixel_values": None}, labels) is not None
    assert layout({**batch, "pixel_values": torch.ones(1)}, labels) is None
    assert layout({"input_ids": batch["input_ids"]}, labels) is None


def test_filling_has_no_labels_and_its_own_document() -> None:
    batch = padded_batch([5, 9, 2], [0, 3, 1], 1)
    labels = batch.pop("labels")
    packed = padding_free(multiple=10)(batch, labels)
    assert packed is not None
    assert packed.labels.shape == (1, 20)
    assert packed.arguments["cu_seq_lens_q"].tolist() == [0, 5, 14, 16, 20]
    assert packed.arguments["position_ids"][0].tolist() == [
        *range(5), *range(9), *range(2), *range(4),
    ]  # fmt: skip
    assert (packed.labels[0, 16:] == -100).all()
    with pytest.raises(ValueError, match="multiple=0"):
        PaddingFree().switch(True, multiple=0)
