"""Failures of KTO that users reported; the oracle is every sequence alone, full logits."""

from __future__ import annotations

import oracle
import parity
import pytest
import tiny
import torch

import lowpeak_trainers

BETA = 0.1
LENGTHS = [(4, 6), (7, 3), (3, 9), (5, 4)]
LABELS = {
    "all_good": [True] * 4,
    "all_bad": [False] * 4,
    "mixed": [True, False, False, True],
}


def token_ids():
    """(prompt, completion with EOS) of each row."""
    data, tokenizer = tiny.prompt_completions(LENGTHS), tiny.tokenizer()
    return [
        (tokenizer(prompt)["input_ids"], [*tokenizer(completion)["input_ids"], tiny.EOS])
        for prompt, completion in zip(data["prompt"], data["completion"], strict=True)
    ]


def sums(model, rows):
    """Log-probability of each completion after its prompt."""
    return torch.stack(
        [
            oracle.log_probs(model, prompt + answer)[len(prompt) - 1 :].sum()
            for prompt, answer in rows
        ]
    )


def right_loss(loss_type, labels):
    """Loss and gradients; arXiv 2402.01306 (7), 2408.06266 (7) for single completions.

    The KL estimate of KTO is that of prompts with the completion of the row before, in the batch.
    """
    policy = oracle.in_float64(tiny.llama())
    reference = oracle.in_float64(tiny.llama(seed=1))
    rows = token_ids()
    others = [(prompt, rows[index - 1][1]) for index, (prompt, _) in enumerate(rows)]
    with torch.no_grad():
        kl = (sums(policy, others) - sums(reference, others)).mean().clamp(min=0)
        reference_sums = sums(reference, rows)
    if loss_type != "kto":
        kl = torch.zeros(())
    ratios = sums(policy, rows) - reference_sums
    signs = torch.tensor([1.0 if label else -1.0 for label in labels], dtype=torch.float64)
    loss = (1 - torch.sigmoid(signs * BETA * (ratios - kl))).mean()
    loss.backward()
    return loss.item(), kl.item(), oracle.gradients(policy)


@pytest.mark.parametrize("precompute", [False, True])
@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_f3_one_class_in_the_batch_or_the_data(loss_type, labels, precompute, tmp_path):
    record = oracle.GradientRecord()
    trainer = lowpeak_trainers.KTOTrainer(
        model=tiny.llama(),
        ref_model=tiny.llama(seed=1),
        args=lowpeak_trainers.KTOConfig(
            **parity.settings(
                tmp_path,
                max_steps=1,
                per_device_train_batch_size=4,
                gradient_accumulation_steps=1,
                max_grad_norm=1e9,
                beta=BETA,
                loss_type=loss_type,
                precompute_ref_log_probs=precompute,
                train_sampling_strategy="sequential",
            )
        ),
        train_dataset=tiny.judged(LENGTHS, LABELS[labels]),
        processing_class=tiny.tokenizer(),
        callbacks=[record],
    )
    trainer.train()
    logs = trainer.state.log_history[0]
    loss, kl, gradients = right_loss(loss_type, LABELS[labels])
    oracle.assert_close(logs["loss"], loss)
    oracle.assert_close(logs["kl"], kl)
    oracle.assert_same_gradients(record.steps[0], gradients)
    assert ("rewards/chosen" in logs) == (True in LABELS[labels])
    assert ("rewards/rejected" in logs) == (False in LABELS[labels])


def test_f3_the_kl_estimate_matters_here():
    """Otherwise the test above would not see a missing one."""
    assert right_loss("kto", LABELS["mixed"])[1] > 0.5


def test_adapter_on_the_head_without_its_forward_is_refused_as_by_trl(tmp_path):
    from peft import LoraConfig

    with pytest.raises(ValueError, match="Applying a PEFT adapter to `lm_head` is not supported"):
        lowpeak_trainers.KTOTrainer(
            model=tiny.llama(),
            args=lowpeak_trainers.KTOConfig(fused_lm_head=False, **parity.settings(tmp_path)),
            train_dataset=tiny.judged(LENGTHS, LABELS["mixed"]),
            processing_class=tiny.tokenizer(),
            peft_config=LoraConfig(r=4, target_modules=["q_proj", "lm_head"]),
        )
