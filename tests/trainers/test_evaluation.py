"""The loss of an evaluation is that of each sequence alone, whatever the eval batch size."""

from __future__ import annotations

import warnings

import oracle
import parity
import pytest
import tiny
import trl
from peft import LoraConfig, PromptTuningConfig

import lowpeak_trainers

LENGTHS = [2, 40, 7, 23, 12, 3]
PAIRS = [(4, 6, 3), (7, 2, 9), (3, 11, 5), (9, 4, 4), (5, 8, 8), (6, 3, 12)]
LAYOUTS = {
    "padded": {},
    "padding_free": {"padding_free": True, "max_length": None},
    # Rows of 40, 23 + 12 + 3 + 2 and 7 tokens.
    "packed": {"packing": True, "eval_packing": True, "max_length": 40},
}


def build(folder, batch, package=lowpeak_trainers, *, peft_config=None, **options):
    return package.SFTTrainer(
        model=tiny.llama(),
        args=package.SFTConfig(
            **parity.settings(folder, per_device_eval_batch_size=batch, **options)
        ),
        train_dataset=tiny.documents(LENGTHS),
        eval_dataset=tiny.documents(LENGTHS),
        processing_class=tiny.tokenizer(),
        peft_config=peft_config,
    )


def right_loss(loss_type):
    """Mean over the tokens of all documents, each alone."""
    model = oracle.in_float64(tiny.llama())
    total, count = 0.0, 0
    for ids in tiny.documents(LENGTHS)["input_ids"]:
        logp = oracle.log_probs(model, ids).detach()
        total -= ((logp.exp() if loss_type == "dft" else 1.0) * logp).sum().item()
        count += len(logp)
    return total / count


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_d4_eval_loss_does_not_depend_on_the_batch_size(layout, batch, tmp_path):
    trainer = build(tmp_path, batch, **LAYOUTS[layout])
    oracle.assert_close(trainer.evaluate()["eval_loss"], right_loss("nll"))
    oracle.assert_close(trainer.state.log_history[-1]["eval_loss"], right_loss("nll"))


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_d4_other_losses_and_heads(loss_type, head, tmp_path):
    trainer = build(tmp_path, 4, loss_type=loss_type, fused_lm_head=head)
    oracle.assert_close(trainer.evaluate()["eval_loss"], right_loss(loss_type))
    prediction = trainer.predict(trainer.eval_dataset).metrics
    oracle.assert_close(prediction["test_loss"], right_loss(loss_type))


def test_d4_stock_trl_depends_on_it(tmp_path):
    """What the documentation says of stock TRL; once this fails, it is to be rewritten."""
    found = build(tmp_path, 1, trl).evaluate()["eval_loss"]
    assert abs(found - right_loss("nll")) > 0.05


@pytest.mark.parametrize("batch", [1, 4])
def test_d4_data_sets_evaluated_while_training(batch, tmp_path):
    """Each of several data sets has its own mean, and training goes on as without evaluation."""
    trainer = build(tmp_path, batch, eval_strategy="steps", eval_steps=2)
    trainer.eval_dataset = {
        "short": tiny.documents([2, 3], seed=5),
        "long": tiny.documents([30, 4, 9], seed=6),
    }
    trainer.train()
    history = trainer.state.log_history
    quiet = build(tmp_path, batch)
    quiet.train()
    assert [e["loss"] for e in history if "loss" in e] == [
        e["loss"] for e in quiet.state.log_history if "loss" in e
    ]
    for name, data in trainer.eval_dataset.items():
        trained = oracle.in_float64(trainer.model)
        rows = [oracle.log_probs(trained, ids).detach() for ids in data["input_ids"]]
        wanted = -sum(row.sum().item() for row in rows) / sum(map(len, rows))
        found = trainer.evaluate(data, metric_key_prefix=f"eval_{name}")[f"eval_{name}_loss"]
        oracle.assert_close(found, wanted)
        assert any(f"eval_{name}_loss" in entry for entry in history)


def test_d4_documents_without_targets_count_nothing(tmp_path):
    trainer = build(tmp_path, 1)
    ids = tiny.random_ids(9, 3)
    masked = tiny.Dataset.from_list(
        [
            {"input_ids": ids, "labels": [ids[0], *[-100] * 8]},
            {"input_ids": ids, "labels": ids},
        ]
    )
    alone = oracle.log_probs(oracle.in_float64(tiny.llama()), ids).mean().item()
    oracle.assert_close(trainer.evaluate(masked)["eval_loss"], -alone)


@pytest.mark.parametrize("adapter", ["lora", "prompt_tuning"])
def test_d4_adapters(adapter, tmp_path):
    """With virtual tokens in front the first token is predicted too, and counts."""
    peft_config = {
        "lora": LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False),
        "prompt_tuning": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    }[adapter]
    losses = [
        build(tmp_path, batch, peft_config=peft_config).evaluate()["eval_loss"]
        for batch in (1, 4, 6)
    ]
    oracle.assert_close(losses[0], losses[2])
    oracle.assert_close(losses[1], losses[2])


def test_d4_metrics_function_and_loss(tmp_path):
    """compute_metrics asks for logits as well; the loss is the same."""
    trainer = build(tmp_path, 4)
    trainer.compute_metrics = lambda prediction: {"rows": float(len(prediction.predictions))}
    with pytest.warns(FutureWarning, match="return_outputs"):
        metrics = trainer.evaluate()
    assert metrics["eval_rows"] == len(LENGTHS)
    oracle.assert_close(metrics["eval_loss"], right_loss("nll"))


def test_d4_a_loss_of_the_caller_is_left_alone(tmp_path):
    """Nobody knows what a compute_loss_func averages over: Trainer's mean over rows stays."""

    def summed(outputs, labels, num_items_in_batch=None):
        return outputs.logits.new_tensor(float((labels != -100).sum()))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        trainer = lowpeak_trainers.SFTTrainer(
            model=tiny.llama(),
            args=lowpeak_trainers.SFTConfig(
                **parity.settings(tmp_path, per_device_eval_batch_size=2)
            ),
            train_dataset=tiny.documents(LENGTHS),
            eval_dataset=tiny.documents(LENGTHS),
            processing_class=tiny.tokenizer(),
            compute_loss_func=summed,
        )
    # pairs of rows of 42, 30 and 15 tokens
    oracle.assert_close(trainer.evaluate()["eval_loss"], 29.0)


@pytest.mark.parametrize("batch", [1, 2, 4, 6])
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_d4_dpo_averages_over_pairs_as_it_is(loss_type, batch, tmp_path):
    def evaluate(size):
        trainer = lowpeak_trainers.DPOTrainer(
            model=tiny.llama(),
            ref_model=tiny.llama(seed=1),
            args=lowpeak_trainers.DPOConfig(
                **parity.settings(tmp_path, per_device_eval_batch_size=size, loss_type=loss_type)
            ),
            train_dataset=tiny.preferences(PAIRS),
            eval_dataset=tiny.preferences(PAIRS),
            processing_class=tiny.tokenizer(),
        )
        return trainer.evaluate()["eval_loss"]

    oracle.assert_close(evaluate(batch), evaluate(6))
