"""Failures of DPO that users reported; the oracle is every sequence alone, full logits."""

from __future__ import annotations

import math

import oracle
import parity
import pytest
import tiny
import torch
from peft import LoraConfig
from torch.nn.functional import logsigmoid

import lowpeak_trainers

BETA = 0.1
PAIRS = [(4, 6, 3), (7, 2, 9), (3, 11, 5), (9, 4, 4)]


def build(folder, *, model, ref_model=None, peft_config=None, callbacks=None, **options):
    """DPOTrainer over PAIRS that takes one step on all of them."""
    return lowpeak_trainers.DPOTrainer(
        model=model,
        ref_model=ref_model,
        args=lowpeak_trainers.DPOConfig(
            **parity.settings(
                folder,
                max_steps=1,
                per_device_train_batch_size=4,
                gradient_accumulation_steps=1,
                max_grad_norm=1e9,
                beta=BETA,
                **options,
            )
        ),
        train_dataset=tiny.preferences(PAIRS),
        processing_class=tiny.tokenizer(),
        peft_config=peft_config,
        callbacks=callbacks,
    )


def completion_log_probs(model, side):
    """Log-probabilities of the tokens of each `side` completion, its EOS among them."""
    data = tiny.preferences(PAIRS)
    tokenizer = tiny.tokenizer()
    result = []
    for prompt, completion in zip(data["prompt"], data[side], strict=True):
        start = len(tokenizer(prompt)["input_ids"])
        ids = tokenizer(prompt + completion)["input_ids"] + [tiny.EOS]
        result.append(oracle.log_probs(model, ids)[start - 1 :])
    return result


def right_loss(loss_type, policy, reference):
    """DPO loss of PAIRS. sigmoid: arXiv 2305.18290 (7); ipo: 2310.12036 (17), per token."""
    chosen = completion_log_probs(policy, "chosen")
    rejected = completion_log_probs(policy, "rejected")
    if loss_type == "sft":
        return -torch.cat(chosen).mean()
    with torch.no_grad():
        ref_chosen = completion_log_probs(reference, "chosen")
        ref_rejected = completion_log_probs(reference, "rejected")
    losses = []
    for c, r, ref_c, ref_r in zip(chosen, rejected, ref_chosen, ref_rejected, strict=True):
        c_ratio, r_ratio = (c - ref_c).sum(), (r - ref_r).sum()
        if loss_type == "sigmoid":
            losses.append(-logsigmoid(BETA * (c_ratio - r_ratio)))
        else:
            losses.append((c_ratio / len(c) - r_ratio / len(r) - 1 / (2 * BETA)) ** 2)
    return torch.stack(losses).mean()


LAYOUTS = {
    "padded": {},
    "padded_to_16": {"pad_to_multiple_of": 16},
    "precomputed": {"precompute_ref_log_probs": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo", "sft"])
def test_f1_values_and_gradients_against_full_logits(loss_type, layout, tmp_path):
    record = oracle.GradientRecord()
    trainer = build(
        tmp_path,
        model=tiny.llama(),
        ref_model=tiny.llama(seed=1),
        callbacks=[record],
        loss_type=loss_type,
        **LAYOUTS[layout],
    )
    trainer.train()
    policy = oracle.in_float64(tiny.llama())
    loss = right_loss(loss_type, policy, oracle.in_float64(tiny.llama(seed=1)))
    loss.backward()
    oracle.assert_close(trainer.state.log_history[0]["loss"], loss.item())
    oracle.assert_same_gradients(record.steps[0], oracle.gradients(policy))


@pytest.mark.parametrize("precompute", [False, True])
@pytest.mark.parametrize("perturbed", [False, True])
def test_b3_policy_uses_the_saved_head_and_reference_the_original(perturbed, precompute, tmp_path):
    trainer = build(
        tmp_path,
        model=tiny.llama(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]),
        precompute_ref_log_probs=precompute,
    )
    assert trainer.ref_model is None
    head = trainer.model.get_base_model().lm_head
    if perturbed:
        with torch.no_grad():
            weight = head.modules_to_save["default"].weight
            weight += 0.3 * torch.randn(
                weight.shape, generator=torch.Generator().manual_seed(5)
            ).to(weight.device)
    policy = tiny.llama()
    policy.lm_head.weight.data = head.modules_to_save["default"].weight.detach().cpu().clone()
    right = right_loss("sigmoid", oracle.in_float64(policy), oracle.in_float64(tiny.llama())).item()
    trainer.train()
    oracle.assert_close(trainer.state.log_history[0]["loss"], right)
    if not perturbed:
        oracle.assert_close(right, math.log(2))
