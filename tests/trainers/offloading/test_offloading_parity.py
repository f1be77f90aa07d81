"""Training with `activation_offloading` is training without it, bit for bit."""

from __future__ import annotations

import parity
import pytest
import tiny
import torch
import trl
from offloaded import METHODS, assert_same_steps, assert_same_training, build, move_everything
from oracle import GradientRecord
from peft import LoraConfig
from transformers import TrainerCallback

import lowpeak_trainers

# The trainers of TRL that have a helper of their own for this option.
HELPED = ("SFT", "DPO", "KTO", "Reward")


@pytest.fixture
def made(monkeypatch, device):
    """What trainers make to move activations; never TRL's helper."""

    def helper(**kwargs):
        raise AssertionError("TRL's helper was asked for")

    for method in HELPED:
        module = f"trl.trainer.{method.lower()}_trainer.get_act_offloading_ctx_manager"
        monkeypatch.setattr(module, helper)
    return move_everything(monkeypatch, device)


def assert_moved(made, *, checkpoints):
    (offload,) = made
    offload.synchronize()
    stats = offload.stats()
    assert stats.copied_out.count > 0
    assert stats.copied_in.count > 0
    assert (stats.checkpoint_inputs.count > 0) == checkpoints
    assert stats.host_bytes == 0
    return stats


@pytest.mark.parametrize("method", METHODS)
def test_every_trainer(method, made, tmp_path):
    trainer = assert_same_training(method, tmp_path)
    assert trainer.args.gradient_checkpointing
    assert trainer.args.activation_offloading is True
    assert trainer.activation_offload is made[0]
    stats = assert_moved(made, checkpoints=True)
    assert stats.forwards >= 4  # two steps of two batches
    assert ("asked_for_first" in stats.kept) == (method != "Reward")


@pytest.mark.parametrize("reentrant", [True, False, None])
@pytest.mark.parametrize("method", ["SFT", "DPO"])
def test_checkpointing(method, reentrant, made, tmp_path):
    options = {"gradient_checkpointing": False}
    if reentrant is not None:
        options = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    assert_same_training(method, tmp_path, **options)
    assert_moved(made, checkpoints=reentrant is not None)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_adapters(checkpointing, made, tmp_path):
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    options = {"peft_config": lora, "gradient_checkpointing": checkpointing}

    def model():  # the input of the first layer is a leaf, that of the last one stays
        return tiny.llama(num_hidden_layers=4)

    trainer = assert_same_training("SFT", tmp_path, model=model, **options)
    assert any("lora_A" in name for name, _ in trainer.model.named_parameters())
    assert_moved(made, checkpoints=checkpointing)


@pytest.mark.parametrize("method", ["DPO", "GRPO"])
def test_groups_of_a_token_budget(method, made, tmp_path):
    """One context is open while the groups of a batch go through the model in turn."""
    assert_same_training(method, tmp_path, max_tokens_per_batch=40, per_device_train_batch_size=4)
    assert_moved(made, checkpoints=True)


def test_dropout_under_recompute(made, tmp_path):
    """H3: masks of the recompute are those of the forward, in reentrant checkpoints too."""
    lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, lora_dropout=0.3)
    for reentrant in (True, False):
        kwargs = {"use_reentrant": reentrant}
        assert_same_training(
            "SFT", tmp_path, peft_config=lora, gradient_checkpointing_kwargs=kwargs, seed=3
        )
    assert len(made) == 2


@pytest.mark.parametrize("method", ["SFT", "GRPO"])
def test_stock_trainers_inside_enabled(method, made, tmp_path):
    """The config asks for it where TRL's has the option, `enabled()` where it has none."""
    records = [GradientRecord(), GradientRecord()]
    for offloads, record in zip((False, True), records, strict=True):
        of_all = offloads and method not in HELPED
        options = {"activation_offloading": offloads} if method in HELPED else {}
        with lowpeak_trainers.enabled(activation_offloading=of_all):
            trainer = build(trl, method, tmp_path, **options)
        trainer.add_callback(record)
        trainer.train()
    assert type(trainer) is getattr(trl, f"{method}Trainer")
    assert_same_steps(records[1].steps, records[0].steps)
    assert_moved(made, checkpoints=True)


def test_resumed_run(made, tmp_path):
    """A checkpoint of a run that offloads is resumed by one that does not, and the other way."""

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

    def run(folder, *, offloads, stop=False, resume=None):
        saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
        trainer = build(lowpeak_trainers, "SFT", folder, activation_offloading=offloads, **saving)
        if stop:
            trainer.add_callback(Stop())
        trainer.train(resume_from_checkpoint=resume and str(folder / "checkpoint-2"))
        return trainer

    whole = run(tmp_path / "whole", offloads=False)
    for first in (True, False):
        folder = tmp_path / str(first)
        run(folder, offloads=first, stop=True)
        second = run(folder, offloads=not first, resume=True)
        assert second.state.global_step == 4
        for name, weight in whole.model.state_dict().items():
            torch.testing.assert_close(second.model.state_dict()[name], weight, msg=name)
    assert len(made) == 2
    assert all(offload.stats().copied_in.count for offload in made)


@pytest.mark.parametrize("checkpointing", [pytest.param(True, marks=pytest.mark.slow), False])
def test_h5_experts_without_tokens(checkpointing, made, tmp_path):
    """Two tokens a batch leave experts without any; evaluation runs after every step."""
    steps, held = 50, []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if made:
                held.append((made[0].stats().host_bytes, _allocated()))

    def train(*, offloads):
        model = tiny.mixtral()
        trainer = lowpeak_trainers.SFTTrainer(
            model=model,
            args=lowpeak_trainers.SFTConfig(
                **_every_step(tmp_path, steps, checkpointing), activation_offloading=offloads
            ),
            train_dataset=tiny.documents([2] * 8),
            eval_dataset=tiny.documents([5]),
            processing_class=tiny.tokenizer(),
            callbacks=[Watch(), records[offloads]],
        )
        trainer.train()
        return [x for x in trainer.state.log_history if "eval_loss" in x]

    records = {False: GradientRecord(), True: GradientRecord()}
    evaluations = [len(train(offloads=offloads)) for offloads in (False, True)]
    assert evaluations == [steps, steps]
    assert_same_steps(records[True].steps, records[False].steps)
    assert len(held) == steps
    assert {host for host, _ in held} == {0}
    # the first steps make the optimizer's states; to keep one tensor a step would be 23 KiB
    grown = max(device for _, device in held) - max(device for _, device in held[:5])
    assert grown < 4096
    assert_moved(made, checkpoints=checkpointing)


def _every_step(folder, steps, checkpointing):
    return parity.settings(
        folder,
        max_steps=steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        gradient_checkpointing=checkpointing,
    )


def _allocated():
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
