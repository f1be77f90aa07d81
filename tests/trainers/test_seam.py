"""When and for whom TRL's module global is replaced."""

from __future__ import annotations

import dataclasses
import gc
import logging
import threading
import weakref

import parity
import pytest
import tiny
import torch
import trl
from trl.trainer import dpo_trainer, grpo_trainer, kto_trainer, sft_trainer
from trl.trainer import utils as trl_utils

import lowpeak.models
import lowpeak_trainers
from lowpeak import MemoryConfig

DATA = tiny.documents([5, 9])
PAIRS = [(4, 6, 3), (7, 2, 9)]


def sft(trainer, folder, config=lowpeak_trainers.SFTConfig, model=None, **options):
    return trainer(
        model=tiny.llama() if model is None else model,
        args=config(**parity.settings(folder, **options)),
        train_dataset=DATA,
        processing_class=tiny.tokenizer(),
    )


def test_global_is_replaced_only_while_a_trainer_is_built(tmp_path):
    seen = []

    class Spying(lowpeak_trainers.SFTTrainer):
        def _prepare_dataset(self, *args, **kwargs):
            seen.append((sft_trainer.add_fused_lm_head, dpo_trainer.add_fused_lm_head))
            return super()._prepare_dataset(*args, **kwargs)

    trainer = sft(Spying, tmp_path)
    stock = trl_utils.add_fused_lm_head
    assert seen
    assert all(inside is not stock and other is stock for inside, other in seen)
    assert sft_trainer.add_fused_lm_head is stock
    assert parity.has_lowpeak_head(trainer)
    assert not parity.has_lowpeak_head(sft(trl.SFTTrainer, tmp_path, trl.SFTConfig))


def test_global_comes_back_when_construction_fails(tmp_path):
    with pytest.raises(ValueError, match="max_length"):
        sft(lowpeak_trainers.SFTTrainer, tmp_path, packing=True, max_length=None)
    assert sft_trainer.add_fused_lm_head is trl_utils.add_fused_lm_head
    assert not parity.has_lowpeak_head(sft(trl.SFTTrainer, tmp_path, trl.SFTConfig))


def test_trainer_built_while_another_is_being_built(tmp_path):
    built = {}

    class Outer(lowpeak_trainers.SFTTrainer):
        def _prepare_dataset(self, *args, **kwargs):
            built["inner"] = sft(lowpeak_trainers.SFTTrainer, tmp_path, fused_lm_head=False)
            return super()._prepare_dataset(*args, **kwargs)

    outer = sft(Outer, tmp_path)
    assert parity.has_lowpeak_head(outer)
    assert not parity.has_lowpeak_head(built["inner"])
    assert sft_trainer.add_fused_lm_head is trl_utils.add_fused_lm_head


def test_trainer_of_another_thread_keeps_the_head_of_trl(tmp_path):
    built = {}

    def build():
        built["other"] = sft(trl.SFTTrainer, tmp_path, trl.SFTConfig)

    with lowpeak_trainers.enabled():
        thread = threading.Thread(target=build)
        thread.start()
        thread.join()
        built["own"] = sft(trl.SFTTrainer, tmp_path, trl.SFTConfig)
    assert not parity.has_lowpeak_head(built["other"])
    assert parity.has_lowpeak_head(built["own"])


class TheirTrainer(trl.GRPOTrainer):
    """A user's trainer in the user's module."""

    def __init__(self, *args, their_option, **kwargs):
        self.their_option = their_option
        super().__init__(*args, **kwargs)


class Mine(lowpeak_trainers.LowpeakMixin, TheirTrainer):
    """The user's trainer with lowpeak."""


def grpo(trainer, config, folder, **keywords):
    return trainer(
        model=tiny.llama(),
        reward_funcs=lambda completions, **kwargs: [1.0] * len(completions),
        args=config(**parity.settings(folder, num_generations=2)),
        train_dataset=tiny.prompts([3, 4]),
        processing_class=tiny.tokenizer(),
        **keywords,
    )


def test_mixin_before_a_subclass_in_another_module(tmp_path):
    trainer = grpo(Mine, trl.GRPOConfig, tmp_path, their_option=3)
    assert trainer.their_option == 3
    assert parity.has_lowpeak_head(trainer)
    assert grpo_trainer.add_fused_lm_head is trl_utils.add_fused_lm_head


def test_subclass_of_our_trainer(tmp_path):
    class Own(lowpeak_trainers.SFTTrainer):
        pass

    assert parity.has_lowpeak_head(sft(Own, tmp_path))


def test_mixin_behind_the_trainer_is_refused():
    with pytest.raises(TypeError, match=r"class Wrong\(LowpeakMixin, SFTTrainer\)"):

        class Wrong(trl.SFTTrainer, lowpeak_trainers.LowpeakMixin):
            pass


def test_mixin_without_a_supported_trainer_is_refused():
    class Nothing(lowpeak_trainers.LowpeakMixin):
        pass

    with pytest.raises(TypeError, match="no supported TRL trainer"):
        Nothing()


def test_enabled_serves_stock_trainers_with_its_own_settings(tmp_path):
    with lowpeak_trainers.enabled():
        trainer = sft(trl.SFTTrainer, tmp_path, trl.SFTConfig)
        ours_off = sft(lowpeak_trainers.SFTTrainer, tmp_path, fused_lm_head=False)
    with lowpeak_trainers.enabled(MemoryConfig(fused_lm_head=False)):
        off = sft(trl.SFTTrainer, tmp_path, trl.SFTConfig)
    assert [parity.has_lowpeak_head(one) for one in (trainer, ours_off, off)] == [
        True,
        False,
        False,
    ]
    for module in (sft_trainer, dpo_trainer, grpo_trainer, kto_trainer):
        assert module.add_fused_lm_head is trl_utils.add_fused_lm_head


def test_both_heads_of_dpo_are_ours(tmp_path):
    trainer = lowpeak_trainers.DPOTrainer(
        model=tiny.llama(),
        ref_model=tiny.llama(seed=1),
        args=lowpeak_trainers.DPOConfig(**parity.settings(tmp_path)),
        train_dataset=tiny.preferences(PAIRS),
        processing_class=tiny.tokenizer(),
    )
    ids = torch.tensor([[7, 8, 9]], device=trainer.model.device)
    for model in (trainer.model, trainer.ref_model):
        output = model(input_ids=ids, labels=ids, fused_lm_head=True)
        assert isinstance(output, lowpeak.models.FusedCausalLMOutput)


def test_switched_off_by_the_environment_and_by_name(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="lowpeak")
    assert parity.has_lowpeak_head(sft(lowpeak_trainers.SFTTrainer, tmp_path))
    assert not parity.has_lowpeak_head(
        sft(lowpeak_trainers.SFTTrainer, tmp_path, fused_lm_head=False)
    )
    monkeypatch.setenv("LOWPEAK_DISABLE", "head")
    assert not parity.has_lowpeak_head(sft(lowpeak_trainers.SFTTrainer, tmp_path))
    lines = [r.getMessage() for r in caplog.records if r.name == "lowpeak.trainers"]
    by = ("fused_lm_head=False", "LOWPEAK_DISABLE=head")
    padded = (
        "padding-free: off in SFTTrainer, by {}, since TRL's own head takes padded batches only"
    )
    assert lines == [
        "fused LM head: on in SFTTrainer",
        "padding-free: on in SFTTrainer, with attention 'lowpeak'",
        f"fused LM head: off in SFTTrainer, by {by[0]}; TRL's own is used",
        padded.format(by[0]),
        f"fused LM head: off in SFTTrainer, by {by[1]}; TRL's own is used",
        padded.format(by[1]),
    ]


@pytest.mark.parametrize("option", [{"fused_lm_head": False}, {"attention": "sdpa"}], ids=str)
def test_padding_free_is_refused_where_it_cannot_be_had(tmp_path, option):
    with pytest.raises(ValueError, match="padding_free=True does not serve SFTTrainer"):
        sft(lowpeak_trainers.SFTTrainer, tmp_path, padding_free=True, **option)


def test_padding_free_is_off_where_it_needs_a_mask(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="lowpeak.trainers")
    sft(lowpeak_trainers.SFTTrainer, tmp_path, attention="sdpa")
    assert "padding-free: off in SFTTrainer, by attention 'sdpa'" in caplog.text


def test_plain_config_of_trl_means_the_defaults(tmp_path):
    assert parity.has_lowpeak_head(sft(lowpeak_trainers.SFTTrainer, tmp_path, trl.SFTConfig))


def test_impossible_setting_is_refused_at_construction(tmp_path):
    with pytest.raises(ValueError, match="lm_head_scratch_bytes=0"):
        sft(lowpeak_trainers.SFTTrainer, tmp_path, lm_head_scratch_bytes=0)


def test_one_trainer_after_another_on_the_same_model(tmp_path):
    """The second trainer asks for other outputs; those of the first must not stay."""
    model = tiny.llama()
    sft(lowpeak_trainers.SFTTrainer, tmp_path, model=model).train()
    trainer = lowpeak_trainers.DPOTrainer(
        model=model,
        ref_model=tiny.llama(seed=1),
        args=lowpeak_trainers.DPOConfig(**parity.settings(tmp_path, use_weighting=True)),
        train_dataset=tiny.preferences(PAIRS),
        processing_class=tiny.tokenizer(),
    )
    trainer.train()
    assert trainer.state.global_step == parity.STEPS


def test_model_is_freed_with_its_trainers(tmp_path):
    """Also when two trainers followed each other, so that a head was put over another."""
    model = tiny.llama()
    sft(trl.SFTTrainer, tmp_path, trl.SFTConfig, model=model, max_steps=1).train()
    for _ in range(2):
        sft(lowpeak_trainers.SFTTrainer, tmp_path, model=model, max_steps=1).train()
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_drop_in_serves_a_plain_model():
    model = tiny.llama()
    lowpeak_trainers.add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    ids = torch.tensor([[7, 8, 9, 10]])
    output = model(input_ids=ids, labels=ids, fused_lm_head=True)
    logits = tiny.llama()(input_ids=ids).logits[:, :-1] / 0.7
    distribution = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(
        output.log_probs, distribution.log_prob(ids[:, 1:]), rtol=0, atol=1e-5
    )
    torch.testing.assert_close(output.entropy, distribution.entropy(), rtol=0, atol=1e-5)


def test_outputs_are_those_of_trl():
    names = [
        [field.name for field in dataclasses.fields(output)]
        for output in (lowpeak.models.FusedCausalLMOutput, trl_utils.FusedCausalLMOutput)
    ]
    assert names[0] == names[1]
