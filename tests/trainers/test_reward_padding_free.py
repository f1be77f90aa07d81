"""Reward models without padding: the score of each sequence alone, and TRL's run."""

from __future__ import annotations

import logging

import oracle
import parity
import pytest
import tiny
import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig, TaskType
from watch import embedded_shapes

import lowpeak_trainers

LENGTHS = [(5, 9), (12, 3), (7, 7), (4, 8)]
PAIRS = [(tiny.random_ids(c, i), tiny.random_ids(r, 50 + i)) for i, (c, r) in enumerate(LENGTHS)]
TOKENS = sum(map(sum, LENGTHS))
BATCH = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
PACKED, PADDED = (1, TOKENS), (8, 12)


def slow_but(names, *fast):
    """All of `names`, those that are not `fast` marked slow."""
    return [pytest.param(n, marks=() if n in fast else pytest.mark.slow) for n in names]


def dataset(pairs, **columns):
    chosen, rejected = ([list(pair[side]) for pair in pairs] for side in (0, 1))
    return Dataset.from_dict({"chosen_ids": chosen, "rejected_ids": rejected, **columns})


def build(folder, library=lowpeak_trainers, *, model=None, data=None, **options):
    keywords = {
        name: options.pop(name)
        for name in ("callbacks", "peft_config", "data_collator", "compute_metrics")
        if name in options
    }
    data = data or dataset(PAIRS)
    return library.RewardTrainer(
        model=model or tiny.reward_model(),
        args=library.RewardConfig(
            **parity.settings(folder, **{"max_steps": 1, "max_grad_norm": 1e9, **BATCH, **options})
        ),
        train_dataset=data,
        eval_dataset=data,
        processing_class=tiny.tokenizer(),
        **keywords,
    )


def alone(model, ids):
    """The score of one sequence without padding: that of its last token."""
    tokens = torch.tensor([ids])
    return model.score(model.base_model(tokens, use_cache=False)[0][0, -1]).squeeze()


def right_loss(model, pairs=PAIRS, centre=None, margins=None):
    chosen, rejected = (torch.stack([alone(model, pair[i]) for pair in pairs]) for i in (0, 1))
    gap = chosen - rejected - (0 if margins is None else torch.tensor(margins).double())
    loss = -torch.nn.functional.logsigmoid(gap).mean()
    return loss if centre is None else loss + centre * ((chosen + rejected) ** 2).mean()


def left_padding(examples):
    """A user's collator: TRL's pads on the right."""
    rows = [e["chosen_ids"] for e in examples] + [e["rejected_ids"] for e in examples]
    width = max(map(len, rows))
    ids = [[tiny.PAD] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


VARIANTS = {
    "plain": {},
    "centred": {"center_rewards_coefficient": 0.1},
    "left padding": {"data_collator": left_padding},
    "multiple": {"pad_to_multiple_of": 16},
    "no checkpointing": {"gradient_checkpointing": False},
    "margins": {"data": dataset(PAIRS, margin=[0.5, -1.0, 0.25, 2.0])},
}


@pytest.mark.parametrize("padding_free", [None, False], ids=["free", "padded"])
@pytest.mark.parametrize("variant", slow_but(VARIANTS, "centred", "left padding", "multiple"))
def test_loss_and_gradients_of_each_sequence_alone(variant, padding_free, tmp_path):
    options = VARIANTS[variant]
    record = oracle.GradientRecord()
    model = tiny.reward_model()
    trainer = build(tmp_path, model=model, callbacks=[record], padding_free=padding_free, **options)
    seen = embedded_shapes(model)
    trainer.train()
    expected = PACKED if padding_free is None else PADDED
    if variant == "multiple":
        expected = (1, -(-TOKENS // 16) * 16) if padding_free is None else (8, 16)
    assert seen == [expected]
    twin = oracle.in_float64(tiny.reward_model())
    margins = options["data"]["margin"] if "data" in options else None
    loss = right_loss(twin, PAIRS, options.get("center_rewards_coefficient"), margins)
    loss.backward()
    oracle.assert_close(trainer.state.log_history[0]["loss"], loss.item())
    oracle.assert_same_gradients(record.steps[0], oracle.gradients(twin))


PARITY = {
    "plain": {},
    "centred": {"center_rewards_coefficient": 0.1},
    "accumulated": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "adapter": {
        "peft_config": LoraConfig(
            r=4,
            task_type=TaskType.SEQ_CLS,
            target_modules=["q_proj", "down_proj"],
            modules_to_save=["score"],
            init_lora_weights=False,
        )
    },
    "evaluated": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 3},
    "metrics": {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "compute_metrics": lambda p: {"sum": float(p.predictions.sum())},
    },
    "multiple": {"pad_to_multiple_of": 8},
}
PADS = [([10, 0, 11, 12], [13, 14, 0, 0]), ([0, 15, 16], [17, 0, 18, 19, 20])]


@pytest.mark.parametrize(
    "what",
    slow_but(
        [*PARITY, "pad tokens in the text", "dropout disabled"],
        "adapter",
        "metrics",
        "pad tokens in the text",
    ),
)
def test_follows_trl(what, tmp_path):
    options = dict(PARITY.get(what, {}))
    if what == "pad tokens in the text":  # the last of them is no token to score by, as in TRL
        options["data"] = dataset(PADS * 2)
    if what == "dropout disabled":
        # centred: without, a bias that moves all rewards alike has no gradient but rounding
        options |= {"disable_dropout": True, "center_rewards_coefficient": 0.1}
    runs = []
    for library in (trl, lowpeak_trainers):
        model = None
        if what == "dropout disabled":
            model = small(
                "GPT2ForSequenceClassification",
                "GPT2Config",
                **{**GPT2, "resid_pdrop": 0.5, "embd_pdrop": 0.5},
            )
        trainer = build(tmp_path, library, model=model, **{**options, "max_steps": 5})
        seen = embedded_shapes(trainer.accelerator.unwrap_model(trainer.model))
        trainer.train()
        assert all((rows == 1) == (library is lowpeak_trainers) for rows, _ in seen)
        runs.append(trainer)
    parity.assert_same_logs(runs[1], runs[0])


def test_shared_prompts_keep_the_token_to_score_by(tmp_path):
    """Where the pad token ends the text, the model scores by an earlier one, as with pad = eos."""
    prompt = tiny.random_ids(24, 9)
    pairs = [([*prompt, 20, 21, 22], [*prompt, 20, tiny.PAD]), ([*prompt, 31, tiny.PAD], [*prompt])]
    runs = []
    for library, options in ((trl, {}), (lowpeak_trainers, {"share_prompts": True})):
        trainer = build(tmp_path, library, data=dataset(pairs * 2), max_steps=3, **options)
        seen = embedded_shapes(trainer.model)
        trainer.train()
        runs.append(trainer)
    assert seen[-1][0] == 1
    assert seen[-1][1] < 3 * len(prompt)
    parity.assert_same_logs(runs[1], runs[0])


def small(family, config, **overrides):
    torch.manual_seed(3)
    settings = {
        "vocab_size": tiny.VOCABULARY,
        "num_labels": 1,
        "initializer_range": 0.3,
        "pad_token_id": tiny.PAD,
        "bos_token_id": tiny.BOS,
        "eos_token_id": tiny.EOS,
        **overrides,
    }
    return getattr(transformers, family)(getattr(transformers, config)(**settings))


COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GPT2 = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip
FAMILIES = {
    "gpt2": lambda: small("GPT2ForSequenceClassification", "GPT2Config", **GPT2),
    "mistral": lambda: small(
        "MistralForSequenceClassification", "MistralConfig", **COMMON, sliding_window=4
    ),
    "qwen3": lambda: small("Qwen3ForSequenceClassification", "Qwen3Config", **COMMON, head_dim=8),
    "mixtral": lambda: small(
        "MixtralForSequenceClassification", "MixtralConfig", **COMMON, num_local_experts=4
    ),
}


@pytest.mark.parametrize("family", slow_but(FAMILIES, "gpt2"))
@pytest.mark.parametrize("collator", [None, left_padding], ids=["right", "left"])
def test_families(family, collator, tmp_path):
    """GPT-2 behind left padding among them: its learned positions are those of the text."""
    model = FAMILIES[family]()
    record = oracle.GradientRecord()
    trainer = build(
        tmp_path, model=model, data_collator=collator, padding_free=True, callbacks=[record]
    )
    seen = embedded_shapes(model)
    trainer.train()
    assert seen == [PACKED]
    twin = oracle.in_float64(FAMILIES[family]())
    twin.set_experts_implementation("eager")  # the grouped one has no float64
    right = right_loss(twin)
    right.backward()
    oracle.assert_close(trainer.state.log_history[0]["loss"], right.item())
    oracle.assert_same_gradients(record.steps[0], oracle.gradients(twin))


class MeanScore(transformers.LlamaForSequenceClassification):
    """Scores by the mean over all places of the batch, padding among them."""

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        hidden = self.model(input_ids, attention_mask=attention_mask, **kwargs)[0]
        return transformers.modeling_outputs.SequenceClassifierOutputWithPast(
            logits=self.score(hidden).mean(1)
        )


class OwnEmbeddings(transformers.LlamaForSequenceClassification):
    """Gives its backbone embeddings."""

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        embedded = self.model.embed_tokens(input_ids)
        hidden = self.model(inputs_embeds=embedded, attention_mask=attention_mask, **kwargs)[0]
        return transformers.modeling_outputs.SequenceClassifierOutputWithPast(
            logits=self.score(hidden)[:, -1]
        )


def of_class(cls):
    torch.manual_seed(0)
    return cls(tiny.reward_model().config)


def with_hidden_states():
    model = tiny.reward_model()
    model.config.output_hidden_states = True
    return model


def with_eager():
    model = tiny.reward_model()
    model.set_attn_implementation("eager")
    return model


REFUSED = {
    "mean": (lambda: of_class(MeanScore), "the scores of packed sequences differ by"),
    "embeddings": (lambda: of_class(OwnEmbeddings), "does not call its backbone with token ids"),
    "states": (with_hidden_states, "its config asks for what every layer computes"),
    "eager": (with_eager, "attention 'eager', which needs a mask of tokens by tokens"),
    "positions": (
        lambda: small(
            "OPTForSequenceClassification",
            "OPTConfig",
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            word_embed_proj_dim=32,
            dropout=0.0,
        ),
        "attention 'sdpa' does not keep documents apart (a document changes by",
    ),
    "dropout": (
        lambda: small("GPT2ForSequenceClassification", "GPT2Config", **{**GPT2, "attn_pdrop": 0.1}),
        "its attention has dropout (attn_pdrop=0.1)",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_padded_with_a_reason(what, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="lowpeak.trainers")
    make, reason = REFUSED[what]
    model = make()
    trainer = build(tmp_path, model=model)
    (line,) = [r.getMessage() for r in caplog.records if "padding-free" in r.getMessage()]
    assert line.startswith("padding-free: off in RewardTrainer, by ")
    assert reason in line
    seen = embedded_shapes(model)
    trainer.train()
    assert seen[0][0] == 8
    with pytest.raises(ValueError, match="padding_free=True does not serve RewardTrainer: ") as e:
        build(tmp_path, model=make(), padding_free=True)
    assert reason in str(e.value)


def test_other_tokens_in_the_padding(tmp_path):
    """The model would score by one of them: it does so, padded."""

    def collator(examples):
        batch = left_padding(examples)
        batch["input_ids"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 9)
        return {name: x.flip(1) for name, x in batch.items()}

    runs = []
    for library in (trl, lowpeak_trainers):
        trainer = build(tmp_path, library, data_collator=collator, max_steps=2)
        seen = embedded_shapes(trainer.model)
        trainer.train()
        assert set(seen) == {PADDED}
        runs.append(trainer)
    parity.assert_same_logs(runs[1], runs[0])


def test_one_trainer_after_another_on_the_same_model(tmp_path):
    model = tiny.reward_model()
    for options, shape in (({}, PACKED), ({"padding_free": False}, PADDED), ({}, PACKED)):
        trainer = build(tmp_path, model=model, **options)
        seen = embedded_shapes(model)
        trainer.train()
        assert seen == [shape]


@pytest.mark.parametrize("off", ["LOWPEAK_DISABLE", "attention"])
def test_switched_off(off, tmp_path, monkeypatch):
    options = {}
    if off == "attention":
        options["attention"] = "off"
    else:
        monkeypatch.setenv(off, "padding_free")
    model = tiny.reward_model()
    trainer = build(tmp_path, model=model, **options)
    seen = embedded_shapes(model)
    trainer.train()
    assert seen == [PADDED]


def test_mixed_precision(tmp_path):
    """The self-test runs in the precision of the training; so does the packed row."""
    model = tiny.reward_model()
    trainer = build(tmp_path, model=model, bf16=True)
    seen = embedded_shapes(model)
    trainer.train()
    assert seen == [PACKED]
    right = right_loss(oracle.in_float64(tiny.reward_model())).item()
    oracle.assert_close(trainer.state.log_history[0]["loss"], right, 0.05)


def test_resume_and_reload(tmp_path):
    """Steps 3 and 4 of a resumed run are those of a run in one go; the saved model scores alike."""
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, **BATCH}
    whole = build(tmp_path / "whole", **options)
    whole.train()
    resumed = build(tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    oracle.assert_close(resumed.state.log_history[-2]["loss"], whole.state.log_history[-2]["loss"])
    whole.save_model(str(tmp_path / "saved"))
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    model = load(tmp_path / "saved", dtype=torch.float32).eval()
    for ids in PAIRS[0]:
        ours = whole.model.eval()(torch.tensor([ids], device=whole.model.device)).logits
        torch.testing.assert_close(ours.cpu(), model(torch.tensor([ids])).logits)
