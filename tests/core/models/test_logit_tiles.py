"""What a watcher of fused calls sees: the model's own logits of the scored tokens, once each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_self_test import PerTokenFactor
from tiny_models import VOCABULARY, tiny_model
from torch import Tensor

from lowpeak import MemoryConfig, lm_head_metrics, reduce_memory
from lowpeak.models import LogitTile, install_fused_forward, watching_logits

# 52 rows of the vocabulary and a temporary, or 34 through the model's own modules.
SCRATCH = 52 * 2 * 4 * VOCABULARY


def batch_of(device: torch.device) -> dict[str, Tensor]:
    """Three rows, the second padded on the left, the last tokens of the third not scored."""
    ids = torch.randint(3, 120, (3, 40), generator=torch.Generator().manual_seed(0)).to(device)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, 6] = -100  # behind padding: nothing to predict it from
    labels[2, 32:] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def watched(model: Any, batch: dict[str, Tensor], **arguments: Any) -> list[LogitTile]:
    tiles: list[LogitTile] = []
    with watching_logits(tiles.append), torch.no_grad():
        model(**batch, **arguments)
    return tiles


def own_rows(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [N, V], targets and columns [N] of the scored tokens, by the model's own forward."""
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    targets = batch["labels"][:, 1:]
    scored = targets != -100
    columns = torch.arange(targets.size(1), device=targets.device).expand(targets.shape)
    return logits[:, :-1][scored], targets[scored], columns[scored]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "cohere", "tile by tile"])
def test_logits_of_all_scored_tokens_in_order(kind: str, device: torch.device) -> None:
    if kind == "tile by tile":
        model: Any = PerTokenFactor(tiny_model("llama").config).to(device).eval()
    else:
        model = tiny_model(kind).eval()
    batch = batch_of(device)
    logits, targets, columns = own_rows(model, batch)
    install_fused_forward(model, scratch_bytes=SCRATCH, temperature=2.0)
    tiles = watched(model, batch, fused_lm_head=True)
    assert [len(x.targets) for x in tiles][:-1] == [34 if kind == "tile by tile" else 52] * (
        len(tiles) - 1
    )
    assert len(tiles) > 1
    torch.testing.assert_close(
        torch.cat([x.logits for x in tiles]), logits, rtol=0, atol=1e-5 * float(logits.abs().max())
    )
    assert torch.equal(torch.cat([x.targets for x in tiles]), targets)
    left = torch.zeros_like(batch["labels"][:, 1:])
    left[1] = 6
    shifts = left[batch["labels"][:, 1:] != -100]
    assert torch.equal(torch.cat([x.positions for x in tiles]), columns - shifts)


def test_half_precision_gives_float32_tiles(device: torch.device) -> None:
    model = tiny_model("llama").to(torch.bfloat16).eval()
    batch = batch_of(device)
    logits, _, _ = own_rows(model, batch)
    install_fused_forward(model)
    (tile,) = watched(model, batch, fused_lm_head=True)
    assert tile.logits.dtype == torch.float32
    scale = float(logits.abs().max())
    torch.testing.assert_close(tile.logits, logits.float(), rtol=0, atol=2**-7 * scale)


def test_positions_that_are_given(device: torch.device) -> None:
    model = tiny_model("llama").eval()
    install_fused_forward(model)
    ids = torch.randint(3, 120, (1, 9), device=device)
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]], device=device)
    labels = ids.clone()
    labels[0, 4] = -100
    batch = {"input_ids": ids, "position_ids": places, "labels": labels}
    (tile,) = watched(model, batch, fused_lm_head=True)
    assert tile.positions.tolist() == [0, 1, 2, 0, 1, 2, 3]


def test_training_steps_and_other_contexts_show_nothing(device: torch.device) -> None:
    model = tiny_model("llama").train()
    install_fused_forward(model)
    batch = batch_of(device)
    tiles: list[LogitTile] = []
    with watching_logits(tiles.append):
        model(**batch, fused_lm_head=True).loss.backward()
    with torch.no_grad():
        model(**batch, fused_lm_head=True)
    assert tiles == []


def test_reduced_models_show_theirs(device: torch.device) -> None:
    """For evaluations of one's own: the loss alone is asked for, the tiles make its mean."""
    model = tiny_model("llama").eval()
    batch = batch_of(device)
    wanted = model(**batch).loss.item()
    reduce_memory(model, MemoryConfig(), eval_logits=False)
    tiles = watched(model, batch)
    log_probs = torch.cat([tile.target_log_probs for tile in tiles])
    assert -log_probs.mean().item() == pytest.approx(wanted, rel=1e-5)


def test_a_call_without_targets_shows_nothing(device: torch.device) -> None:
    model = tiny_model("llama").eval()
    install_fused_forward(model)
    batch = batch_of(device)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    assert watched(model, batch, fused_lm_head=True) == []


def test_derived_values_are_those_of_lm_head_metrics(device: torch.device) -> None:
    """Whole numbers make ties; a masked token has a logit of -inf."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randint(-2, 3, (40, 4), generator=generator).float().to(device)
    weight = torch.randint(-1, 2, (30, 4), generator=generator).float().to(device)
    targets = torch.randint(30, (40,), generator=generator).to(device)
    targets[targets == 7] = 8
    bias = torch.zeros(30, device=device)
    bias[7] = -float("inf")
    found = lm_head_metrics(hidden, weight, targets, rank=True, top_k=1, bias=bias)
    tile = LogitTile(hidden @ weight.t() + bias, targets, torch.zeros_like(targets))
    assert found.target_rank is not None
    assert found.top_k is not None
    assert torch.equal(tile.target_ranks, found.target_rank)
    assert int((tile.target_ranks > 0).sum()) > 10
    torch.testing.assert_close(tile.target_log_probs, found.log_probs)
    torch.testing.assert_close(tile.top_log_probs, found.top_k.log_probs[:, 0])
