"""The command ``lowpeak lengths``."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from .advice import Advice, advise
from .measuring import Lengths, measure
from .plot import plotting_available, write_plot
from .reading import DatasetError, Rows, open_rows
from .summary import Summary, summarise
from .table import render

if TYPE_CHECKING:
    Subcommands = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_lengths", "run"]

SUMMARY = "show how long the rows of a dataset are, what a max_length cuts, and how rows pack"
EXAMPLE = """examples:
  lowpeak lengths --dataset_name trl-lib/Capybara --model_name_or_path Qwen/Qwen3-0.6B
  lowpeak lengths --dataset_name chats.jsonl --model_name_or_path ./model \\
      --max_length 2048 4096 8192 --plot lengths.png --json lengths.json
"""


def add_lengths(subcommands: Subcommands) -> None:
    """Add ``lowpeak lengths`` to the subcommands of core's parser."""
    parser = subcommands.add_parser(
        "lengths",
        help=SUMMARY,
        description=SUMMARY,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_data(parser.add_argument_group("data"))
    _add_model(parser.add_argument_group("model"))
    _add_training(parser.add_argument_group("training"))
    _add_output(parser.add_argument_group("output"))
    parser.set_defaults(run=run)


def _add_data(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dataset_name",
        required=True,
        metavar="NAME",
        help="a dataset on the hub, a folder, a file (json, jsonl, parquet, csv, text) or a "
        "'pattern*' of files",
    )
    group.add_argument("--dataset_config", metavar="NAME", help="which configuration of it")
    group.add_argument(
        "--split", "--dataset_train_split", default="train", metavar="NAME", help="(train)"
    )
    group.add_argument(
        "--dataset_text_field",
        "--text_column",
        metavar="COLUMN",
        help="the column with text (text, where the rows have no other format)",
    )
    group.add_argument(
        "--sample_by",
        choices=("document", "paragraph", "line"),
        default="document",
        help="what a row of text files is (document: the whole file)",
    )
    group.add_argument(
        "--streaming",
        "--dataset_streaming",
        action="store_true",
        help="read as a stream, without a copy on disk",
    )
    group.add_argument(
        "--max_rows",
        type=_positive,
        metavar="N",
        help="count N rows only: drawn at random, or the first ones of a stream",
    )
    group.add_argument("--num_proc", "--dataset_num_proc", type=_positive, metavar="N")


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model_name_or_path",
        metavar="NAME",
        help="whose tokenizer and chat template are taken; not needed for rows with input_ids",
    )
    group.add_argument("--model_revision", default="main", metavar="NAME", help="(main)")
    group.add_argument("--trust_remote_code", action="store_true")
    group.add_argument(
        "--chat_template_path",
        metavar="PATH",
        help="another chat template: a Jinja file, or a model that has one",
    )


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max_length",
        type=_positive,
        nargs="+",
        default=[],
        metavar="N",
        help="one or more candidates, in tokens (powers of two around the lengths that occur)",
    )
    group.add_argument(
        "--per_device_train_batch_size", type=_positive, default=8, metavar="N", help="(8)"
    )
    group.add_argument(
        "--truncation_mode", choices=("keep_start", "keep_end"), default="keep_start"
    )
    group.add_argument(
        "--seed", type=int, default=42, metavar="N", help="orders the rows of batches (42)"
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    group.add_argument("--plot", type=Path, metavar="FILE.png", help="draw them")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def run(options: argparse.Namespace) -> int:
    """Measure, print, write; 1 and a message on stderr where that cannot be done."""
    try:
        _check(options)
        with _bars_on_terminals():
            rows, lengths, limit = _measured(options)
        if not lengths.tokens.any():
            raise DatasetError(f"{options.dataset_name}: no row has a token")
    except DatasetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    summary = summarise(
        lengths,
        options.max_length,
        batch_size=options.per_device_train_batch_size,
        truncation_mode=options.truncation_mode,
        seed=options.seed,
        position_limit=limit,
    )
    _publish(options, summary, lengths, _heading(options, rows, lengths))
    return 0


def _check(options: argparse.Namespace) -> None:
    """What can be told before anything is read."""
    if options.plot is not None and options.plot.suffix.lower() != ".png":
        raise DatasetError(f"--plot {options.plot}: the picture is a PNG, name it so")
    if options.plot is not None and not plotting_available():
        raise DatasetError(
            "--plot draws with matplotlib, which is not installed: "
            'pip install "lowpeak-trainers[plot]"'
        )
    for name in ("plot", "json"):
        path = getattr(options, name)
        if path is not None and not path.absolute().parent.is_dir():
            raise DatasetError(f"--{name} {path}: there is no folder {path.parent}")
    if options.streaming and options.num_proc is not None:
        raise DatasetError("--num_proc: a stream is read by one process, leave it or --streaming")


@contextmanager
def _bars_on_terminals() -> Iterator[None]:
    """The bars of `datasets` on a terminal, none in a file or a pipe."""
    if sys.stderr.isatty() or datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


def _measured(options: argparse.Namespace) -> tuple[Rows, Lengths, int | None]:
    """The rows, their lengths, and the longest sequence that the model takes, if it is known."""
    rows = open_rows(
        options.dataset_name,
        config=options.dataset_config,
        split=options.split,
        streaming=options.streaming,
        sample_by=options.sample_by,
    )
    tokenizer = chat_template = None
    if options.model_name_or_path is not None:
        tokenizer = _tokenizer(options.model_name_or_path, options)
    if options.chat_template_path is not None:
        chat_template = _chat_template(options.chat_template_path, options)
    lengths = measure(
        rows,
        tokenizer,
        text_field=options.dataset_text_field,
        chat_template=chat_template,
        max_rows=options.max_rows,
        seed=options.seed,
        num_proc=options.num_proc,
    )
    limit = None if tokenizer is None else _position_limit(tokenizer, options)
    return rows, lengths, limit


def _position_limit(tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace) -> int | None:
    """What the model's config says, else its tokenizer."""
    file = cached_file(
        options.model_name_or_path,
        "config.json",
        revision=options.model_revision,
        _raise_exceptions_for_missing_entries=False,
    )
    config = {} if file is None else json.loads(Path(file).read_text(encoding="utf-8"))
    # Models of text and images keep what concerns the text in a part of its own.
    config |= config.get("text_config") or {}
    limit = config.get("max_position_embeddings", tokenizer.model_max_length)
    # Tokenizers that know no limit say 10**30.
    return int(limit) if limit < 2**31 else None


def _tokenizer(name: str, options: argparse.Namespace) -> PreTrainedTokenizerBase:
    path = Path(name).expanduser()
    if not path.exists() and name.startswith(("/", "~", "./", "../")):
        raise DatasetError(f"--model_name_or_path {name}: there is no such folder")
    try:
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(path) if path.exists() else name,
            revision=options.model_revision,
            trust_remote_code=options.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        remedy = (
            "is there a tokenizer in that folder?"
            if path.exists()
            else "for a gated model accept its terms on its page, then `hf auth login`; without "
            "the hub name a local folder"
        )
        raise DatasetError(f"no tokenizer of {name}: {error}\n{remedy}") from error
    return loaded


def _chat_template(name: str, options: argparse.Namespace) -> str:
    path = Path(name).expanduser()
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = _tokenizer(name, options).chat_template
    if not isinstance(template, str):
        raise DatasetError(f"--chat_template_path {name}: it has no chat template")
    return template


def _heading(options: argparse.Namespace, rows: Rows, lengths: Lengths) -> str:
    """Two lines: which rows, and whose tokens."""
    counted = f"{lengths.rows:,} rows"
    if options.max_rows is not None:
        if options.streaming:
            counted = f"the first {counted}"
        elif lengths.rows < len(rows):
            counted += f" drawn at random from {len(rows):,}"
    form: str = lengths.format
    if lengths.conversational and lengths.format != "messages":
        form += " messages"
    first = f"{options.dataset_name}, split {options.split}: {counted} ({form})"
    if lengths.format == "tokenised":
        return f"{first}\ntokenised already"
    template = ", with its chat template" if lengths.conversational else ""
    if template and options.chat_template_path is not None:
        template = f", with the chat template of {options.chat_template_path}"
    second = f"tokens of {options.model_name_or_path}{template}"
    if lengths.images:
        second += "; images are not counted"
    return f"{first}\n{second}"


def _publish(options: argparse.Namespace, summary: Summary, lengths: Lengths, heading: str) -> None:
    advice = advise(summary)
    print(render(summary, advice, heading))
    if options.json is not None:
        record = _record(options, summary, lengths, advice)
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if options.plot is not None:
        # matplotlib says that it builds its font cache, once and for long.
        logging.getLogger("matplotlib").setLevel(logging.ERROR)
        write_plot(options.plot, lengths.tokens, summary, advice, heading)


def _record(
    options: argparse.Namespace, summary: Summary, lengths: Lengths, advice: Advice
) -> dict[str, Any]:
    return {
        "dataset_name": options.dataset_name,
        "dataset_config": options.dataset_config,
        "split": options.split,
        "model_name_or_path": options.model_name_or_path,
        "format": lengths.format,
        "conversational": lengths.conversational,
        "max_rows": options.max_rows,
        "seed": options.seed,
        **asdict(summary),
        "advice": asdict(advice),
    }
