"""Failures of SFT that users of such tools reported; the oracle is every document alone."""

from __future__ import annotations

import oracle
import parity
import pytest
import tiny
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

import lowpeak_trainers

LENGTHS = [3, 30, 7, 12]
TARGETS = sum(LENGTHS) - len(LENGTHS)


def build(
    folder, data, *, model=None, tokenizer=None, eval_dataset=None, callbacks=None, **options
):
    """SFTTrainer over `data`; keywords that are not its own go to the config."""
    compute_metrics = options.pop("compute_metrics", None)
    return lowpeak_trainers.SFTTrainer(
        model=model or tiny.llama(),
        args=lowpeak_trainers.SFTConfig(
            **parity.settings(folder, **{"max_steps": 1, "max_grad_norm": 1e9, **options})
        ),
        train_dataset=data,
        eval_dataset=eval_dataset,
        processing_class=tokenizer or tiny.tokenizer(),
        compute_metrics=compute_metrics,
        callbacks=callbacks,
    )


def one_step(folder, data, **options):
    """Loss and gradients of one optimizer step."""
    record = oracle.GradientRecord()
    trainer = build(folder, data, callbacks=[record], **options)
    trainer.train()
    return trainer.state.log_history[0]["loss"], record.steps[0]


def mean_nll(data, count=TARGETS):
    """Loss and gradients of `tiny.llama()`: summed over each document alone, over `count`."""
    model = oracle.in_float64(tiny.llama())
    loss = -sum(oracle.log_probs(model, ids).sum() for ids in data["input_ids"]) / count
    loss.backward()
    return loss.item(), oracle.gradients(model)


SPLITS = {"1x4": (1, 4), "4x1": (4, 1), "2x2": (2, 2)}
LAYOUTS = {
    "padded": ({}, SPLITS),
    "padding_free": ({"padding_free": True, "max_length": None}, SPLITS),
    # Best fit makes the rows 30 + 3 and 12 + 7 of them.
    "packed": ({"packing": True, "max_length": 33}, {"1x2": (1, 2), "2x1": (2, 1)}),
}
D1_CASES = [(layout, split) for layout, (_, splits) in LAYOUTS.items() for split in splits]


@pytest.mark.parametrize(("layout", "split"), D1_CASES)
def test_d1_d2_one_loss_however_documents_are_batched(layout, split, tmp_path):
    options, splits = LAYOUTS[layout]
    batch, accumulation = splits[split]
    data = tiny.documents(LENGTHS)
    loss, gradients = one_step(
        tmp_path,
        data,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        **options,
    )
    right, right_gradients = mean_nll(data)
    oracle.assert_close(loss, right)
    oracle.assert_same_gradients(gradients, right_gradients)


def test_d2_first_token_of_a_document_is_no_target(tmp_path):
    data = tiny.documents(LENGTHS)
    loss, _ = one_step(tmp_path, data, per_device_train_batch_size=4, gradient_accumulation_steps=1)
    counted_too = mean_nll(data, count=sum(LENGTHS))[0]
    oracle.assert_close(loss * TARGETS / sum(LENGTHS), counted_too)
    assert abs(loss - counted_too) > 0.1


def without_targets(length, seed):
    """A document whose labels are all -100 but the first, which has no prediction."""
    ids = tiny.random_ids(length, seed)
    return {"input_ids": ids, "labels": [ids[0]] + [-100] * (length - 1)}


def test_d7_batch_without_targets_has_zero_loss_and_zero_gradients(tmp_path):
    data = Dataset.from_list([without_targets(9, 1), without_targets(5, 2)])
    loss, gradients = one_step(tmp_path, data, gradient_accumulation_steps=1)
    assert loss == 0.0
    for name, gradient in gradients.items():
        assert gradient is not None, f"{name} has no gradient"
        assert torch.count_nonzero(gradient) == 0, name


def test_d7_micro_batch_without_targets_beside_a_normal_one(tmp_path):
    ids = tiny.random_ids(20, 3)
    data = Dataset.from_list([without_targets(9, 1), {"input_ids": ids, "labels": ids}])
    loss, gradients = one_step(tmp_path, data, per_device_train_batch_size=1)
    right, right_gradients = mean_nll({"input_ids": [ids]}, count=19)
    oracle.assert_close(loss, right)
    oracle.assert_same_gradients(gradients, right_gradients)


def test_e2_real_eos_keeps_its_label_when_pad_is_eos(tmp_path):
    texts = [[7, 8, 9], [10]]
    data = Dataset.from_dict({"text": [tiny.words(ids) for ids in texts]})
    tokenizer = tiny.tokenizer(pad_token="<eos>")
    trainer = build(tmp_path, data, tokenizer=tokenizer, gradient_accumulation_steps=1)
    batch = next(iter(trainer.get_train_dataloader()))
    rows = sorted(batch["labels"].tolist(), reverse=True)
    assert rows == [[10, tiny.EOS, -100, -100], [7, 8, 9, tiny.EOS]]
    trainer.train()
    full = [[*ids, tiny.EOS] for ids in texts]
    right, _ = mean_nll({"input_ids": full}, count=4)
    oracle.assert_close(trainer.state.log_history[0]["loss"], right)


def padded_logits(data):
    """Logits of the stock model on the padded rows of `data`."""
    rows = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(ids) for ids in data["input_ids"]], batch_first=True, padding_value=tiny.PAD
    )
    mask = torch.nn.utils.rnn.pad_sequence(
        [torch.ones(len(ids), dtype=torch.long) for ids in data["input_ids"]], batch_first=True
    )
    model = tiny.llama().eval()
    with torch.no_grad():
        return model(input_ids=rows, attention_mask=mask).logits, mask.bool()


def test_a18_compute_metrics_gets_the_logits_in_padded_order(tmp_path):
    data = tiny.documents(LENGTHS)
    seen = {}

    def keep(prediction):
        seen["logits"], seen["labels"] = prediction.predictions, prediction.label_ids
        return {"rows": float(len(prediction.predictions))}

    trainer = build(
        tmp_path, data, eval_dataset=data, compute_metrics=keep, per_device_eval_batch_size=4
    )
    metrics = trainer.evaluate()
    wanted, mask = padded_logits(data)
    assert metrics["eval_rows"] == 4.0
    assert seen["logits"].shape == (4, 30, tiny.VOCABULARY)
    assert seen["labels"].shape == (4, 30)
    found = torch.from_numpy(seen["logits"])
    torch.testing.assert_close(found[mask], wanted[mask], rtol=0, atol=1e-4)
    oracle.assert_close(metrics["eval_loss"], mean_nll(data)[0])


def test_a18_eval_of_the_loss_alone_builds_no_logits(tmp_path):
    data = tiny.documents(LENGTHS)
    trainer = build(tmp_path, data, eval_dataset=data, per_device_eval_batch_size=4)
    projected = []
    trainer.model.get_output_embeddings().register_forward_hook(
        lambda module, inputs, output: projected.append(output.numel() // tiny.VOCABULARY)
    )
    loss = trainer.evaluate()["eval_loss"]
    # The self-test of the head may project a few rows through the model's own module, once.
    assert sum(projected) < TARGETS
    trainer.evaluate()
    before = len(projected)
    trainer.evaluate()
    assert len(projected) == before
    oracle.assert_close(loss, mean_nll(data)[0])


def test_a19_compiled_model_has_the_same_loss_and_plain_keys(tmp_path):
    data = tiny.documents(LENGTHS * 2)
    losses = {}
    for compiled in (False, True):
        trainer = build(
            tmp_path / str(compiled),
            data,
            max_steps=2,
            torch_compile=compiled,
            torch_compile_backend="eager" if compiled else None,
            tf32=False,
        )
        # accelerate turns TF32 on for a compiled float32 model, whatever tf32 says.
        torch.set_float32_matmul_precision("highest")
        trainer.train()
        losses[compiled] = [entry["loss"] for entry in trainer.state.log_history[:2]]
    for found, right in zip(losses[True], losses[False], strict=True):
        oracle.assert_close(found, right)
    trainer.save_model(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    trained = trainer.accelerator.unwrap_model(trainer.model).cpu().state_dict()
    assert saved.state_dict().keys() == trained.keys() == tiny.llama().state_dict().keys()
    for name, weight in saved.state_dict().items():
        assert torch.equal(weight, trained[name]), name
