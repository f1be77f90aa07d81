"""Distillation: values against full logits in float64, refusals, and what lowpeak adds."""

from __future__ import annotations

import logging
import math

import oracle
import parity
import pytest
import tiny
import torch
import trl
from peft import LoraConfig, PromptTuningConfig
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM

import lowpeak_trainers
from lowpeak.models import SplitCausalLM
from lowpeak_trainers.split_divergence import split_divergence

PROMPTS = [[20, 31, 42], [50, 61]]
COMPLETIONS = [[*tiny.random_ids(n - 1, seed), tiny.EOS] for seed, n in enumerate((6, 3))]
TARGETS = sum(map(len, COMPLETIONS))


def teacher_llama(**overrides):
    return tiny.llama(seed=2, **{"hidden_size": 48, "initializer_range": 0.15, **overrides})


def build(folder, *, student=None, teacher=None, trainer=None, callbacks=None, **options):
    """A DistillationTrainer whose student "generates" COMPLETIONS; options go to the config."""
    peft_config = options.pop("peft_config", None)
    config = lowpeak_trainers.DistillationConfig(
        **parity.settings(
            folder,
            **{
                "max_steps": 1,
                "gradient_accumulation_steps": 1,
                "max_completion_length": 6,
                "max_grad_norm": 1e9,
                "shuffle_dataset": False,
                **options,
            },
        )
    )
    data = tiny.Dataset.from_dict({"prompt": [tiny.words(ids) for ids in PROMPTS]})
    built = (trainer or lowpeak_trainers.DistillationTrainer)(
        model=student or tiny.llama(),
        teacher_model=teacher or teacher_llama(),
        args=config,
        train_dataset=data,
        eval_dataset=data,
        processing_class=tiny.tokenizer(),
        peft_config=peft_config,
        callbacks=callbacks,
    )
    script(built)
    return built


def script(trainer):
    """Answer each prompt with its own completion, however they are batched."""
    answers = dict(zip(map(tuple, PROMPTS), COMPLETIONS, strict=True))

    def generate(input_ids, attention_mask, **kwargs):
        rows = [
            answers[tuple(ids[mask.bool()].tolist())]
            for ids, mask in zip(input_ids, attention_mask, strict=True)
        ]
        width = max(map(len, rows))
        padded = torch.tensor([[*row, *[tiny.PAD] * (width - len(row))] for row in rows])
        return torch.cat([input_ids, padded.to(input_ids.device)], dim=1)

    trainer.model.generate = generate


def completion_logits(model, prompt, completion):
    """Logits [completion, V] of one sequence alone."""
    ids = torch.tensor([prompt + completion])
    return model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double()


def right_divergence(student, teacher, beta, temperature=1.0, vocabulary=None):
    """Sum of the divergences over all tokens; arXiv 2306.13649, section 2.1."""
    total = torch.zeros((), dtype=torch.float64)
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        q = completion_logits(student, prompt, completion)[:, :vocabulary] / temperature
        with torch.no_grad():
            p = completion_logits(teacher, prompt, completion)[:, :vocabulary] / temperature
        q, p = q.softmax(-1), p.softmax(-1)
        if beta == 0.0:
            total = total + (p * (p / q).log()).sum()
        elif beta == 1.0:
            total = total + (q * (q / p).log()).sum()
        else:
            m = beta * p + (1 - beta) * q
            total = total + beta * (p * (p / m).log()).sum()
            total = total + (1 - beta) * (q * (q / m).log()).sum()
    return total


def assert_right(folder, beta, student=tiny.llama, teacher=teacher_llama, **options):
    """Loss and gradients of one step are those of full logits."""
    vocabulary = options.pop("vocabulary", None)
    record = oracle.GradientRecord()
    trainer = build(
        folder, student=student(), teacher=teacher(), callbacks=[record], beta=beta, **options
    )
    trainer.train()
    assert trainer.computes_divergence
    twin = oracle.in_float64(student())
    temperature = options.get("temperature", 1.0)
    right = right_divergence(
        twin, oracle.in_float64(teacher()).eval(), beta, temperature, vocabulary
    )
    loss = right / TARGETS
    loss.backward()
    oracle.assert_close(trainer.state.log_history[0]["loss"], loss.item())
    oracle.assert_same_gradients(record.steps[0], oracle.gradients(twin))
    return trainer


BETAS = [0.0, 0.3, 0.5, 1.0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("beta", BETAS)
def test_values_and_gradients_against_full_logits(beta, temperature, tmp_path):
    assert_right(tmp_path, beta, temperature=temperature)


@pytest.mark.parametrize("batch", [(2, 1), (1, 2)])
def test_accumulation_changes_nothing(batch, tmp_path):
    size, steps = batch
    assert_right(tmp_path, 0.5, per_device_train_batch_size=size, gradient_accumulation_steps=steps)


def small(family, config, **overrides):
    torch.manual_seed(3)
    settings = {
        "vocab_size": tiny.VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "pad_token_id": tiny.PAD,
        "bos_token_id": tiny.BOS,
        "eos_token_id": tiny.EOS,
        **overrides,
    }
    return family(config(**settings))


def capped():
    return small(Gemma2ForCausalLM, Gemma2Config, head_dim=8, final_logit_softcapping=3.0)


def scaled():
    return small(CohereForCausalLM, CohereConfig, logit_scale=0.25)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_soft_cap_of_the_student_and_scale_of_the_teacher(beta, tmp_path):
    assert_right(tmp_path, beta, student=capped, teacher=scaled, temperature=0.7)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_own_modules_give_the_same_numbers(beta, tmp_path, monkeypatch):
    """The route of heads that are no plain matrix: logits of the models, a token at a time."""
    monkeypatch.setattr(SplitCausalLM, "transform", None)
    assert_right(tmp_path, beta, lm_head_scratch_bytes=1, temperature=0.7)


ADAPTED = {"r": 4, "init_lora_weights": False}


@pytest.mark.parametrize(
    "peft_config",
    [
        LoraConfig(**ADAPTED, target_modules=["q_proj"], modules_to_save=["lm_head"]),
        LoraConfig(**ADAPTED, target_modules=["q_proj", "lm_head"]),
    ],
    ids=["saved_head", "b1_lora_head"],
)
def test_adapter_of_the_student(peft_config, tmp_path):
    record = oracle.GradientRecord()
    trainer = build(
        tmp_path,
        beta=1.0,
        callbacks=[record],
        peft_config=peft_config,
    )
    before = oracle.in_float64(trainer.model)
    trainer.train()
    loss = right_divergence(before, oracle.in_float64(teacher_llama()).eval(), 1.0) / TARGETS
    loss.backward()
    oracle.assert_close(trainer.state.log_history[0]["loss"], loss.item())
    oracle.assert_same_gradients(record.steps[0], oracle.gradients(before))


@pytest.mark.parametrize(
    ("peft_config", "message", "options"),
    [
        (
            LoraConfig(target_modules=["q_proj", "lm_head"]),
            "adapter to `lm_head` is not supported",
            {"fused_lm_head": False},
        ),
        (
            PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
            "Prompt-learning PEFT methods .* are not supported",
            {},
        ),
    ],
    ids=["lm_head_of_trl", "prompt_tuning"],
)
def test_adapters_that_trl_refuses(peft_config, message, options, tmp_path):
    with pytest.raises(ValueError, match=message):
        build(tmp_path, peft_config=peft_config, **options)


def test_g5_vocabularies_of_different_size_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"vocab_size 128 .* vocab_size 136"):
        build(tmp_path, teacher=teacher_llama(vocab_size=136))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_g5_shared_tokens_on_request(beta, tmp_path):
    assert_right(
        tmp_path,
        beta,
        teacher=lambda: teacher_llama(vocab_size=136),
        shared_vocabulary=True,
        vocabulary=128,
    )


@pytest.mark.parametrize("own_modules", [False, True])
def test_g5_larger_student(own_modules, tmp_path, monkeypatch):
    """Its further tokens take no part in the loss and are not generated: the teacher has none."""
    if own_modules:
        monkeypatch.setattr(SplitCausalLM, "transform", None)
    trainer = assert_right(
        tmp_path,
        0.5,
        student=lambda: tiny.llama(vocab_size=136),
        shared_vocabulary=True,
        vocabulary=128,
    )
    del trainer.model.generate
    assert trainer.generation_config.suppress_tokens == list(range(128, 136))
    trainer.model.lm_head.weight.data[128:] *= 100.0  # what would be generated otherwise
    ids = torch.tensor([PROMPTS[0]], device=trainer.model.device)
    answer = trainer.model.generate(ids, generation_config=trainer.generation_config)
    assert answer.max() < 128
    assert math.isfinite(trainer.evaluate()["eval_loss"])


def test_g5_teacher_by_name(tmp_path):
    folder = tiny.save(teacher_llama(vocab_size=136).bfloat16(), tmp_path / "teacher")
    trainer = build(
        tmp_path,
        teacher=folder,
        shared_vocabulary=True,
        teacher_model_init_kwargs={"dtype": "float32"},
    )
    assert trainer.teacher_model.dtype == torch.float32
    assert trainer.teacher_model.config.vocab_size == 136
    trainer.train()
    assert trainer.computes_divergence


def test_g5_request_without_the_fused_divergence_is_refused(tmp_path):
    with pytest.raises(ValueError, match="shared_vocabulary=True needs lowpeak's divergence"):
        build(tmp_path, shared_vocabulary=True, fused_lm_head=False)


def test_g5_loaded_teacher_with_load_options_is_refused(tmp_path):
    with pytest.raises(ValueError, match="teacher_model_init_kwargs is set"):
        build(tmp_path, shared_vocabulary=True, teacher_model_init_kwargs={"dtype": "float32"})


@pytest.mark.parametrize("head", [True, False])
def test_d4_eval_loss_does_not_depend_on_the_batch_size(head, tmp_path):
    right = right_divergence(
        oracle.in_float64(tiny.llama()), oracle.in_float64(teacher_llama()).eval(), 1.0
    )
    for batch in (1, 2):
        trainer = build(tmp_path, fused_lm_head=head, per_device_eval_batch_size=batch)
        oracle.assert_close(trainer.evaluate()["eval_loss"], right.item() / TARGETS)


def test_switched_off_by_name_and_by_the_environment(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="lowpeak.trainers")
    for state in ("on", "flag", "variable"):
        if state == "variable":
            monkeypatch.setenv("LOWPEAK_DISABLE", "head")
        trainer = build(tmp_path, fused_lm_head=False if state == "flag" else None)
        trainer.train()
        assert trainer.computes_divergence == (state == "on")
    assert [r.getMessage() for r in caplog.records if "fused divergence" in r.getMessage()] == [
        "fused divergence: on in DistillationTrainer",
        "fused divergence: off, by fused_lm_head=False; TRL's own is used in DistillationTrainer",
        "fused divergence: off, by LOWPEAK_DISABLE=head; TRL's own is used in DistillationTrainer",
    ]


class TheirTrainer(trl.DistillationTrainer):
    """A user's trainer."""

    def log(self, logs, start_time=None):
        super().log({**logs, "theirs": 1.0}, start_time)


class Mine(lowpeak_trainers.DistillationMixin, TheirTrainer):
    """The user's trainer with lowpeak."""


def test_subclass_of_the_user(tmp_path):
    trainer = build(tmp_path, trainer=Mine)
    trainer.train()
    assert trainer.computes_divergence
    assert trainer.state.log_history[0]["theirs"] == 1.0


def test_plain_mixin_is_refused():
    with pytest.raises(TypeError, match=r"Put lowpeak_trainers\.DistillationMixin in its place"):

        class Wrong(lowpeak_trainers.LowpeakMixin, TheirTrainer):
            pass


def test_mixin_behind_the_trainer_is_refused():
    with pytest.raises(TypeError, match="before LowpeakMixin"):

        class Wrong(TheirTrainer, lowpeak_trainers.DistillationMixin):
            pass


def test_heads_on_two_devices_are_refused():
    meta = torch.zeros(tiny.VOCABULARY, 48, device="meta")
    splits = [SplitCausalLM(m) for m in (tiny.llama(), teacher_llama())]
    splits[1].weight_and_bias = lambda: (meta, None)
    nothing = torch.zeros(1)
    with pytest.raises(ValueError, match="the student's LM head is on cpu, the teacher's on meta"):
        split_divergence(
            splits[0],
            nothing,
            splits[1],
            nothing,
            beta=1.0,
            temperature=1.0,
            mask=nothing,
            shared_vocabulary=False,
            scratch_bytes=None,
        )
