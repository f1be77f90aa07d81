"""Metrics of an evaluation without its logits: the oracle is each document alone, in float64."""

import functools
import logging
import re
from pathlib import Path

import oracle
import parity
import pytest
import tiny
import torch
import transformers
import trl
from peft import LoraConfig, PromptTuningConfig

import lowpeak_trainers
from lowpeak.memory import track_memory
from lowpeak_trainers import TileMetrics
from lowpeak_trainers.tile_metrics import (
    CalibrationError,
    MeanRank,
    Perplexity,
    TileMetricsList,
    TopKAccuracy,
)

LENGTHS = [2, 30, 7, 23, 12, 3]
LAYOUTS = {
    "padded": {"padding_free": False},
    "padding_free": {"padding_free": True},
    # Rows of 30, 23 + 7 and 12 + 3 + 2 tokens.
    "packed": {"packing": True, "eval_packing": True, "max_length": 30},
}
BINS = 5
SMALL = 54_000  # tiles of at most 52 tokens


class LossByPosition(TileMetrics):
    """Mean negative log-probability of the tokens at each position."""

    def sums(self, tile):
        empty = torch.zeros(max(LENGTHS), dtype=tile.logits.dtype, device=tile.logits.device)
        return {
            "nll": empty.index_add(0, tile.positions, -tile.target_log_probs),
            "tokens": tile.positions.bincount(minlength=max(LENGTHS)),
        }

    def results(self, sums):
        means = (sums["nll"] / sums["tokens"]).tolist()
        return {f"nll_at_{place}": means[place] for place in (0, 1, 5, 28)}


def all_metrics():
    return TileMetricsList(
        TopKAccuracy(),
        TopKAccuracy(5),
        MeanRank(),
        Perplexity(),
        CalibrationError(BINS),
        LossByPosition(),
    )


gemma3 = functools.partial(tiny.gemma3, window=8, softcap=4.0)
MODELS = {"llama": tiny.llama, "gemma3": gemma3}


@functools.cache
def documents():
    return tiny.guessable_documents(LENGTHS)


def build(folder, metrics, *, package=lowpeak_trainers, model=None, data=None, **options):
    keep = {name: options.pop(name) for name in ("peft_config",) if name in options}
    options = {"per_device_eval_batch_size": 4, "max_length": None, **options}
    return package.SFTTrainer(
        model=tiny.llama() if model is None else model,
        args=package.SFTConfig(**parity.settings(folder, **options)),
        train_dataset=documents(),
        eval_dataset=documents() if data is None else data,
        processing_class=tiny.tokenizer(),
        compute_metrics=metrics,
        **keep,
    )


def right_metrics(model):
    """By plain formulas over the logits [tokens, V] of all documents, each alone."""
    twin, rows, targets, places = oracle.in_float64(model), [], [], []
    for ids in documents()["input_ids"]:
        tokens = torch.tensor([ids])
        rows.append(twin(input_ids=tokens, use_cache=False).logits[0, :-1].detach())
        targets.append(tokens[0, 1:])
        places.append(torch.arange(len(ids) - 1))
    z, target, place = torch.cat(rows), torch.cat(targets), torch.cat(places)
    p = z.softmax(-1)
    of_target = p.gather(1, target[:, None])[:, 0]
    rank = (p > of_target[:, None]).sum(1)
    confidence, error = p.amax(1), 0.0
    for lower in torch.arange(BINS) / BINS:
        inside = (confidence > lower) & (confidence <= lower + 1 / BINS)
        if inside.any():
            gap = (rank[inside] == 0).double().mean() - confidence[inside].mean()
            error += inside.double().mean() * gap.abs()
    return {
        "eval_token_accuracy": (rank == 0).double().mean().item(),
        "eval_top_5_accuracy": (rank < 5).double().mean().item(),
        "eval_mean_rank": rank.double().mean().item(),
        "eval_perplexity": of_target.log().mean().neg().exp().item(),
        "eval_calibration_error": float(error),
        **{f"eval_nll_at_{i}": -of_target[place == i].log().mean().item() for i in (0, 1, 5, 28)},
    }


def assert_right(found, model, prefix="eval"):
    wanted = right_metrics(model)
    assert 0.1 < wanted["eval_token_accuracy"] + wanted["eval_calibration_error"] < 1.9
    for name, value in wanted.items():
        oracle.assert_close(found[name.replace("eval", prefix, 1)], value, 10 * oracle.TOLERANCE)


@pytest.mark.parametrize("batch", [1, 4, 6])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_of_any_layout_and_batch_size(layout, batch, tmp_path):
    options = {"per_device_eval_batch_size": batch, **LAYOUTS[layout]}
    trainer = build(tmp_path, all_metrics(), lm_head_scratch_bytes=SMALL, **options)
    found = trainer.evaluate()
    assert_right(found, tiny.llama())
    oracle.assert_close(found["eval_loss"], torch.tensor(found["eval_perplexity"]).log().item())
    assert trainer.state.log_history[-1]["eval_mean_rank"] == found["eval_mean_rank"]


@pytest.mark.parametrize("layout", ["padded", "padding_free"])
def test_metrics_of_a_soft_capped_model(layout, tmp_path):
    trainer = build(tmp_path, all_metrics(), model=gemma3(), **LAYOUTS[layout])
    assert_right(trainer.evaluate(), gemma3())


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
@pytest.mark.parametrize("head", ["lora", "dora"])
def test_metrics_of_a_head_with_an_adapter(head, tmp_path):
    """Through the head's own module, 48 tokens at a time."""
    lora = LoraConfig(
        r=4,
        target_modules=["q_proj", "lm_head"],
        init_lora_weights=False,
        use_dora=head == "dora",
    )
    trainer = build(tmp_path, all_metrics(), peft_config=lora, lm_head_scratch_bytes=75_000)
    assert_right(trainer.evaluate(), trainer.model)


def test_as_a_function_of_full_logits(tmp_path):
    """What stock TRL, or lowpeak with its head off, gives compute_metrics."""
    for options in (
        {"package": trl, "batch_eval_metrics": True},
        {"package": trl, "eval_do_concat_batches": False},
        {"fused_lm_head": False},
    ):
        trainer = build(tmp_path, all_metrics(), **options)
        assert_right(trainer.evaluate(), tiny.llama())
        assert_right(trainer.evaluate(), tiny.llama())


def test_head_off_is_logged(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "lowpeak.trainers"):
        build(tmp_path, MeanRank(), fused_lm_head=False)
    assert "SFTTrainer gives MeanRank the logits of whole batches" in caplog.text


def test_one_backbone_pass_and_no_projection_by_the_model(tmp_path):
    trainer = build(tmp_path, all_metrics(), padding_free=False)
    trainer.evaluate()  # the self-test of the head runs here
    passes, projected = [], []
    trainer.model.model.register_forward_hook(lambda *args: passes.append(1))
    trainer.model.lm_head.register_forward_hook(lambda *args: projected.append(1))
    trainer.evaluate()
    assert (len(passes), len(projected)) == (2, 0)


def test_no_logits_of_the_batch_are_allocated(tmp_path):
    vocabulary, tokens = 8009, 256
    logits = 2 * tokens * vocabulary * 4
    data = tiny.documents([tokens, tokens])

    def peak(metrics):
        trainer = build(
            tmp_path,
            metrics,
            model=tiny.llama(
                vocab_size=vocabulary, max_position_embeddings=tokens, num_hidden_layers=1
            ),
            data=data,
            use_cpu=True,
            lm_head_scratch_bytes=logits // 8,
        )
        trainer.evaluate()
        with track_memory("cpu") as report:
            trainer.evaluate()
        return report.peak_bytes - report.start_bytes

    tiles = TileMetricsList(TopKAccuracy(5), MeanRank(), Perplexity(), CalibrationError())
    assert peak(tiles) < logits / 2
    assert peak(lambda prediction: {}) > logits


def test_predict_returns_logits_unless_told_otherwise(tmp_path):
    trainer = build(tmp_path, all_metrics(), padding_free=False)
    predicted = trainer.predict(trainer.eval_dataset)
    assert predicted.predictions[0].shape[-1] == tiny.VOCABULARY
    assert_right(predicted.metrics, tiny.llama(), "test")
    trainer.args.prediction_loss_only = True
    predicted = trainer.predict(trainer.eval_dataset)
    assert predicted.predictions is None
    assert_right(predicted.metrics, tiny.llama(), "test")


def test_training_goes_on_as_without_and_can_select_by_a_metric(tmp_path):
    histories = []
    for metrics in (MeanRank(), None):
        trainer = build(
            tmp_path,
            metrics,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="best" if metrics else "no",
            metric_for_best_model="mean_rank" if metrics else None,
            greater_is_better=False if metrics else None,
        )
        trainer.eval_dataset = {"a": documents()} if metrics is None else trainer.eval_dataset
        trainer.train()
        histories.append([e["loss"] for e in trainer.state.log_history if "loss" in e])
        if metrics:
            ranks = [e["eval_mean_rank"] for e in trainer.state.log_history if "eval_loss" in e]
            assert trainer.state.best_metric == min(ranks)
            assert len(set(ranks)) == len(ranks)
    assert histories[0] == histories[1]


def test_several_data_sets_each_have_their_own(tmp_path):
    trainer = build(tmp_path, TopKAccuracy(5))
    trainer.eval_dataset = {"few": documents().select([2, 4]), "all": documents()}
    found = trainer.evaluate()
    wanted = right_metrics(tiny.llama())["eval_top_5_accuracy"]
    oracle.assert_close(found["eval_all_top_5_accuracy"], wanted)
    assert found["eval_few_top_5_accuracy"] != pytest.approx(wanted)


def test_a_function_still_gets_the_logits(tmp_path):
    shapes = []
    trainer = build(tmp_path, lambda prediction: shapes.append(prediction.predictions.shape) or {})
    trainer.evaluate()
    assert shapes == [(6, 30, tiny.VOCABULARY)]


@pytest.mark.parametrize("asked", [["inputs"], ["loss"]])
def test_what_tiles_cannot_give_is_refused(asked, tmp_path):
    with pytest.raises(ValueError, match=re.escape(f"include_for_metrics={asked}")):
        build(tmp_path, MeanRank(), include_for_metrics=asked)
    trainer = build(tmp_path, None)
    trainer.compute_metrics = MeanRank()
    trainer.preprocess_logits_for_metrics = lambda logits, labels: logits
    with pytest.raises(ValueError, match="preprocess_logits_for_metrics is given, but MeanRank"):
        trainer.evaluate()


def test_other_trainers_refuse_tiles(tmp_path):
    with pytest.raises(ValueError, match="compute_metrics is MeanRank, a TileMetrics, which DPO"):
        lowpeak_trainers.DPOTrainer(
            model=tiny.llama(),
            ref_model=tiny.llama(),
            args=lowpeak_trainers.DPOConfig(**parity.settings(tmp_path)),
            train_dataset=tiny.preferences([(4, 6, 3)] * 4),
            processing_class=tiny.tokenizer(),
            compute_metrics=MeanRank(),
        )


def test_values_per_token_are_no_sums(tmp_path):
    class PerToken(MeanRank):
        def sums(self, tile):
            return {"sum": tile.target_ranks}

    with pytest.raises(ValueError, match=r"PerToken\.sums: 'sum' has shape \(\d+,\) here and"):
        build(tmp_path, PerToken(), per_device_eval_batch_size=1).evaluate()


def test_no_target_at_all(tmp_path, caplog):
    ids = tiny.random_ids(9, 3)
    blank = tiny.Dataset.from_list([{"input_ids": ids, "labels": [-100] * 9}])
    trainer = build(tmp_path, MeanRank())
    found = trainer.evaluate(blank)
    assert "eval_mean_rank" not in found
    assert "MeanRank saw no logits in this evaluation of SFTTrainer" in caplog.text


def test_predictions_that_are_no_logits_are_refused():
    prediction = transformers.EvalPrediction(predictions=torch.zeros(3, 2), label_ids=torch.ones(3))
    with pytest.raises(ValueError, match=r"predictions have shape \(3, 2\) and label_ids \(3,\)"):
        MeanRank()(prediction)


@pytest.mark.parametrize("number", [TopKAccuracy, CalibrationError])
def test_numbers_below_one_are_refused(number):
    with pytest.raises(ValueError, match="=0: pass 1 or more"):
        number(0)


def test_documented(tmp_path, monkeypatch):
    """The example of docs/metrics.md runs on a model and data of ours."""
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (example,) = (text for text in examples if "lowpeak_trainers" in text)
    names = {
        "model": tiny.llama(),
        "args": lowpeak_trainers.SFTConfig(**parity.settings(tmp_path, max_length=None)),
        "train_dataset": documents(),
        "eval_dataset": documents(),
        "tokenizer": tiny.tokenizer(),
    }
    exec(compile(example, "metrics.md", "exec"), names)
    found, wanted = names["metrics"], right_metrics(tiny.llama())
    assert 0 < found["eval_calibration_error"] < 1
    for name in ("eval_token_accuracy", "eval_top_5_accuracy"):
        oracle.assert_close(found[name], wanted[name])
    twin, spread = oracle.in_float64(tiny.llama()), []
    for ids in documents()["input_ids"]:
        log_p = twin(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1, keepdim=True)
        spread.append((log_p.exp() * (log_p + entropy).square()).sum(-1))
    oracle.assert_close(found["eval_varentropy"], torch.cat(spread).mean().item())


OPTIONS = {
    "compiled": {"torch_compile": True, "torch_compile_backend": "eager", "tf32": False},
    "bf16": {"bf16": True},
    "bf16_full_eval": {"bf16_full_eval": True},
    "label_smoothing": {"label_smoothing_factor": 0.1},
    "shared prompts": {"share_prompts": True},
}


@pytest.mark.filterwarnings("ignore:`label_smoothing_factor`:FutureWarning")
@pytest.mark.parametrize(
    "name", [pytest.param("compiled", marks=pytest.mark.slow), *list(OPTIONS)[1:]]
)
def test_tiles_are_those_of_the_loss(name, tmp_path):
    """The mean over all tiles is the loss that an evaluation without metrics has."""
    prompt, rest = tiny.random_ids(9, 3), [tiny.random_ids(n, n) for n in (4, 7, 5, 2)]
    rows = [
        {"input_ids": prompt + ids, "labels": [-100] * 9 + ids, "seq_lengths": [9 + len(ids)]}
        for ids in rest
    ]
    data, found = tiny.Dataset.from_list(rows), []
    for metrics in (Perplexity(), None):
        options = dict(OPTIONS[name])
        if metrics is None:
            options.pop("label_smoothing_factor", None)
        trainer = build(tmp_path, metrics, data=data, **options)
        torch.set_float32_matmul_precision("highest")  # torch_compile changes it
        found.append(trainer.evaluate())
    log = torch.tensor(found[0]["eval_perplexity"], dtype=torch.float64).log().item()
    # tiles are not rounded to bfloat16; the head's may be
    oracle.assert_close(log, found[1]["eval_loss"], 1e-3 if "bf16" in name else oracle.TOLERANCE)


def test_prompt_tuning(tmp_path):
    """The first token of a document is predicted too, from virtual ones."""
    tuning = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    found = build(tmp_path, Perplexity(), peft_config=tuning).evaluate()
    log = torch.tensor(found["eval_perplexity"], dtype=torch.float64).log().item()
    oracle.assert_close(log, found["eval_loss"])
