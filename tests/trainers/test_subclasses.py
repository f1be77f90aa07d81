"""Trainers that users derived from TRL's, through the mixin and through `enabled()`."""

from __future__ import annotations

import methods
import oracle
import parity
import pytest
import tiny
import torch
import trl
from transformers import EarlyStoppingCallback, TrainerCallback

import lowpeak_trainers
from lowpeak.config import TECHNIQUES

COMPLETIONS = [[7, 9, 11, 2], [13, 8, 2], [40, 41, 42, 43, 44, 2], [90, 2]]


class Regularised(trl.SFTTrainer):
    """Overrides compute_loss."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self._metrics["train"]["norm"].append(loss.item())
        return loss + 0.01 * model.lm_head.weight.square().mean()


class FullLogits(trl.SFTTrainer):
    """Overrides compute_loss and works on logits, as nobody in TRL does any more."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(**inputs, use_cache=False).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


class Scripted(trl.GRPOTrainer):
    """Overrides generation and takes an argument of its own, before all others."""

    def __init__(self, completions, *args, **kwargs):
        self.completions = completions
        super().__init__(*args, **kwargs)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        return [self.completions[i % len(self.completions)] for i in range(len(prompt_ids))], None


class Own(trl.DPOTrainer):
    """Makes its arguments itself, those of TRL, and asks for a metric of its own."""

    def __init__(self, folder, beta):
        self.asked = []
        super().__init__(
            tiny.llama(),
            tiny.llama(seed=1),
            trl.DPOConfig(**parity.settings(folder, beta=beta)),
            train_dataset=tiny.preferences(methods.PAIRS),
            processing_class=tiny.tokenizer(),
        )

    def log(self, logs, *args, **kwargs):
        self.asked.append(logs.get("loss"))
        super().log({**logs, "count": len(self.asked)}, *args, **kwargs)


def sft(trainer, folder):
    return trainer(
        model=tiny.llama(),
        args=trl.SFTConfig(**parity.settings(folder)),
        train_dataset=tiny.guessable_documents(methods.LENGTHS),
        processing_class=tiny.tokenizer(),
    )


def grpo(trainer, folder):
    return trainer(
        COMPLETIONS,
        tiny.llama(),
        methods.reward,
        trl.GRPOConfig(**parity.settings(folder, **methods.options_of("GRPO"))),
        tiny.prompts(methods.LENGTHS),
        processing_class=tiny.tokenizer(),
    )


def dpo(trainer, folder):
    return trainer(folder, beta=0.2)


SUBCLASSES = {
    "compute_loss": (Regularised, sft),
    "full_logits": (FullLogits, sft),
    "generate": (Scripted, grpo),
    "own_arguments": (Own, dpo),
}


@pytest.mark.parametrize("way", ["mixin", "enabled"])
@pytest.mark.parametrize("case", SUBCLASSES)
def test_subclass_trains_as_without_lowpeak(case, way, tmp_path):
    theirs, build = SUBCLASSES[case]

    def ours():
        if way == "mixin":
            return build(type("Mine", (lowpeak_trainers.LowpeakMixin, theirs), {}), tmp_path)
        with lowpeak_trainers.enabled():
            return build(theirs, tmp_path)

    stock, trainer = parity.assert_parity(lambda: build(theirs, tmp_path), ours)
    assert len(parity.logged(stock)) > parity.STEPS
    assert isinstance(trainer, theirs)


class Events(TrainerCallback):
    """Notes the names of all events, and the trainer's parts that came with them."""

    def __init__(self):
        self.seen = []

    def __getattribute__(self, name):
        if name.startswith("on_"):
            return lambda args, state, control, **kwargs: self.seen.append(
                (name, state.global_step, sorted(kwargs))
            )
        return super().__getattribute__(name)


@pytest.mark.parametrize("method", methods.METHODS)
def test_callbacks_see_what_they_see_under_trl(method, tmp_path):
    record = parity.CompletionRecord()
    seen = []
    for package in methods.PACKAGES.values():
        events = Events()
        trainer = methods.build(
            package,
            method,
            tmp_path / package.__name__,
            options={"max_steps": 3, "save_strategy": "steps", "save_steps": 2},
            callbacks=[events],
        )
        if method in methods.ONLINE:
            (record.replay if seen else record.record)(trainer)
        trainer.train()
        seen.append(events.seen)
    assert seen[0] == seen[1]
    assert [name for name, step, _ in seen[0] if name == "on_save"]


def test_callback_may_stop_the_training(tmp_path):
    data = tiny.documents([9, 12], seed=4)
    trainer = methods.build(
        lowpeak_trainers,
        "SFT",
        tmp_path,
        eval_dataset=data,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=1)],
        options={
            "max_steps": 20,
            "learning_rate": 0.0,  # so that nothing gets better
            "eval_strategy": "steps",
            "eval_steps": 1,
            "save_strategy": "steps",
            "save_steps": 1,
            "load_best_model_at_end": True,
            "metric_for_best_model": "eval_loss",
        },
    )
    trainer.train()
    assert trainer.state.global_step == 2


def test_trainers_built_together_and_trained_in_turn(tmp_path):
    """SFT, DPO and GRPO of both packages in one process: none disturbs another."""
    trainers = {
        (name, method): methods.build(package, method, tmp_path)
        for method in methods.METHODS
        for name, package in methods.PACKAGES.items()
    }
    for method in methods.ONLINE:
        record = parity.CompletionRecord()
        record.record(trainers["trl", method])
        record.replay(trainers["lowpeak", method])
    for (_, method), trainer in reversed(trainers.items()):
        if method not in methods.ONLINE:
            trainer.train()
    for method in methods.ONLINE:
        trainers["trl", method].train()
        trainers["lowpeak", method].train()
    for method in methods.METHODS:
        ours, stock = trainers["lowpeak", method], trainers["trl", method]
        assert parity.has_lowpeak_head(ours)
        assert not parity.has_lowpeak_head(stock)
        if method not in methods.ONLINE:
            alone = methods.build(trl, method, tmp_path)
            alone.train()
            parity.assert_same_logs(stock, alone)
        # the first step: the parity runs follow the later ones, at rates that do not explode
        for name in ("loss", "grad_norm"):
            first, wanted = (t.state.log_history[0][name] for t in (ours, stock))
            oracle.assert_close(first, wanted)


# The option that switches a technique off and its value then, and what cannot work without it:
# padding-free rows need an attention that keeps documents apart, and are packed by the fused call.
SWITCHES = {
    "head": ("fused_lm_head", False, {"head", "padding_free"}),
    "attention": ("attention", "off", {"attention", "padding_free"}),
    "padding_free": ("padding_free", False, {"padding_free"}),
}
# Off unless asked for; `packing` and the budget change what a batch is.
UNASKED_OFF = {"offload", "packing", "token_budget"}
ALONE_AND_ALL = [*([name] for name in SWITCHES), list(SWITCHES)]


def in_use(trainer):
    """The techniques that a trainer's model uses for a padded batch."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    found = {"head"} if parity.has_lowpeak_head(trainer) else set()
    if model.config._attn_implementation == "lowpeak":
        found.add("attention")
    seen = []
    hook = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    ids = torch.tensor([[7, 8, 9, 0], [7, 8, 9, 10]], device=model.device)
    mask = (ids != 0).long()
    labels = ids.masked_fill(mask == 0, -100)
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    hook.remove()
    return found | ({"padding_free"} if seen[-1].get("cu_seq_lens_q") is not None else set())


def test_every_technique_has_its_switch():
    assert SWITCHES.keys() == set(TECHNIQUES) - UNASKED_OFF
    fields = lowpeak_trainers.SFTConfig.__dataclass_fields__
    assert all(name in fields for name, _, _ in SWITCHES.values())


def run_without(method, techniques, folder, options):
    """Two steps without `techniques`, by `options` or the environment, beside two of stock TRL."""
    stock = methods.build(trl, method, folder, options={"max_steps": 2})
    ours = methods.build(lowpeak_trainers, method, folder, options={"max_steps": 2, **options})
    if method in methods.ONLINE:
        record = parity.CompletionRecord()
        record.record(stock)
        record.replay(ours)
    stock.train()
    ours.train()
    gone = set().union(*(SWITCHES[technique][2] for technique in techniques))
    assert in_use(ours) == set(TECHNIQUES) - UNASKED_OFF - gone
    parity.assert_same_logs(ours, stock)


@pytest.mark.parametrize("techniques", [[], *ALONE_AND_ALL], ids="+".join)
@pytest.mark.parametrize("method", methods.FAST_METHODS)
def test_run_without_techniques_is_that_of_trl(method, techniques, tmp_path):
    run_without(method, techniques, tmp_path, dict(SWITCHES[name][:2] for name in techniques))


@pytest.mark.parametrize("techniques", ALONE_AND_ALL, ids="+".join)
def test_environment_has_the_last_word(techniques, tmp_path, monkeypatch):
    monkeypatch.setenv("LOWPEAK_DISABLE", ",".join(techniques))
    run_without("SFT", techniques, tmp_path, {"fused_lm_head": True})


def test_unknown_technique_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWPEAK_DISABLE", "haed")
    with pytest.raises(ValueError, match="LOWPEAK_DISABLE names haed"):
        methods.build(lowpeak_trainers, "SFT", tmp_path)
