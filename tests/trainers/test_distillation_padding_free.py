"""Distillation without padding: student and teacher each packed or padded, with the same result."""

from __future__ import annotations

import logging

import oracle
import pytest
import tiny
import torch
from test_distillation import (
    COMPLETIONS,
    PROMPTS,
    TARGETS,
    assert_right,
    build,
    right_divergence,
    teacher_llama,
)
from transformers import GPT2Config, GPT2LMHeadModel
from watch import embedded_shapes

TOKENS = sum(len(p) + len(c) for p, c in zip(PROMPTS, COMPLETIONS, strict=True))
WIDTH = max(map(len, PROMPTS)) + max(map(len, COMPLETIONS))
PACKED, PADDED = (1, TOKENS), (2, WIDTH)
SLOW = pytest.mark.slow


def with_eager(model):
    """A model whose user named an attention that needs masks."""
    model.set_attn_implementation("eager")
    return model


def capable(make):
    return make()


def incapable(make):
    return with_eager(make())


SIDES = {
    "both": (capable, capable, PACKED, PACKED),
    "student": (capable, incapable, PACKED, PADDED),
    "teacher": (incapable, capable, PADDED, PACKED),
    "none": (incapable, incapable, PADDED, PADDED),
}


@pytest.mark.parametrize("beta", [pytest.param(b, marks=SLOW) for b in (0.0, 1.0)] + [0.5])
@pytest.mark.parametrize("who", SIDES)
def test_each_model_for_itself(who, beta, tmp_path):
    make_student, make_teacher, student_shape, teacher_shape = SIDES[who]
    seen = []

    def watched(make, base):
        def build_it():
            model = make(base)
            seen.append(embedded_shapes(model))
            return model

        return build_it

    assert_right(
        tmp_path,
        beta,
        student=watched(make_student, tiny.llama),
        teacher=watched(make_teacher, teacher_llama),
        temperature=0.7,
        per_device_train_batch_size=2,
    )
    # the first two: the others are the oracle's; tests of attention and head come before the step
    assert [shapes[-1] for shapes in seen[:2]] == [student_shape, teacher_shape]


def test_why_is_said(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="lowpeak.trainers")
    build(tmp_path, teacher=with_eager(teacher_llama()))
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("padding-free")]
    assert lines == [
        "padding-free: on in DistillationTrainer, with attention 'lowpeak'",
        "padding-free: off in the teacher of DistillationTrainer, by attention 'eager', which "
        "needs a mask of tokens by tokens for it",
    ]


@pytest.mark.parametrize("who", ["student", "teacher"])
def test_insisting_is_refused_where_one_of_them_cannot(who, tmp_path):
    options = {
        "student": {"student": with_eager(tiny.llama())},
        "teacher": {"teacher": with_eager(teacher_llama())},
    }[who]
    owner = "DistillationTrainer" if who == "student" else "the teacher of DistillationTrainer"
    with pytest.raises(ValueError, match=f"does not serve {owner}: attention 'eager'"):
        build(tmp_path, padding_free=True, **options)
    with pytest.raises(ValueError, match="does not serve DistillationTrainer: fused_lm_head=False"):
        build(tmp_path, padding_free=True, fused_lm_head=False)


@pytest.mark.parametrize("off", ["flag", "variable"])
def test_switched_off(off, tmp_path, monkeypatch):
    if off == "variable":
        monkeypatch.setenv("LOWPEAK_DISABLE", "padding_free")
    trainer = build(tmp_path, padding_free=False if off == "flag" else None)
    student, teacher = embedded_shapes(trainer.model), embedded_shapes(trainer.teacher_model)
    trainer.train()
    assert student[-1] == teacher[-1] == PADDED


@pytest.mark.parametrize(("padding_free", "shape"), [(None, (1, 16)), (False, (2, 16))], ids=str)
def test_filled_to_a_multiple(padding_free, shape, tmp_path):
    """The row as a whole without padding; prompts and completions each with it."""
    trainer = assert_right(
        tmp_path,
        1.0,
        pad_to_multiple_of=8,
        padding_free=padding_free,
        per_device_train_batch_size=2,
    )
    seen = embedded_shapes(trainer.model)
    trainer.evaluate()
    assert seen[-1] == shape


def gpt2(seed=0):
    """Learned positions: a left-padded prompt moves them under TRL."""
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(
        GPT2Config(
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
    )
    with torch.no_grad():
        model.transformer.wpe.weight *= 4.0  # a place more or less must show in the loss
    return model


def test_g4_learned_positions_behind_a_padded_prompt(tmp_path):
    assert_right(
        tmp_path, 0.5, student=gpt2, teacher=lambda: gpt2(1), per_device_train_batch_size=2
    )
    padded = build(
        tmp_path, student=gpt2(), teacher=gpt2(1), beta=0.5, padding_free=False,
        per_device_train_batch_size=2,
    )  # fmt: skip
    padded.train()
    twins = (oracle.in_float64(gpt2()), oracle.in_float64(gpt2(1)).eval())
    right = right_divergence(*twins, 0.5).item() / TARGETS
    assert abs(padded.state.log_history[0]["loss"] - right) > 1e-3


@pytest.mark.parametrize("checkpointing", [pytest.param(True, marks=SLOW), False])
def test_checkpointing(checkpointing, tmp_path):
    assert_right(tmp_path, 0.5, gradient_checkpointing=checkpointing, max_steps=1)


def test_attention_of_the_teacher(tmp_path):
    folder = tiny.save(teacher_llama(), tmp_path / "teacher")
    for options, wanted in (
        ({}, "lowpeak"),
        ({"teacher_model_init_kwargs": {"attn_implementation": "sdpa"}}, "sdpa"),
        ({"attention": "off"}, "sdpa"),
        ({"attention": "eager"}, "eager"),
    ):
        options = {
            **options,
            "teacher_model_init_kwargs": {
                "dtype": "float32", **options.get("teacher_model_init_kwargs", {}),
            },
        }  # fmt: skip
        teacher = build(tmp_path, teacher=folder, **options).teacher_model
        assert teacher.config._attn_implementation == wanted


def test_attention_that_serves_the_student_alone(tmp_path):
    """attention="lowpeak" is meant for the model that is trained."""
    teacher = teacher_llama(attention_dropout=0.1)
    trainer = build(tmp_path, teacher=teacher, attention="lowpeak")
    models = (trainer.model, trainer.teacher_model)
    assert [m.config._attn_implementation for m in models] == ["lowpeak", "sdpa"]
    with pytest.raises(ValueError, match="does not serve LlamaForCausalLM: its attention has drop"):
        build(tmp_path, student=tiny.llama(attention_dropout=0.1), attention="lowpeak")
