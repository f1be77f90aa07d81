"""transformers.Trainer with and without the logits of its batches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_families import assert_same_gradients, gradients
from tiny_models import tiny_model, token_batch
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

import lowpeak
from lowpeak import MemoryConfig, reduce_memory

# 8 documents of unequal length: the loss of an accumulated step depends on how it is normalised.
LENGTHS = (3, 30, 7, 12, 5, 22, 9, 16)


def documents() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randint(3, 120, (n,), generator=generator).tolist() for n in LENGTHS]
    return [{"input_ids": row} for row in rows]


def collate(features: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(feature["input_ids"]) for feature in features)
    rows = [feature["input_ids"] for feature in features]
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def make_trainer(model: PreTrainedModel, folder: Path, **overrides: Any) -> Trainer:
    metrics = overrides.pop("compute_metrics", None)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=5,
        logging_steps=1,
        learning_rate=1e-2,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        per_device_eval_batch_size=2,
        disable_tqdm=True,
        **overrides,
    )
    return Trainer(
        model,
        arguments,
        data_collator=collate,
        train_dataset=documents(),
        eval_dataset=documents(),
        compute_metrics=metrics,
    )


def logged_steps(
    model: PreTrainedModel, folder: Path, **overrides: Any
) -> list[tuple[float, float]]:
    trainer = make_trainer(model, folder, **overrides)
    trainer.train()
    return [
        (entry["loss"], entry["grad_norm"])
        for entry in trainer.state.log_history
        if "loss" in entry
    ]


@pytest.mark.parametrize(
    ("family", "batch", "accumulate"), [("llama", 1, 4), ("llama", 2, 2), ("mixtral", 2, 2)]
)
def test_d1_trainer_steps_equal_those_of_the_unpatched_model(
    family: str, batch: int, accumulate: int, tmp_path: Path
) -> None:
    settings = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulate}
    expected = logged_steps(tiny_model(family, head_scale=5.0), tmp_path, **settings)
    model = tiny_model(family, head_scale=5.0)
    handle = reduce_memory(model)
    actual = logged_steps(model, tmp_path, **settings)
    handle.remove()
    assert len(actual) == 5
    for (loss, norm), (own_loss, own_norm) in zip(actual, expected, strict=True):
        assert loss == pytest.approx(own_loss, rel=1e-5, abs=1e-5)
        assert norm == pytest.approx(own_norm, rel=1e-5, abs=1e-5)


def test_training_returns_the_loss_without_logits() -> None:
    model = tiny_model("llama").train()
    batch = token_batch()
    own = model(**batch)
    reduce_memory(model)
    output = model(**batch)
    assert output.logits is None
    torch.testing.assert_close(output.loss, own.loss, rtol=1e-6, atol=1e-6)
    assert_same_gradients(gradients(model, output.loss), gradients(model, own.loss))
    (loss,) = model(**batch, return_dict=False)
    torch.testing.assert_close(loss, own.loss, rtol=1e-6, atol=1e-6)
    unlabelled = model(batch["input_ids"], batch["attention_mask"])
    torch.testing.assert_close(unlabelled.logits, own.logits)


def test_router_loss_is_part_of_the_loss() -> None:
    model = tiny_model("qwen3_moe").train()
    batch = token_batch()
    own = model(**batch)
    reduce_memory(model)
    output = model(**batch)
    torch.testing.assert_close(output.aux_loss, own.aux_loss)
    torch.testing.assert_close(output.loss, own.loss, rtol=1e-6, atol=1e-6)


def test_a18_predictions_are_right_when_metrics_need_them(tmp_path: Path) -> None:
    seen: list[EvalPrediction] = []

    def metrics(prediction: EvalPrediction) -> dict[str, float]:
        seen.append(prediction)
        return {"rows": len(prediction.predictions)}

    expected = make_trainer(tiny_model("llama"), tmp_path, compute_metrics=metrics).evaluate()
    model = tiny_model("llama")
    reduce_memory(model)
    actual = make_trainer(model, tmp_path, compute_metrics=metrics).evaluate()
    assert actual["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)
    own, patched = seen
    assert patched.predictions.shape == own.predictions.shape == (8, 30, 131)
    torch.testing.assert_close(torch.tensor(patched.predictions), torch.tensor(own.predictions))


def test_a18_loss_only_evaluation_builds_no_logits(tmp_path: Path) -> None:
    expected = make_trainer(tiny_model("llama"), tmp_path).evaluate()["eval_loss"]
    model = tiny_model("llama")
    reduce_memory(model, eval_logits=False)
    trainer = make_trainer(model, tmp_path)
    trainer.evaluate()  # the self-test builds the logits of a few tokens
    calls: list[tuple[int, ...]] = []
    model.lm_head.register_forward_hook(lambda *args: calls.append(args[-1].shape))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert calls == []


def test_remove_restores_and_a_second_installation_is_refused() -> None:
    model = tiny_model("llama").train()
    attributes = set(model.__dict__)
    handle = reduce_memory(model)
    with pytest.raises(ValueError, match="has a fused forward already"):
        reduce_memory(model)
    handle.remove()
    handle.remove()
    assert set(model.__dict__) == attributes
    assert model(**token_batch()).logits is not None


@pytest.mark.parametrize("by", ["flag", "environment"])
def test_switched_off(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama").train()
    if by == "environment":
        monkeypatch.setenv("LOWPEAK_DISABLE", "head")
    reduce_memory(model, MemoryConfig(fused_lm_head=False if by == "flag" else None))
    assert "forward" not in model.__dict__


def test_only_transformers_models() -> None:
    with pytest.raises(TypeError, match="PreTrainedModel"):
        lowpeak.reduce_memory(torch.nn.Linear(2, 2))
