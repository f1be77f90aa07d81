"""`enabled()`: stock trainers of TRL with the head, the attention and the layout of lowpeak."""

from __future__ import annotations

import inspect
import logging
import threading

import methods
import parity
import pytest
import tiny
import torch
import trl
from watch import embedded_shapes

import lowpeak_trainers
from lowpeak import MemoryConfig

PAIRS = [(4, 6, 3), (7, 2, 9), (3, 11, 5), (9, 4, 4)]
TRAINERS = [getattr(trl, f"{method}Trainer") for method in (*methods.METHODS, "Reward")]


def attention_of(model):
    return model.config._attn_implementation


def packs(trainer):
    """Whether the model sees packed rows in training, once its head is tested."""
    seen = embedded_shapes(trainer.accelerator.unwrap_model(trainer.model))
    trainer.train()
    return seen[-1][0] == 1


def sft(folder, library=trl, **options):
    return library.SFTTrainer(
        model=options.pop("model", None) or tiny.llama(),
        args=library.SFTConfig(**parity.settings(folder, **{"max_steps": 1, **options})),
        train_dataset=tiny.documents([5, 9, 4, 7]),
        processing_class=tiny.tokenizer(),
    )


def reward(folder, library=trl, **options):
    return library.RewardTrainer(
        model=tiny.reward_model(),
        args=library.RewardConfig(**parity.settings(folder, **options)),
        train_dataset=tiny.preferences(PAIRS),
        processing_class=tiny.tokenizer(),
    )


@pytest.mark.parametrize("method", methods.FAST_METHODS)
def test_stock_trainers_train_as_ours(method, tmp_path):
    stock = methods.build(trl, method, tmp_path)
    with lowpeak_trainers.enabled():
        inside = methods.build(trl, method, tmp_path)
    assert type(inside) is getattr(trl, f"{method}Trainer")
    assert parity.has_lowpeak_head(inside)
    assert attention_of(inside.model) == "lowpeak"
    if method in methods.REFERENCED:
        assert attention_of(inside.ref_model) == "lowpeak"
    if method in methods.ONLINE:
        record = parity.CompletionRecord()
        record.record(stock)
        record.replay(inside)
    fused = []
    model = inside.accelerator.unwrap_model(inside.model)
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: fused.append(kwargs.get("cu_seq_lens_q") is not None),
        with_kwargs=True,
    )
    stock.train()
    inside.train()
    assert any(fused)
    parity.assert_same_logs(inside, stock)


def test_reward(tmp_path):
    stock = reward(tmp_path)
    with lowpeak_trainers.enabled():
        inside = reward(tmp_path)
    stock.train()
    assert packs(inside)
    parity.assert_same_logs(inside, stock)


SETTINGS = {
    "nothing": ({}, {}, "lowpeak", True),
    "padding_free": ({"padding_free": False}, {}, "lowpeak", False),
    "attention off": ({"config": MemoryConfig(attention="off")}, {}, "sdpa", False),
    "attention": ({"config": MemoryConfig(attention="eager")}, {}, "eager", False),
    "head off": ({"config": MemoryConfig(fused_lm_head=False)}, {}, "lowpeak", False),
    "LOWPEAK_DISABLE=attention": ({}, {"LOWPEAK_DISABLE": "attention"}, "sdpa", False),
    "LOWPEAK_DISABLE=padding_free": ({}, {"LOWPEAK_DISABLE": "padding_free"}, "lowpeak", False),
}


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(what, marks=pytest.mark.slow if what in ("attention", "head off") else ())
        for what in SETTINGS
    ],
)
def test_settings(what, tmp_path, monkeypatch):
    keywords, environment, attention, packed = SETTINGS[what]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with lowpeak_trainers.enabled(**keywords):
        trainer = sft(tmp_path)
        ours = sft(tmp_path, lowpeak_trainers)
    assert attention_of(trainer.model) == attention
    assert packs(trainer) == packed
    if not environment:
        assert attention_of(ours.model) == "lowpeak"
        assert packs(ours)


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_attention_that_the_user_named(name, tmp_path, caplog):
    """Also sdpa, which looks like the default once the model is loaded."""
    caplog.set_level(logging.INFO, logger="lowpeak.trainers")
    folder = tiny.save(tiny.llama(), tmp_path / "model")
    with lowpeak_trainers.enabled():
        trainer = sft(tmp_path, model=folder, model_init_kwargs={"attn_implementation": name})
    assert attention_of(trainer.model) == name
    assert "attention: left as it is in SFTTrainer, by model_init_kwargs" in caplog.text
    assert not packs(trainer)


def test_insisting_is_refused(tmp_path):
    eager = tiny.llama()
    eager.set_attn_implementation("eager")
    with (
        lowpeak_trainers.enabled(padding_free=True),
        pytest.raises(ValueError, match="padding_free=True does not serve SFTTrainer"),
    ):
        sft(tmp_path, model=eager)


def test_subclasses_of_the_user(tmp_path):
    class Mine(trl.SFTTrainer):
        def __init__(self, *args, theirs, **kwargs):
            super().__init__(*args, **kwargs)
            self.theirs = theirs, attention_of(self.model)

    with lowpeak_trainers.enabled():
        trainer = Mine(
            model=tiny.llama(),
            args=trl.SFTConfig(**parity.settings(tmp_path, max_steps=1)),
            train_dataset=tiny.documents([5, 9]),
            processing_class=tiny.tokenizer(),
            theirs=3,
        )
    assert trainer.theirs == (3, "lowpeak")


def test_constructors_come_back(tmp_path):
    before = [trainer.__init__ for trainer in TRAINERS]
    with lowpeak_trainers.enabled():
        for trainer, stock in zip(TRAINERS, before, strict=True):
            assert trainer.__init__ is not stock
            assert inspect.signature(trainer.__init__) == inspect.signature(stock)
        with lowpeak_trainers.enabled(padding_free=False):
            inner = sft(tmp_path)
        outer = sft(tmp_path)
        with pytest.raises(ValueError, match="max_length"):
            sft(tmp_path, packing=True, max_length=None)
    assert [trainer.__init__ for trainer in TRAINERS] == before
    stock = sft(tmp_path)
    assert [packs(trainer) for trainer in (inner, outer, stock)] == [False, True, False]


def test_other_threads_are_left_alone(tmp_path):
    built = []
    with lowpeak_trainers.enabled():
        thread = threading.Thread(target=lambda: built.append(sft(tmp_path)))
        thread.start()
        thread.join()
    assert attention_of(built[0].model) == "sdpa"
    assert not parity.has_lowpeak_head(built[0])


def test_distillation_stays_as_trl_made_it(tmp_path):
    with lowpeak_trainers.enabled():
        trainer = trl.DistillationTrainer(
            model=tiny.llama(),
            teacher_model=tiny.llama(seed=2),
            args=trl.DistillationConfig(**parity.settings(tmp_path)),
            train_dataset=tiny.prompts([3, 5]),
            processing_class=tiny.tokenizer(),
        )
    assert attention_of(trainer.model) == attention_of(trainer.teacher_model) == "sdpa"
    ids = torch.tensor([[7, 8]], device=trainer.model.device)
    assert trainer.model(input_ids=ids).logits.shape == (1, 2, tiny.VOCABULARY)
