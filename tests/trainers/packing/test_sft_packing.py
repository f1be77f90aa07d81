"""`packing=True` in the SFT trainers: TRL's rows where TRL sees all at once, lowpeak's packing."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from pathlib import Path

import oracle
import parity
import pytest
import tiny
import torch.multiprocessing as mp
import trl
from datasets import Dataset
from trl.trainer import sft_trainer

import lowpeak_trainers
from lowpeak_trainers.packing import STRATEGIES
from lowpeak_trainers.packing import dataset as packing_module

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def build(folder, data, *, package=lowpeak_trainers, callbacks=None, eval_dataset=None, **options):
    """SFTTrainer of `package`; `data` may hold anything that TRL prepares."""
    return package.SFTTrainer(
        model=tiny.llama(),
        args=package.SFTConfig(
            **parity.settings(
                folder, **{"packing": True, "max_length": 16, "max_steps": 2, **options}
            )
        ),
        train_dataset=data,
        eval_dataset=eval_dataset,
        processing_class=tiny.tokenizer(),
        callbacks=callbacks,
    )


def rows(trainer):
    return list(trainer.train_dataset.with_format(None))


def chats():
    """Conversations of two turns; the assistant's words alone are learnt."""
    ids = [tiny.random_ids(8, seed) for seed in range(6)]
    return Dataset.from_dict(
        {
            "messages": [
                [
                    {"role": "user", "content": tiny.words(row[:3])},
                    {"role": "assistant", "content": tiny.words(row[3 : 4 + place])},
                ]
                for place, row in enumerate(ids)
            ]
        }
    )


GENERATION_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }} <eos>{% endgeneration %}{% else %}"
    "{{ message['content'] }} <eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def with_extras():
    """Documents with columns that packing has no use for."""
    data = tiny.documents([3, 37, 7, 16, 9, 1])
    return data.add_column("source", ["a"] * 6).add_column("quality", [[1.0]] * 6)


def with_empty_rows():
    return Dataset.from_dict({"input_ids": [[], [7, 8, 9], [], [10, 11], []]})


DATA = {
    "documents": (lambda: tiny.documents([3, 37, 7, 16, 9, 50]), {}),
    "text": (lambda: Dataset.from_dict({"text": [tiny.words([7] * n) for n in (2, 30, 5)]}), {}),
    "extra_columns": (with_extras, {}),
    "extra_columns_kept": (with_extras, {"remove_unused_columns": False}),
    "empty_rows": (with_empty_rows, {}),
    "max_length_1": (lambda: tiny.documents([2, 1, 3]), {"max_length": 1}),
    "completions": (lambda: tiny.prompt_completions([(3, 5), (4, 20), (20, 2), (6, 6)]), {}),
    "whole": (
        lambda: tiny.prompt_completions([(3, 5), (20, 2)]),
        {"completion_only_loss": False},
    ),
    "assistant": (chats, {"assistant_only_loss": True}),
    "no_shuffle": (lambda: tiny.documents([5, 9, 11, 2]), {"shuffle_dataset": False}),
    "shuffle": (lambda: tiny.documents([5, 9, 11, 2]), {"shuffle_dataset": True}),
}


def both(folder, data, **options):
    """Stock TRL's trainer and ours."""
    return [build(folder, data, package=p, **options) for p in (trl, lowpeak_trainers)]


@every_strategy
@pytest.mark.parametrize("kind", DATA)
def test_rows_are_those_of_trl(kind, strategy, tmp_path, monkeypatch):
    monkeypatch.setattr("lowpeak_bench.parity.tiny.CHAT_TEMPLATE", GENERATION_TEMPLATE)
    data, options = DATA[kind]
    stock, ours = both(tmp_path, data(), packing_strategy=strategy, **options)
    assert rows(ours) == rows(stock)
    assert len(rows(ours)) > 0
    assert ours.train_dataset.features == stock.train_dataset.features


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [("completions", "bfd"), ("assistant", "bfd_split"), ("max_length_1", "bfd")],
)
def test_run_is_that_of_trl(kind, strategy, tmp_path, monkeypatch):
    monkeypatch.setattr("lowpeak_bench.parity.tiny.CHAT_TEMPLATE", GENERATION_TEMPLATE)
    data, options = DATA[kind]
    stock, ours = both(tmp_path, data(), packing_strategy=strategy, **options)
    stock.train()
    ours.train()
    parity.assert_same_logs(ours, stock)


@every_strategy
@pytest.mark.parametrize("kind", ["documents", "completions"])
def test_streams_are_those_of_trl(kind, strategy, tmp_path):
    data, _ = DATA[kind]
    stock, ours = both(tmp_path, data().to_iterable_dataset(), packing_strategy=strategy)
    assert rows(ours) == rows(stock)
    assert rows(ours) == rows(ours)


def test_run_over_a_stream_is_that_of_trl(tmp_path):
    stock, ours = both(tmp_path, tiny.documents([3, 37, 7, 16, 9, 50]).to_iterable_dataset())
    stock.train()
    ours.train()
    parity.assert_same_logs(ours, stock)


def test_stream_with_empty_rows(tmp_path):
    """TRL ends with an error about unlike schemas: datasets knows no type of an empty list."""
    ours = build(tmp_path, with_empty_rows().to_iterable_dataset())
    assert [row["input_ids"] for row in rows(ours)] == [[7, 8, 9, 10, 11]]
    assert [row["seq_lengths"] for row in rows(ours)] == [[3, 2]]


def long_and_short():
    """More rows than TRL's window of 1000, long ones first and short ones last."""
    return Dataset.from_dict({"input_ids": [[7] * 5] * 1000 + [[8] * 3] * 1000})


def test_packing_is_global(tmp_path, caplog):
    caplog.set_level(logging.INFO, "lowpeak.trainers")
    ours = build(tmp_path, long_and_short(), max_length=8)
    assert len(ours.train_dataset) == 1000
    assert [r.message for r in caplog.records if "acking train" in r.message] == [
        "Packing train dataset, bfd: 2000 rows of 8000 tokens in 1000 packed rows of 8, "
        "100.00% full; 0 rows truncated (0 tokens dropped), 0 split (0 tokens split off), 0 empty"
    ]
    assert len(build(tmp_path, long_and_short(), package=trl, max_length=8).train_dataset) == 1500


def test_bfd_is_bfd_split_when_nothing_is_too_long(tmp_path):
    data = tiny.documents([3, 16, 7, 11, 9, 1])
    bfd, split = (build(tmp_path, data, packing_strategy=s) for s in ("bfd", "bfd_split"))
    assert rows(bfd) == rows(split)


def test_report_counts_what_was_cut(tmp_path, caplog):
    caplog.set_level(logging.INFO, "lowpeak.trainers")
    for strategy in ("bfd", "bfd_split"):
        build(tmp_path, tiny.documents([20, 16, 40, 2]), packing_strategy=strategy)
    assert "2 rows truncated (28 tokens dropped), 0 split" in caplog.text
    assert "0 rows truncated (0 tokens dropped), 2 split (28 tokens split off)" in caplog.text


def test_stream_reports_its_first_rows_once(tmp_path, caplog):
    caplog.set_level(logging.INFO, "lowpeak.trainers")
    trainer = build(tmp_path, tiny.documents([20, 16, 2]).to_iterable_dataset())
    trainer.train()
    lines = [r.message for r in caplog.records if r.message.startswith("packing, ")]
    assert len(lines) == 1
    assert lines[0].startswith("packing, the first rows of a stream, bfd: 3 rows of 38 tokens in 3")


def test_wrapped_says_once_that_it_mixes_documents(tmp_path, caplog):
    packing_module._say_what_wrapped_means.cache_clear()
    for _ in range(2):
        build(tmp_path, tiny.documents([5, 9]), packing_strategy="wrapped")
    assert caplog.text.count("'wrapped' joins documents") == 1


def test_c7_seq_lengths_reach_the_collator_whatever_columns_are_removed(tmp_path):
    """The loss is that of each document alone: without the column they would see each other."""
    lengths = [3, 30, 7, 12]
    data = tiny.documents(lengths)
    model = oracle.in_float64(tiny.llama())
    total = -sum(oracle.log_probs(model, ids).sum() for ids in data["input_ids"])
    right = total.item() / (sum(lengths) - len(lengths))
    for removed in (True, False):
        trainer = build(
            tmp_path,
            data.add_column("source", ["a", "b", "c", "d"]),
            max_length=33,
            max_steps=1,
            gradient_accumulation_steps=1,
            remove_unused_columns=removed,
        )
        assert sorted(rows(trainer)[0]) == ["input_ids", "labels", "seq_lengths"]
        trainer.train()
        oracle.assert_close(trainer.state.log_history[0]["loss"], right)


def test_dataset_of_evaluate_and_of_eval_packing(tmp_path):
    """Both are packed as the train dataset is, after construction too."""
    trainer = build(tmp_path, long_and_short(), eval_dataset=long_and_short(), max_length=8)
    assert len(trainer.eval_dataset) == 1000
    seen = []
    trainer.get_eval_dataloader = lambda data=None: seen.append(len(data)) or []
    trainer.evaluate(long_and_short())
    assert seen == [1000]
    assert sft_trainer.pack_dataset is trl.pack_dataset
    plain = build(
        tmp_path, long_and_short(), eval_dataset=long_and_short(), max_length=8, eval_packing=False
    )
    assert len(plain.eval_dataset) == 2000


def test_enabled_packs_for_stock_trainers(tmp_path):
    with lowpeak_trainers.enabled():
        trainer = build(tmp_path, long_and_short(), package=trl, max_length=8)
    assert len(trainer.train_dataset) == 1000
    assert "_prepare_dataset" not in vars(trainer)
    assert sft_trainer.pack_dataset is trl.pack_dataset


@pytest.mark.parametrize("package", [lowpeak_trainers, trl], ids=lambda package: package.__name__)
def test_switched_off_by_the_environment(package, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "lowpeak.trainers")
    monkeypatch.setenv("LOWPEAK_DISABLE", "packing")
    with lowpeak_trainers.enabled():
        trainer = build(tmp_path, long_and_short(), package=package, max_length=8)
    assert len(trainer.train_dataset) == 1500
    assert "packing: TRL's own in SFTTrainer, by LOWPEAK_DISABLE=packing" in caplog.text
    assert "packed rows of" not in caplog.text


def test_global_comes_back_when_preparing_fails(tmp_path):
    with pytest.raises(ValueError, match="max_length"):
        build(tmp_path, tiny.documents([3]), max_length=None)
    assert sft_trainer.pack_dataset is trl.pack_dataset


RANKS = 2


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def work(rank: int, port: int, folder: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    data = Dataset.load_from_disk(str(folder / "rows"))
    trainer = build(folder, data, use_cpu=True, ddp_backend="gloo")
    packed = trainer.train_dataset
    report = {"rows": rows(trainer), "files": packed.cache_files, "name": packed._fingerprint}
    (folder / str(rank)).write_text(json.dumps(report))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no gloo spawn on Windows")
def test_every_rank_reads_the_rows_that_the_first_has_written(tmp_path):
    data = tiny.documents([3, 37, 7, 16, 9, 50] * 20)
    data.save_to_disk(tmp_path / "rows")
    mp.spawn(work, args=(free_port(), tmp_path), nprocs=RANKS)
    first, second = (json.loads((tmp_path / str(rank)).read_text()) for rank in range(RANKS))
    assert first == second
    assert first["files"]
    assert first["rows"] == rows(build(tmp_path, data))
