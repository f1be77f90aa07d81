"""Expected gradients with layouts, precisions, adapters and losses of one's own."""

from __future__ import annotations

import logging

import methods
import parity
import pytest
import test_distillation as distillation
import test_share_prompts as share
import torch
import trl
from peft import LoraConfig
from test_expectations import OLD, ONE, assert_held, assert_none, steps

import lowpeak_trainers
from lowpeak.lm_head import expectation_counts


@pytest.fixture(autouse=True)
def _log(caplog):
    caplog.set_level(logging.INFO, logger="lowpeak.trainers")


MODES = {
    "padded": ("GRPO", {**OLD, "padding_free": False}),
    "padded_dft": ("SFT", {"loss_type": "dft", "padding_free": False}),
    "checkpointing": ("GRPO", {**OLD, "gradient_checkpointing": True}),
    "filled": ("SFT", {"pad_to_multiple_of": 8}),
}


@pytest.mark.parametrize("mode", MODES)
def test_holds_in(mode, tmp_path, caplog):
    method, options = MODES[mode]
    ours = dict(options)
    layout = ours.pop("padding_free", None)
    parity.assert_parity(
        lambda: methods.build(trl, method, tmp_path, options=steps(ours)),
        lambda: methods.build(
            lowpeak_trainers, method, tmp_path, options=steps({**ours, "padding_free": layout})
        ),
        online=method in methods.ONLINE,
    )
    assert_held(8, caplog)


@pytest.mark.parametrize(("method", "options"), [("GRPO", OLD), ("DPO", ONE)], ids=["GRPO", "DPO"])
def test_holds_with_shared_prompts(method, options, tmp_path, caplog):
    share.assert_follows_trl(method, tmp_path, options=steps(options))
    assert_held(8, caplog)


def test_holds_in_packed_rows(tmp_path, caplog):
    options = {"packing": True, "max_length": 32, **ONE, "loss_type": "dft"}
    methods.assert_parity("SFT", tmp_path, options=steps(options))
    assert_held(8, caplog)


def unscale(parameter):
    parameter.grad.div_(65536)


class Scaled:
    """Scales the loss up before the backward and the gradients down after it."""

    def training_step(self, *args, **kwargs):
        if not self.state.global_step:
            backward = self.accelerator.backward
            self.accelerator.backward = lambda loss, **rest: backward(loss * 65536, **rest)
            for parameter in self.model.parameters():
                parameter.register_post_accumulate_grad_hook(unscale)
        return super().training_step(*args, **kwargs)


def test_holds_with_a_gradient_scaler(tmp_path, caplog, monkeypatch):
    scaled = type("GRPOTrainer", (Scaled, lowpeak_trainers.GRPOTrainer), {})
    monkeypatch.setattr(lowpeak_trainers, "GRPOTrainer", scaled)
    options = {**OLD, "gradient_accumulation_steps": 1, "max_steps": 5, "beta": 0.0}
    methods.assert_parity("GRPO", tmp_path, options=options)
    assert_held(5, caplog)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_holds_in_half_precision(dtype, tmp_path, caplog):
    model = methods.tiny.llama().to(dtype)
    options = {"max_steps": 3, "loss_type": "dft"}
    methods.build(lowpeak_trainers, "SFT", tmp_path, model=model, options=options).train()
    assert_held(6, caplog)


def test_holds_under_autocast(tmp_path, caplog):
    options = {"max_steps": 3, "bf16": True, **OLD}
    methods.build(lowpeak_trainers, "GRPO", tmp_path, options=options).train()
    assert_held(6, caplog)


LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def test_a_frozen_head_needs_none(tmp_path, caplog):
    lora = LoraConfig(**LORA, init_lora_weights=False)
    options = steps({"learning_rate": 1e-4})
    methods.assert_parity("SFT", tmp_path, options=options, peft_config=lora)
    counts = expectation_counts()
    assert counts["fused_lm_head"].held == counts["fused_lm_head"].missed == 0
    assert counts["fused_lm_head, frozen weight"].held == 8


def test_holds_with_a_frozen_head_and_an_entropy_bonus(tmp_path, caplog):
    lora = LoraConfig(**LORA, init_lora_weights=False)
    options = steps({"entropy_coef": 0.01, "learning_rate": 1e-4})
    methods.assert_parity("GRPO", tmp_path, options=options, peft_config=lora)
    assert_held(8, caplog)


class LossOfMyOwn:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, fused_lm_head=True)
        return -(outputs.log_probs**3).mean()


@pytest.mark.parametrize("front", [True, False])
def test_none_for_a_loss_of_ones_own(front, tmp_path, caplog, monkeypatch):
    bases = (
        (LossOfMyOwn, lowpeak_trainers.SFTTrainer)
        if front
        else (lowpeak_trainers.LowpeakMixin, LossOfMyOwn, trl.SFTTrainer)
    )
    monkeypatch.setattr(lowpeak_trainers, "SFTTrainer", type("Mine", bases, {}))
    methods.build(lowpeak_trainers, "SFT", tmp_path, options={"max_steps": 1}).train()
    if front:
        counts = expectation_counts()["fused_lm_head"]
        assert (counts.held, counts.missed) == (0, 0)
    else:
        assert_none(caplog, "LossOfMyOwn.compute_loss makes a loss of its own")


def test_a_wrong_expectation_changes_nothing(tmp_path, caplog, monkeypatch):
    from lowpeak.models import ExpectedLoss
    from lowpeak_trainers import expecting

    wrong = ExpectedLoss(lambda output: (output.log_probs**2).sum(), token_local=True)
    losses = {**expecting.LOSSES, "trl.trainer.sft_trainer": lambda trainer, inputs: wrong}
    monkeypatch.setattr(expecting, "LOSSES", losses)
    methods.assert_parity("SFT", tmp_path, options=steps({}))
    counts = expectation_counts()["fused_lm_head"]
    assert (counts.held, counts.missed) == (0, 3)
    assert "held in 0 of 3 backward passes" in caplog.text


def test_evaluation_expects_nothing(tmp_path, caplog):
    trainer = methods.build(
        lowpeak_trainers, "SFT", tmp_path, **{"eval_dataset": methods.tiny.guessable_documents([9])}
    )
    before = expectation_counts().get("fused_lm_head")
    trainer.evaluate()
    assert expectation_counts().get("fused_lm_head") == before


@pytest.mark.parametrize("padding_free", [None, False])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_holds_in_distillation(beta, padding_free, tmp_path, caplog):
    distillation.build(tmp_path, beta=beta, max_steps=3, padding_free=padding_free).train()
    counts = expectation_counts()["fused_divergence"]
    assert (counts.held, counts.missed) == (3, 0)
    assert "held in 3 of 3 backward passes of DistillationTrainer" in caplog.text
