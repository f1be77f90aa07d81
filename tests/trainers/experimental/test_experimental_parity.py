"""Five optimizer steps of the experimental trainers follow stock TRL, number by number."""

from __future__ import annotations

import head_models
import oracle
import parity
import pytest
import recipes
import torch
from trl.trainer import sft_trainer

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
# (method, options, slow): what takes the same way through lowpeak as another case is slow.
CASES = {
    "ORPO": ("ORPO", EVALUATED, False),
    "CPO": ("CPO", EVALUATED, False),
    "CPO_simpo": ("CPO", {"loss_type": "simpo", "cpo_alpha": 0.0}, False),
    "CPO_simpo_with_nll": ("CPO", {"loss_type": "simpo", "cpo_alpha": 0.5}, True),
    "CPO_alphapo": ("CPO", {"loss_type": "simpo", "alpha": 0.1}, True),
    "CPO_hinge": ("CPO", {"loss_type": "hinge"}, True),
    "CPO_ipo": ("CPO", {"loss_type": "ipo"}, True),
    "GKD": ("GKD", {}, False),
    "GKD_forward": ("GKD", {"beta": 0.0}, True),
    "GKD_reverse": ("GKD", {"beta": 1.0}, False),
    "GKD_own_completions": ("GKD", {"lmbda": 1.0}, False),
    "GKD_completions_of_the_teacher": ("GKD", {"lmbda": 0.3, "seq_kd": True}, True),
    "GOLD": ("GOLD", {}, False),
    "GOLD_reverse": ("GOLD", {"beta": 1.0, "temperature": 0.7}, True),
    "TPO": ("TPO", EVALUATED, False),
    "TPO_smoothed": ("TPO", {"label_smoothing": 0.2}, True),
    "TPO_without_reference": ("TPO", {"tpo_alpha": 0.0}, False),
    "TPO_hinge": ("TPO", {"loss_type": "hinge"}, True),
    "TPO_ipo": ("TPO", {"loss_type": "ipo"}, True),
    "TPO_l": ("TPO", {"loss_type": "tpo-l", "tpo_l_gamma": 0.4}, False),
    "OnlineDPO": ("OnlineDPO", {"missing_eos_penalty": 1.0}, False),
    "OnlineDPO_ipo": ("OnlineDPO", {"loss_type": "ipo", "beta": 0.3}, True),
    "OnlineDPO_truncated": ("OnlineDPO", {"max_length": 20}, False),
    "OnlineDPO_no_prompt_left": ("OnlineDPO", {"max_length": 8}, True),
    "A2PO": ("A2PO", {}, False),
    "GMPO": ("GMPO", {}, False),
}
LORA = {
    "adapters": {"target_modules": ["q_proj", "down_proj"]},
    "whole_head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "b1_lora_head": {"target_modules": ["q_proj", "lm_head"]},
}


@pytest.mark.filterwarnings("ignore:The configuration has `max_new_tokens`:UserWarning")
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow if CASES[c][2] else ()) for c in CASES]
)
def test_parity(case, tmp_path):
    method, options, _ = CASES[case]
    recipes.assert_parity(method, tmp_path, **options)


@pytest.mark.parametrize("model", head_models.MODELS)
def test_parity_of_models(model, tmp_path):
    """The mean logit, which ORPO logs over all positions, takes its way by the kind of head."""
    recipes.assert_parity("ORPO", tmp_path, model=head_models.MODELS[model])


ADAPTED = [(m, kind) for m in recipes.METHODS[:6] for kind in LORA]
FAST = [("ORPO", "whole_head"), ("GKD", "b1_lora_head"), ("OnlineDPO", "adapters")]


class NoLayer:
    """Nothing is an instance of it."""


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        pytest.param(m, kind, marks=() if (m, kind) in FAST else pytest.mark.slow)
        for m, kind in ADAPTED
    ],
)
def test_parity_with_adapters(method, kind, tmp_path, monkeypatch):
    if kind == "b1_lora_head":
        recipes.build("lowpeak_trainers", method, tmp_path, lora=LORA[kind])
        # GKD and GOLD are SFT trainers, which refuse it in TRL, though those two take all logits
        monkeypatch.setattr(sft_trainer, "BaseTunerLayer", NoLayer)
    recipes.assert_parity(method, tmp_path, lora=LORA[kind])


@pytest.mark.slow
@pytest.mark.parametrize("method", recipes.METHODS)
def test_parity_without_checkpointing(method, tmp_path):
    recipes.assert_parity(method, tmp_path, gradient_checkpointing=False)


@pytest.mark.parametrize(
    "method",
    ["GKD", "TPO", *(pytest.param(m, marks=pytest.mark.slow) for m in ("GOLD", "A2PO", "GMPO"))],
)
def test_parity_padded(method, tmp_path):
    recipes.assert_parity(method, tmp_path, ours={"padding_free": False})


def completion_means(model, pair):
    """Sum and number of the mean logits that predict each completion, every sequence alone."""
    found = {}
    for name in ("chosen", "rejected"):
        ids, labels = pair[f"{name}_input_ids"], pair[f"{name}_labels"]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        counted = torch.tensor(labels[1:]) != -100
        found[name] = logits[:-1][counted].mean(-1).sum().item(), counted.sum().item()
    return found


@pytest.mark.parametrize("option", ["padding_free", "share_prompts"])
@pytest.mark.parametrize("method", ["ORPO", "CPO"])
def test_pairs_without_padding(method, option, tmp_path):
    """All as in TRL, but for the mean logits, which are those of the completions."""
    stock = recipes.build("trl", method, tmp_path)
    ours = recipes.build("lowpeak_trainers", method, tmp_path, **{option: True})
    twin = oracle.in_float64(ours.model)
    wanted = [completion_means(twin, row) for row in ours.eval_dataset]
    metrics = ours.evaluate()
    for name in ("chosen", "rejected"):
        total, count = (sum(row[name][i] for row in wanted) for i in (0, 1))
        oracle.assert_close(metrics[f"eval_logits/{name}"], total / count)
    ours.state.log_history.clear()
    assert_same_but_for(stock, ours, ("logits/chosen", "logits/rejected"))


def test_online_dpo_without_padding(tmp_path):
    """All as in TRL, but for the sums into which that counts what follows a completion."""
    record = parity.CompletionRecord()
    stock = recipes.build("trl", "OnlineDPO", tmp_path)
    ours = recipes.build("lowpeak_trainers", "OnlineDPO", tmp_path, padding_free=True)
    record.record(stock)
    stock.train()
    record.replay(ours)
    names = ("kl", "entropy", "non_score_reward", "rlhf_reward")
    assert_same_but_for(stock, ours, [f"objective/{name}" for name in names])


def assert_same_but_for(stock, ours, names):
    for trainer in (stock, ours):
        if not trainer.state.log_history:
            trainer.train()
        for entry in trainer.state.log_history:
            for name in names:
                entry.pop(name, None)
    parity.assert_same_logs(ours, stock)
