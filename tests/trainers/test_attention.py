"""The trainers choose the attention where their user named none; packed rows stay apart."""

from __future__ import annotations

import functools
import logging

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
from lowpeak.attention.forward import lowpeak_attention
from lowpeak.attention.pattern import lowpeak_mask

LENGTHS = [3, 30, 7, 12]
PACKED = {"packing": True, "max_length": 33}
PADDING_FREE = {"padding_free": True, "max_length": None}
gemma3 = functools.partial(tiny.gemma3, window=4)


def build(folder, library=lowpeak_trainers, *, model=None, callbacks=None, **options):
    """SFTTrainer of `library` over four documents; keywords go to the config."""
    return library.SFTTrainer(
        model=model or tiny.llama(),
        args=library.SFTConfig(
            **parity.settings(folder, **{"max_steps": 1, "max_grad_norm": 1e9, **options})
        ),
        train_dataset=tiny.documents(LENGTHS),
        processing_class=tiny.tokenizer(),
        callbacks=callbacks,
    )


def attention_of(trainer):
    """The implementation that the trainer's model has."""
    return trainer.accelerator.unwrap_model(trainer.model).config._attn_implementation


@pytest.mark.parametrize("layout", [{}, PACKED, PADDING_FREE], ids=["padded", "packed", "free"])
@pytest.mark.parametrize("make", [tiny.llama, gemma3], ids=["llama", "gemma3"])
def test_c4_documents_as_each_alone(make, layout, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="lowpeak")
    record = oracle.GradientRecord()
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, **layout}
    if layout == PACKED:
        options["gradient_accumulation_steps"] = 1
    trainer = build(tmp_path, model=make(), callbacks=[record], **options)
    assert attention_of(trainer) == "lowpeak"
    assert "attention lowpeak: packed documents come out as each alone" in caplog.text
    trainer.train()
    model = oracle.in_float64(make())
    ids = tiny.documents(LENGTHS)["input_ids"]
    loss = -sum(oracle.log_probs(model, row).sum() for row in ids) / (sum(LENGTHS) - len(LENGTHS))
    loss.backward()
    oracle.assert_close(trainer.state.log_history[0]["loss"], loss.item())
    oracle.assert_same_gradients(record.steps[0], oracle.gradients(model))


@pytest.mark.parametrize("layout", [PACKED, PADDING_FREE], ids=["packed", "free"])
def test_follows_trl(layout, tmp_path):
    options = {"max_steps": 3, **layout}
    stock = build(tmp_path, trl, model=gemma3(), **options)
    ours = build(tmp_path, model=gemma3(), **options)
    assert (attention_of(stock), attention_of(ours)) == ("sdpa", "lowpeak")
    stock.train()
    ours.train()
    parity.assert_same_logs(ours, stock)


@pytest.mark.parametrize("method", methods.METHODS)
def test_every_trainer_and_its_reference(method, tmp_path):
    trainer = methods.build(lowpeak_trainers, method, tmp_path)
    assert attention_of(trainer) == "lowpeak"
    reference = vars(trainer).get("ref_model")
    if reference is not None:
        assert trainer.accelerator.unwrap_model(reference).config._attn_implementation == "lowpeak"


def test_named_attention_is_honoured(tmp_path):
    folder = tiny.save(tiny.llama(), tmp_path / "model")
    for given, wanted in (
        ({}, "lowpeak"),
        ({"model_init_kwargs": {"attn_implementation": "sdpa"}}, "sdpa"),
        ({"model_init_kwargs": {"attn_implementation": "lowpeak"}}, "lowpeak"),
        ({"attention": "eager"}, "eager"),
        ({"attention": "off"}, "sdpa"),
    ):
        assert attention_of(build(tmp_path, model=folder, **given)) == wanted
    eager = tiny.llama()
    eager.set_attn_implementation("eager")
    assert attention_of(build(tmp_path, model=eager)) == "eager"


def test_switched_off_by_the_environment(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="lowpeak")
    monkeypatch.setenv("LOWPEAK_DISABLE", "attention")
    assert attention_of(build(tmp_path)) == "sdpa"
    assert "attention: left as it is in SFTTrainer, by LOWPEAK_DISABLE=attention" in caplog.text


def opt():
    """Counts positions in the row, so that its documents must not be packed."""
    config = transformers.OPTConfig(
        vocab_size=tiny.VOCABULARY,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
        dropout=0.0,
        init_std=0.3,
        pad_token_id=tiny.PAD,
    )
    torch.manual_seed(0)
    return transformers.OPTForCausalLM(config)


def gpt_oss():
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=tiny.VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.0,
        sliding_window=4,
        initializer_range=0.3,
        pad_token_id=tiny.PAD,
        bos_token_id=tiny.BOS,
        eos_token_id=tiny.EOS,
        tie_word_embeddings=False,
    )
    return transformers.GptOssForCausalLM(config)


def qwen3_next():
    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(
        vocab_size=tiny.VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        mlp_only_layers=[0, 1],
        router_aux_loss_coef=0.0,
        initializer_range=0.3,
        pad_token_id=tiny.PAD,
    )
    return transformers.Qwen3NextForCausalLM(config)


C1_LENGTHS = [7, 5, 9, 3]
MIXING = {"gpt-oss": gpt_oss, "opt": opt, "qwen3-next": qwen3_next}


@pytest.mark.parametrize("layout", [{**PACKED, "max_length": 24}, PADDING_FREE], ids=str)
@pytest.mark.parametrize("what", MIXING)
def test_c1_documents_that_attention_would_mix_are_computed_apart(what, layout, tmp_path, caplog):
    """TRL's packed row, and TRL's padding_free where the config is TRL's own."""
    record, make = oracle.GradientRecord(), MIXING[what]
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, **layout}
    if layout.get("packing"):
        options["per_device_train_batch_size"] = 1
    trainer = lowpeak_trainers.SFTTrainer(
        model=make(),
        args=trl.SFTConfig(**parity.settings(tmp_path, max_steps=1, max_grad_norm=1e9, **options)),
        train_dataset=tiny.documents(C1_LENGTHS),
        processing_class=tiny.tokenizer(),
        callbacks=[record],
    )
    assert "packed rows are computed padded in SFTTrainer, a document a row" in caplog.text
    trainer.train()
    model = oracle.in_float64(make())
    model.set_experts_implementation("eager")
    ids = tiny.documents(C1_LENGTHS)["input_ids"]
    loss = -sum(oracle.log_probs(model, row).sum() for row in ids) / sum(n - 1 for n in C1_LENGTHS)
    loss.backward()
    oracle.assert_close(trainer.state.log_history[0]["loss"], loss.item())
    wanted = oracle.gradients(model)
    trained = {name for name, gradient in wanted.items() if gradient is not None}
    oracle.assert_same_gradients(
        *({name: side[name] for name in trained} for side in (record.steps[0], wanted)),
        5 * oracle.TOLERANCE,  # recurrent layers and OPT's biases magnify rounding
    )


def test_c1_what_trl_makes_of_it(tmp_path):
    """The condition holds: without lowpeak the packed loss is another one."""
    losses = []
    for packing in (True, False):
        options = {**PACKED, "max_length": 24} if packing else {"per_device_train_batch_size": 4}
        trainer = build(tmp_path, trl, model=opt(), gradient_accumulation_steps=1, **options)
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert abs(losses[0] - losses[1]) > 1e-2


@pytest.fixture
def flash():
    """The name of an attention that passes for flash attention, and runs anywhere."""
    name = "made_up_flash"
    transformers.AttentionInterface.register(name, lowpeak_attention)
    transformers.AttentionMaskInterface.register(name, lowpeak_mask)
    yield name
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        del interface._global_mapping[name]


@pytest.mark.parametrize("how", ["on the model", "off"])
def test_flash_that_the_user_named(how, flash, tmp_path, caplog):
    """Padding-free on a model whose layers are all attention, padded on a hybrid."""
    caplog.set_level(logging.INFO, logger="lowpeak.trainers")
    for make, packed in ((tiny.llama, True), (qwen3_next, False)):
        model, options = make(), {}
        model.config._attn_implementation = flash
        if how == "off":
            options["attention"] = "off"
        trainer = build(tmp_path, model=model, **options)
        assert attention_of(trainer) == flash
        seen = embedded_shapes(model)
        trainer.train()
        assert (seen[-1][0] == 1) == packed
    assert f"padding-free: on in SFTTrainer, with attention '{flash}'" in caplog.text
    assert "padding-free: off in SFTTrainer, by attention" in caplog.text
    assert "type linear_attention, which may reach across documents" in caplog.text
    with pytest.raises(ValueError, match="padding_free=True does not serve SFTTrainer"):
        build(tmp_path, model=model, padding_free=True, **options)


def test_packing_that_leaks_is_said(tmp_path, caplog):
    build(tmp_path, model=opt(), fused_lm_head=False, **PACKED)
    assert (
        "the documents of a packed row may see each other in SFTTrainer: a document" in caplog.text
    )
    caplog.clear()
    build(tmp_path, model=opt())
    assert caplog.text == ""


def test_reference_that_cannot_be_packed_keeps_both_padded(tmp_path, caplog):
    """A reference of another family: the batches of both are padded, and that is said."""
    caplog.set_level(logging.INFO, logger="lowpeak.trainers")
    trainer = methods.build(
        lowpeak_trainers, "DPO", tmp_path, ref_model=opt(), options={"max_steps": 1}
    )
    assert "padding-free: off in DPOTrainer, by attention 'sdpa' does not keep" in caplog.text
    assert "in the reference model" in caplog.text
    stock = methods.build(trl, "DPO", tmp_path, ref_model=opt(), options={"max_steps": 1})
    trainer.train()
    stock.train()
    oracle.assert_close(trainer.state.log_history[0]["loss"], stock.state.log_history[0]["loss"])
    with pytest.raises(ValueError, match=r"in the reference model\. Set padding_free=None"):
        methods.build(
            lowpeak_trainers, "DPO", tmp_path, ref_model=opt(), options={"padding_free": True}
        )
