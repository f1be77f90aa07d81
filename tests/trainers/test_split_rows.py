"""Packed rows computed a document a row: the oracle is each document alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from lowpeak.models import install_fused_forward
from lowpeak_trainers.split_rows import SplitRows

OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
VOCABULARY = 61


def opt(device: torch.device) -> Any:
    """Counts positions in the row: its documents must not share one."""
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
        dropout=0.0,
        init_std=0.3,
    )
    return transformers.OPTForCausalLM(config).double().to(device)


def row_of(lengths: list[int], device: torch.device) -> dict[str, Any]:
    """Documents of `lengths` tokens as TRL's collator packs them."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (1, sum(lengths)), generator=generator).to(device)
    ends = torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0).int()
    labels = ids.clone()
    labels[0, ends[:-1].long()] = -100
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": torch.cat([torch.arange(n, device=device) for n in lengths])[None],
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def alone(model: Any, row: dict[str, Any], lengths: list[int]) -> dict[str, Tensor]:
    """Per-token fields [1, T - 1] with each document computed by itself."""
    rows: dict[str, list[Tensor]] = {name: [] for name in OUTPUTS}
    for ids in row["input_ids"][0].split(lengths):
        out = model(input_ids=ids[None], labels=ids[None], fused_lm_head=True)
        for name in OUTPUTS:
            values = getattr(out, name)[0]
            rows[name].append(torch.cat([values, values.new_zeros(1)]))
    return {name: torch.cat(parts)[None, :-1] for name, parts in rows.items()}


@pytest.mark.parametrize("lengths", [[7, 5, 9, 3], [6, 6], [7, 1, 5, 1, 1], [8]], ids=str)
def test_c4_every_document_as_if_alone(lengths: list[int], device: torch.device) -> None:
    """Also of equal length, of one token, and behind a filling of such."""
    model, row = opt(device), row_of(lengths, device)
    handle = install_fused_forward(model, outputs=OUTPUTS)
    expected = alone(model, row, lengths)
    mixed = model(**row, fused_lm_head=True)
    if len(lengths) > 1:
        assert (mixed.log_probs - expected["log_probs"]).abs().max() > 1e-2
    loss = expected["log_probs"].sum() + expected["entropy"].sum()
    wanted = torch.autograd.grad(loss, list(model.parameters()))
    handle.remove()

    layout = SplitRows()
    layout.on = True
    install_fused_forward(model, outputs=OUTPUTS, layout=layout)
    out = model(**row, fused_lm_head=True)
    for name in OUTPUTS:
        torch.testing.assert_close(getattr(out, name), expected[name], atol=1e-10, rtol=1e-10)
    assert torch.equal(out.label_mask, row["labels"][:, 1:] != -100)
    torch.testing.assert_close(out.loss, -expected["log_probs"].sum() / out.label_mask.sum())
    found = torch.autograd.grad(out.log_probs.sum() + out.entropy.sum(), list(model.parameters()))
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)


def test_other_calls_stay_as_they_are() -> None:
    row = row_of([4, 3], torch.device("cpu"))
    labels = row.pop("labels")
    layout = SplitRows()
    assert layout(row, labels) is None
    layout.on = True
    split = layout(row, labels)
    assert split is not None
    assert split.arguments["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert layout({**row, "pixel_values": torch.ones(1)}, labels) is None
    assert layout({"input_ids": row["input_ids"]}, labels) is None
