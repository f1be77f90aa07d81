"""Padding-free in the trainers: which rows the models see, in which order, and known failures."""

from __future__ import annotations

import methods
import oracle
import parity
import pytest
import tiny
import torch
import transformers
import trl
from watch import embedded_shapes

import lowpeak_trainers
from lowpeak_trainers.padding_free import PaddingFree

MULTIPLE = 16


def watch(trainer):
    """Model and shape of every batch that the policy and the reference embed, in order."""
    seen = []
    for name in ("model", "ref_model"):
        model = trainer.accelerator.unwrap_model(getattr(trainer, name))
        model.get_input_embeddings().register_forward_hook(
            lambda module, args, output, name=name: seen.append((name, tuple(output.shape[:-1])))
        )
    return seen


@pytest.mark.parametrize(
    ("multiple", "padding_free"),
    [
        (MULTIPLE, None),
        (MULTIPLE, False),
        pytest.param(MULTIPLE, True, marks=pytest.mark.slow),
        pytest.param(None, None, marks=pytest.mark.slow),
        pytest.param(None, False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("method", ["DPO", "KTO"])
def test_reference_first_in_rows_of_the_layout(method, multiple, padding_free, tmp_path):
    """And KTO's two reference forwards are one, so that it has three; as stock TRL in numbers."""
    options = {
        "max_steps": 2,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False,
        "pad_to_multiple_of": multiple,
    }
    stock = methods.build(trl, method, tmp_path, options=options)
    stock.train()
    ours = methods.build(
        lowpeak_trainers, method, tmp_path, options={**options, "padding_free": padding_free}
    )
    seen = watch(ours)
    ours.train()
    parity.assert_same_logs(ours, stock)
    step = seen[-(2 if method == "DPO" else 3) :]
    assert [name for name, _ in step] == ["ref_model", "model", "model"][: len(step)]
    for _, (rows, width) in step:
        assert (rows == 1) == (padding_free is not False)
        assert multiple is None or width % multiple == 0


@pytest.mark.parametrize("method", methods.FAST_METHODS[1:3])
@pytest.mark.parametrize("padding_free", [None, False])
def test_precomputed_reference(padding_free, method, tmp_path):
    """TRL precomputes inside its constructor: padding-free as well."""
    options = {"max_steps": 2, "precompute_ref_log_probs": True}
    stock = methods.build(trl, method, tmp_path, options=options)
    reference = tiny.llama(seed=1)
    seen = embedded_shapes(reference)
    ours = methods.build(
        lowpeak_trainers,
        method,
        tmp_path,
        ref_model=reference,
        options={**options, "padding_free": padding_free},
    )
    assert (seen[-1][0] == 1) == (padding_free is None)  # the self-tests come before
    assert ours.args.padding_free is padding_free
    stock.train()
    ours.train()
    parity.assert_same_logs(ours, stock)


PROMPTS = [[20, 31], [11, 12, 13, 14, 15, 16]]
COMPLETIONS = [[41, 42, tiny.EOS], [51, tiny.EOS]]
TEMPERATURE = 0.8


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=tiny.VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        initializer_range=0.3,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        pad_token_id=tiny.PAD,
        bos_token_id=tiny.BOS,
        eos_token_id=tiny.EOS,
    )
    return transformers.GPT2LMHeadModel(config)


def scored(folder, method, **options):
    """What the trainer makes of PROMPTS, padded on the left, with COMPLETIONS."""
    trainer = methods.build(
        lowpeak_trainers,
        method,
        folder,
        model=gpt2(),
        options={"temperature": TEMPERATURE, "beta": 0.0, **options},
    )
    rows = [p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    before, after = (max(map(len, side)) for side in (PROMPTS, COMPLETIONS))
    ids = torch.full((len(rows), before + after), tiny.PAD)
    mask = torch.zeros_like(ids)
    for row, (prompt, tokens) in enumerate(zip(PROMPTS, rows, strict=True)):
        span = slice(before - len(prompt), before - len(prompt) + len(tokens))
        ids[row, span], mask[row, span] = torch.tensor(tokens), 1
    device = trainer.model.device
    logps, entropies, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids.to(device), mask.to(device), after, compute_entropy=True
    )
    return logps.cpu(), entropies.cpu(), mask[:, before:].bool()


@pytest.mark.parametrize("method", ["GRPO", "RLOO"])
def test_g4_left_padded_prompts_of_learned_positions(method, tmp_path):
    twin = oracle.in_float64(gpt2()).eval()
    wanted = torch.cat(
        [
            oracle.log_probs(twin, prompt + completion, TEMPERATURE)[len(prompt) - 1 :]
            for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)
        ]
    ).detach()
    logps, entropies, mask = scored(tmp_path, method)
    torch.testing.assert_close(logps[mask].double(), wanted, atol=5e-5, rtol=1e-5)
    assert (logps[~mask] == 0).all()
    assert (entropies[~mask] == 0).all()
    padded, _, _ = scored(tmp_path, method, padding_free=False)
    assert (padded[mask] - wanted).abs().max() > 0.05  # what TRL makes of it


def test_c3_packed_rows_come_without_a_mask(tmp_path):
    trainer = lowpeak_trainers.SFTTrainer(
        model=tiny.llama(),
        args=lowpeak_trainers.SFTConfig(
            **parity.settings(tmp_path, packing=True, max_length=21, per_device_train_batch_size=1)
        ),
        train_dataset=tiny.documents([7, 5, 9]),
        processing_class=tiny.tokenizer(),
    )
    row = next(iter(trainer.get_train_dataloader()))
    assert "attention_mask" not in row
    assert sorted(row["cu_seq_lens_q"].diff().tolist()) == [5, 7, 9]
    layout = PaddingFree()
    layout.switch(True)
    ids = torch.full((3, 9), 7)
    mask = (torch.arange(9) < torch.tensor([[7], [5], [9]])).long()
    packed = layout({"input_ids": ids, "attention_mask": mask}, ids)
    assert packed is None  # padding has a label here
    packed = layout({"input_ids": ids, "attention_mask": mask}, ids.masked_fill(mask == 0, -100))
    assert "attention_mask" not in packed.arguments


def test_c5_no_target_across_a_boundary(tmp_path):
    """Each document's first token has no label in the packed row, whatever its label was."""
    lengths = [7, 5, 9]
    layout = PaddingFree()
    layout.switch(True, multiple=8)
    ids = torch.full((3, 9), 7)
    mask = (torch.arange(9) < torch.tensor(lengths)[:, None]).long()
    row = layout({"input_ids": ids, "attention_mask": mask}, ids.masked_fill(mask == 0, -100))
    targets = row.labels[0, 1:] != -100
    assert int(targets.sum()) == sum(n - 1 for n in lengths)
    for start in row.arguments["cu_seq_lens_q"][:-1].tolist():
        assert row.labels[0, start] == -100
