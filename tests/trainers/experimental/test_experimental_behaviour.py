"""Switches, refusals and what is left as it was, in the experimental trainers."""

from __future__ import annotations

import dataclasses
import logging

import parity
import pytest
import recipes
import tiny
import torch
from peft import PromptTuningConfig
from transformers import HfArgumentParser, T5Config, T5ForConditionalGeneration

from lowpeak import MemoryConfig
from lowpeak_trainers import removed_options

OURS = "lowpeak_trainers"
# Those whose head lowpeak installs itself.
SCORING = ("ORPO", "CPO", "TPO", "OnlineDPO", "A2PO")
each_method = pytest.mark.parametrize("method", recipes.METHODS)


def some(fast, methods=recipes.METHODS):
    """`methods` as parameters, those slow that take the way of a fast one through lowpeak."""
    marks = {method: () if method in fast else pytest.mark.slow for method in methods}
    return pytest.mark.parametrize(
        "method", [pytest.param(method, marks=mark) for method, mark in marks.items()]
    )


def lines(caplog):
    return [record.getMessage() for record in caplog.records]


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="lowpeak.trainers")
    return caplog


@pytest.mark.parametrize("way", ["option", "variable"])
@some(("ORPO", "OnlineDPO"), SCORING)
def test_head_switched_off(method, way, log, monkeypatch, tmp_path):
    if way == "variable":
        monkeypatch.setenv("LOWPEAK_DISABLE", "head")
    options = {"fused_lm_head": False} if way == "option" else {}
    trainer = recipes.build(OURS, method, tmp_path, max_steps=1, **options)
    reason = "fused_lm_head=False" if way == "option" else "LOWPEAK_DISABLE=head"
    assert f"fused LM head: off in {method}Trainer, by {reason}; TRL makes logits" in lines(log)
    assert "forward" not in vars(trainer.model)
    trainer.train()


def test_divergence_switched_off(log, tmp_path):
    stock, ours = (
        recipes.build(package, "GKD", tmp_path, **options)
        for package, options in (("trl", {}), (OURS, {"fused_lm_head": False}))
    )
    off = "fused divergence: off, by fused_lm_head=False; TRL's own is used in GKDTrainer"
    assert off in lines(log)
    stock.train()
    ours.train()
    assert not ours.computes_divergence
    parity.assert_same_logs(ours, stock)


@some(("ORPO", "GKD"))
def test_scratch_that_is_none_is_refused(method, tmp_path):
    with pytest.raises(ValueError, match="lm_head_scratch_bytes=0"):
        recipes.build(OURS, method, tmp_path, lm_head_scratch_bytes=0)


@some(("ORPO", "OnlineDPO"), ("ORPO", "CPO", "OnlineDPO"))
def test_padding_stays_where_metrics_count_it(method, log, tmp_path):
    trainer = recipes.build(OURS, method, tmp_path)
    assert not trainer._layout.on
    counted = "which TRL computes over padding too (padding_free=True does not)"
    assert any(line.endswith(counted) for line in lines(log))


@some(("GKD", "TPO"), ("GKD", "GOLD", "TPO", "A2PO", "GMPO"))
def test_padding_goes_where_no_metric_counts_it(method, tmp_path):
    assert recipes.build(OURS, method, tmp_path)._layout.on


@some(("ORPO", "GKD"))
def test_padding_free_needs_an_attention_for_it(method, tmp_path):
    with pytest.raises(ValueError, match=f"padding_free=True does not serve {method}Trainer"):
        recipes.build(OURS, method, tmp_path, padding_free=True, attention="sdpa")


def test_padding_free_needs_the_head(tmp_path):
    with pytest.raises(ValueError, match="since only lowpeak's head takes packed rows"):
        recipes.build(OURS, "ORPO", tmp_path, padding_free=True, fused_lm_head=False)


def t5():
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=tiny.VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        dropout_rate=0.0,
        num_layers=1,
        num_heads=4,
        pad_token_id=tiny.PAD,
        eos_token_id=tiny.EOS,
        decoder_start_token_id=tiny.PAD,
    )
    return T5ForConditionalGeneration(config)


@some(("ORPO",), ("ORPO", "CPO"))
def test_encoder_decoder_keeps_its_logits(method, log, tmp_path):
    options = {"max_completion_length": 32, "gradient_checkpointing": False}
    stock = recipes.build("trl", method, tmp_path, model=t5(), **options)
    ours = recipes.build(OURS, method, tmp_path, model=t5(), **options)
    off = f"fused LM head: off in {method}Trainer, by its model, an encoder-decoder; TRL makes"
    assert any(line.startswith(off) for line in lines(log))
    stock.train()
    ours.train()
    parity.assert_same_logs(ours, stock)
    with pytest.raises(ValueError, match="fused_lm_head=True does not serve"):
        recipes.build(OURS, method, tmp_path, model=t5(), fused_lm_head=True, **options)


def test_adapter_on_the_head_trains_as_under_trl(log, tmp_path):
    lora = {"target_modules": ["q_proj", "lm_head"]}
    stock, ours = (recipes.build(package, "ORPO", tmp_path, lora=lora) for package in ("trl", OURS))
    if ours._handle is None:
        assert any("an adapter on the LM head is not supported" in line for line in lines(log))
    stock.train()
    ours.train()
    parity.assert_same_logs(ours, stock)


def test_prompt_learning_keeps_the_divergence_of_trl(log, tmp_path):
    adapter = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    trainer = recipes.build(OURS, "GKD", tmp_path, further={"peft_config": adapter})
    assert any("off, by prompt learning" in line for line in lines(log))
    assert trainer._logits_because is not None


@some(("ORPO", "GKD", "OnlineDPO"))
def test_use_cache_is_left_as_it_was(method, tmp_path):
    model = tiny.llama()
    model.config.use_cache = True
    recipes.build(OURS, method, tmp_path, model=model, max_steps=1).train()
    assert model.config.use_cache is True


@some(("ORPO", "OnlineDPO"), SCORING)
def test_second_trainer_of_one_model(method, tmp_path):
    model = tiny.llama()
    first = recipes.build(OURS, method, tmp_path, model=model, max_steps=1)
    first.train()
    second = recipes.build(OURS, method, tmp_path, model=model, max_steps=1)
    second.train()
    assert not first._handle.active
    assert second._handle.active


@each_method
def test_config(method, tmp_path):
    ours = getattr(recipes.module(OURS, method), f"{method}Config")
    theirs = getattr(recipes.module("trl", method), f"{method}Config")
    names = [field.name for field in dataclasses.fields(theirs)]
    further = [field.name for field in dataclasses.fields(removed_options.TrainerConfig)]
    found = [field.name for field in dataclasses.fields(ours)]
    assert found == names + [name for name in further if name not in names]
    assert issubclass(ours, MemoryConfig)
    arguments = ["--output_dir", str(tmp_path), "--fused_lm_head", "false", "--bf16", "false"]
    (parsed,) = HfArgumentParser(ours).parse_args_into_dataclasses(arguments)
    assert parsed.fused_lm_head is False
    assert parsed.to_dict()["attention"] is None


def test_config_of_trl_and_subclass_of_the_user(tmp_path):
    theirs, ours = recipes.module("trl", "ORPO"), recipes.module(OURS, "ORPO")

    class Mine(ours.ORPOTrainer):
        pass

    trainer = Mine(
        model=tiny.llama(),
        args=theirs.ORPOConfig(**parity.settings(tmp_path, max_steps=1, **recipes.OPTIONS["ORPO"])),
        processing_class=tiny.tokenizer(),
        **recipes.keywords("ORPO"),
    )
    trainer.train()
    assert trainer._handle is not None


def test_generation_with_a_fused_head(tmp_path):
    stock, ours = (recipes.build(package, "ORPO", tmp_path) for package in ("trl", OURS))
    batch = next(iter(stock.get_eval_dataloader()))
    texts = []
    for trainer in (stock, ours):
        torch.manual_seed(0)
        texts.append(trainer.generate_from_model(trainer.model, batch))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("method", ["GKD", "TPO"])
def test_logits_where_they_are_asked_for(method, tmp_path):
    trainer = recipes.build(OURS, method, tmp_path)
    batch = next(iter(trainer.get_eval_dataloader()))
    _, logits, _ = trainer.prediction_step(trainer.model, batch, prediction_loss_only=False)
    assert logits.size(-1) == tiny.VOCABULARY


def test_uld_keeps_the_logits_of_trl(log, tmp_path):
    """It compares the distributions over two vocabularies, sorted."""
    tokenizer = recipes.tokenizer_of("GOLD")
    tokenizer.save_pretrained(tmp_path / "teacher")
    options = {"use_uld_loss": True, "teacher_tokenizer_name_or_path": str(tmp_path / "teacher")}
    stock, ours = (recipes.build(package, "GOLD", tmp_path, **options) for package in ("trl", OURS))
    assert any("off, by use_uld_loss=True" in line for line in lines(log))
    stock.train()
    ours.train()
    parity.assert_same_logs(ours, stock)


def test_d4_eval_loss_of_gkd_is_a_mean_over_tokens(tmp_path):
    losses = [
        recipes.build(OURS, "GKD", tmp_path, per_device_eval_batch_size=size).evaluate()[
            "eval_loss"
        ]
        for size in (1, 2, 5)
    ]
    assert losses[0] == pytest.approx(losses[2], rel=1e-5)
    assert losses[1] == pytest.approx(losses[2], rel=1e-5)


def test_unknown_loss_of_tpo(tmp_path):
    trainer = recipes.build(OURS, "TPO", tmp_path)
    trainer.loss_type = "other"
    with pytest.raises(ValueError, match="loss_type='other' is unknown"):
        trainer.train()


@some(("ORPO", "OnlineDPO"), ("ORPO", "OnlineDPO", "TPO"))
def test_bfloat16_autocast(method, tmp_path):
    """The first loss of TRL, within the rounding of bfloat16."""
    stock, ours = (
        recipes.build(package, method, tmp_path, bf16=True, max_steps=1)
        for package in ("trl", OURS)
    )
    if method == "OnlineDPO":
        record = parity.CompletionRecord()
        record.record(stock)
        stock.train()
        record.replay(ours)
    else:
        stock.train()
    ours.train()
    wanted = stock.state.log_history[0]["loss"]
    assert ours.state.log_history[0]["loss"] == pytest.approx(wanted, rel=3e-2)
