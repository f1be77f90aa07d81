"""Rows that begin alike: what is shared is what could be, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_padding_free import OUTPUTS, alone, gpt2, gradients, llama, mistral
from torch import Tensor

from lowpeak.attention import use_attention
from lowpeak.models import install_fused_forward
from lowpeak_trainers import prompt_sharing
from lowpeak_trainers.padding_free import PackedRow, PaddingFree
from lowpeak_trainers.prompt_sharing import SharedPrefix, choose_prefixes, prefix_facts

# Ids of a row, and how many of them are its prompt, which has no labels.
Row = tuple[list[int], int]
SYSTEM = list(range(1, 20))
ONE, TWO = [*SYSTEM, 20, 21], [*SYSTEM, 30, 31, 32]
# Two groups with one system prompt, shuffled, and a row of its own.
SHUFFLED: list[Row] = [
    ([*ONE, 40, 41, 42], 21),
    ([*TWO, 40], 22),
    ([*ONE, 43], 21),
    ([9, 8], 1),
    ([*TWO, 44, 45, 46, 47], 22),
    ([*ONE, 40, 48], 21),
    ([*TWO, 40, 49], 22),
]


def batch_of(rows: list[Row], left: list[int] | None = None) -> dict[str, Tensor]:
    """A padded batch, with `left` tokens of padding before each row. Padding holds any token."""
    left = left or [0] * len(rows)
    width = max(len(ids) + pad for (ids, _), pad in zip(rows, left, strict=True)) + 1
    batch = torch.full((len(rows), width), 1)
    mask, labels = torch.zeros_like(batch), torch.full_like(batch, -100)
    for row, ((ids, prompt), pad) in enumerate(zip(rows, left, strict=True)):
        end = pad + len(ids)
        batch[row, pad:end] = torch.tensor(ids)
        mask[row, pad:end] = 1
        labels[row, pad + prompt : end] = batch[row, pad + prompt : end]
    return {"input_ids": batch, "attention_mask": mask, "labels": labels}


def sharing(multiple: int | None = None) -> PaddingFree:
    layout = PaddingFree()
    layout.switch(True, multiple, share_prompts=True)
    return layout


def packed(rows: list[Row], left: list[int] | None = None, **arguments: Any) -> PackedRow:
    batch = batch_of(rows, left)
    labels = batch.pop("labels")
    found = sharing()(batch | arguments, labels)
    assert found is not None
    return found


def chosen(rows: list[Row], left: list[int] | None = None) -> list[SharedPrefix]:
    batch = batch_of(rows, left)
    real, labelled = batch["attention_mask"] != 0, batch["labels"][:, 1:] != -100
    facts = prefix_facts(batch["input_ids"], real, labelled).tolist()
    return choose_prefixes([len(ids) for ids, _ in rows], facts)


@pytest.mark.parametrize("left", [None, [3, 0, 5, 2, 0, 1, 4]], ids=["right", "left"])
def test_groups_are_found_wherever_their_rows_are(left: list[int] | None) -> None:
    # the token before the first completion's predicts it, and is each row's own
    assert chosen(SHUFFLED, left) == [
        SharedPrefix(),
        SharedPrefix(0, 19),  # of another group's row, the system prompt
        SharedPrefix(0, 20),
        SharedPrefix(),
        SharedPrefix(1, 21),  # of a row that takes over some itself
        SharedPrefix(0, 20),
        SharedPrefix(1, 21),
    ]
    row = packed(SHUFFLED, left)
    assert row.arguments["shared_prefixes"].tolist() == [
        [24, 0, 0], [4, 0, 19], [2, 0, 20], [2, 0, 0], [5, 1, 21], [3, 0, 20], [3, 1, 21],
    ]  # fmt: skip
    assert row.arguments["input_ids"].tolist() == [
        [*ONE, 40, 41, 42, 30, 31, 32, 40, 21, 43, 9, 8, 32, 44, 45, 46, 47, 21, 40, 48, 32, 40, 49]
    ]
    assert row.arguments["position_ids"].tolist() == [
        [*range(24), *range(19, 23), 20, 21, 0, 1, *range(21, 26), *range(20, 23), *range(21, 24)]
    ]
    assert row.arguments["cu_seq_lens_q"].tolist() == [0, 24, 28, 30, 32, 37, 40, 43]
    assert row.arguments["max_length_q"] == 24


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(
        st.tuples(st.lists(st.integers(1, 2), min_size=1, max_size=9), st.integers(1, 9)),
        min_size=1,
        max_size=6,
    ),
    padding=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    scratch=st.sampled_from([1, 1 << 20]),
)
def test_as_much_as_there_is_to_share(rows: list[Row], padding: list[int], scratch: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_sharing, "SHORTEST", 2)
        patch.setattr(prompt_sharing, "SMALLEST_PART", 0)
        patch.setattr(prompt_sharing, "_SCRATCH_BYTES", scratch)
        found = chosen(rows, padding[: len(rows)])
        row = packed(rows, padding[: len(rows)])
    wanted = []
    for index, (ids, prompt) in enumerate(rows):
        best = SharedPrefix()
        for owner, (other, _) in enumerate(rows[:index]):
            # the first label is at `prompt`, where there is one
            count = min(len(ids), prompt) - 1
            while ids[:count] != other[:count]:
                count -= 1
            if count >= 2 and count > best.tokens:
                best = SharedPrefix(owner, count)
        wanted.append(best)
    assert found == wanted
    kept = [token for (ids, _), p in zip(rows, found, strict=True) for token in ids[p.tokens :]]
    assert row.arguments["input_ids"][0].tolist() == kept
    # every label is there, in its order
    labels = [token for ids, prompt in rows for token in ids[prompt:]]
    assert row.labels[row.labels != -100].tolist() == labels


@pytest.mark.parametrize("make", [llama, mistral, gpt2])
@pytest.mark.parametrize("left", [None, [3, 0, 5, 2, 0, 1, 4]], ids=["right", "left"])
@pytest.mark.parametrize("multiple", [None, 16])
def test_every_sequence_as_if_alone(
    make: Any, left: list[int] | None, multiple: int | None, device: torch.device
) -> None:
    torch.manual_seed(0)
    model = make().double().to(device)
    batch = {name: x.to(device) for name, x in batch_of(SHUFFLED, left).items()}
    handle = install_fused_forward(model, outputs=OUTPUTS)
    expected = alone(model, batch)
    wanted = gradients(model, expected["log_probs"].sum() + expected["entropy"].sum())
    handle.remove()
    use_attention(model)
    seen: list[torch.Size] = []
    model.base_model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: seen.append(args[0].shape)
    )
    install_fused_forward(model, outputs=OUTPUTS, layout=sharing(multiple))
    out = model(**batch, fused_lm_head=True)
    assert seen[-1] == (1, 43 if multiple is None else 48)
    for name in OUTPUTS:
        torch.testing.assert_close(getattr(out, name), expected[name], atol=1e-10, rtol=1e-10)
    assert torch.equal(out.label_mask, batch["labels"][:, 1:] != -100)
    torch.testing.assert_close(out.loss, -expected["log_probs"].sum() / out.label_mask.sum())
    # Llama's norms send gradients through float32, here once for several sequences
    tolerance = 1e-11 if make is gpt2 else 1e-5
    for got, want in zip(
        gradients(model, out.log_probs.sum() + out.entropy.sum()), wanted, strict=True
    ):
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


def test_router_logits_count_every_token() -> None:
    assert "shared_prefixes" in packed(SHUFFLED, output_router_logits=False).arguments
    row = packed(SHUFFLED, output_router_logits=True)
    assert "shared_prefixes" not in row.arguments
    assert row.arguments["input_ids"].size(1) == sum(len(ids) for ids, _ in SHUFFLED)


def test_little_is_not_worth_it() -> None:
    short = [([*range(1, 17), 40 + i, 50 + i], 16) for i in range(3)]
    assert "shared_prefixes" not in packed(short).arguments  # 15 tokens
    longer = [([*range(1, 18), 40 + i, 50 + i], 17) for i in range(3)]
    assert "shared_prefixes" in packed(longer).arguments
    long = [([*ids, *range(60, 460)], 17) for ids, _ in longer]
    assert "shared_prefixes" not in packed(long).arguments  # 32 tokens of 1257
    labelled = [(ids, 1) for ids, _ in longer]
    assert "shared_prefixes" not in packed(labelled).arguments


def test_one_synchronisation_more_or_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of rows comes to the host with the numbers that packing needs anyway."""
    reads: list[Any] = []
    original = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: (reads.append(0), original(self))[1])
    packed(SHUFFLED)
    assert len(reads) == 1
