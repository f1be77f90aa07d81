"""The command line of the quickstart."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lowpeak_bench.quickstart.model import (
    DEFAULT_MODEL,
    ModelNotFoundError,
    default_cache_folder,
    prepare_model,
)
from lowpeak_bench.quickstart.settings import SIDES, STEP_SIZES, TRAINERS, RunSettings

AGREED, DIFFERENT, FAILED = 0, 1, 2

DESCRIPTION = """\
Train a language model by SFT, DPO and GRPO, with stock TRL and with lowpeak, and compare
losses, gradient norms, times and memory. Writes report.html and results.json.
"""
EPILOG = """\
exit status: 0 losses and gradient norms agree; 1 they differ beyond the tolerance; 2 a run
failed or an option is wrong. TQDM_DISABLE=1 switches the progress bar off. CUDA_VISIBLE_DEVICES=
(empty) keeps a GPU out of it: the runs are then made on the CPU, in float32.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the quickstart's options."""
    result = argparse.ArgumentParser(
        prog="python -m lowpeak_bench.quickstart",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help="folder of a transformers model with a chat template, a .gguf file, or an installed "
        "package that ships one (default: %(default)s, which has SmolLM2-135M-Instruct)",
    )
    result.add_argument(
        "--trainers",
        default=",".join(TRAINERS),
        type=_trainers,
        metavar="NAMES",
        help="which trainers, with commas between (default: %(default)s)",
    )
    result.add_argument(
        "--steps",
        default=3,
        type=_steps,
        metavar="N",
        help="optimizer steps of each run (default: %(default)s)",
    )
    result.add_argument("--seed", default=0, type=int, help="seed of data, order and sampling")
    result.add_argument(
        "--output-dir",
        default=Path("quickstart-report"),
        type=Path,
        metavar="FOLDER",
        help="where the report goes (default: %(default)s)",
    )
    result.add_argument(
        "--cache-dir",
        default=default_cache_folder(),
        type=Path,
        metavar="FOLDER",
        help="where a converted GGUF model is kept (default: %(default)s)",
    )
    return result


def _trainers(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",")))
    unknown = [name for name in names if name not in TRAINERS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{', '.join(map(repr, unknown))}: choose from {', '.join(TRAINERS)}"
        )
    return names


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the quickstart and return its exit status."""
    options = parser().parse_args(arguments)
    # Everything below needs torch and transformers, which --help does not wait for.
    from lowpeak_bench.quickstart.driver import RunFailedError, execute

    try:
        runs = plan_runs(options)
        results = execute(runs)
    except (ModelNotFoundError, RunFailedError) as error:
        sys.stderr.write(f"error: {error}\n")
        return FAILED
    return publish(options, results)


def plan_runs(options: argparse.Namespace) -> list[RunSettings]:
    """Prepare the model and return the runs: each trainer with TRL, then with lowpeak."""
    model = prepare_model(options.model, options.cache_dir.expanduser())
    folder = options.output_dir / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    device = choose_device()
    runs = [
        RunSettings(
            trainer=trainer,
            side=side,
            model=str(model),
            folder=str(folder),
            steps=options.steps,
            seed=options.seed,
            device=device,
        )
        for trainer in options.trainers
        for side in SIDES
    ]
    for run in runs:
        # What an earlier call sampled must not be replayed.
        run.completions_path.unlink(missing_ok=True)
    return runs


def choose_device() -> str:
    """Return "cuda" or "xpu" where there is one, "cpu" otherwise."""
    import torch

    current = torch.accelerator.current_accelerator(check_available=True)
    return current.type if current is not None and current.type in ("cuda", "xpu") else "cpu"


def publish(options: argparse.Namespace, results: Sequence[dict[str, Any]]) -> int:
    """Print the table, write report.html and results.json, and return the exit status."""
    from lowpeak_bench.environment import environment
    from lowpeak_bench.quickstart.compare import compare
    from lowpeak_bench.quickstart.report import conclusions, print_table, write_report

    comparisons = compare(results)
    settings = describe(options, results)
    block = environment()
    folder = options.output_dir
    record = {"environment": block, "settings": settings, "results": list(results)}
    (folder / "results.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    write_report(folder / "report.html", comparisons, block, settings)
    print_table(comparisons, sys.stdout)
    problems, notes = conclusions(comparisons)
    for text in (*notes, *problems):
        print(f"\n{text}")
    if not problems:
        print("\nLosses and gradient norms agree.")
    print(f"\nReport: {folder / 'report.html'}")
    return DIFFERENT if problems else AGREED


def describe(options: argparse.Namespace, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the settings that go with the results, without folders of this machine."""
    sizes = {trainer: asdict(STEP_SIZES[trainer]) for trainer in options.trainers}
    return {
        "model": Path(options.model).name,
        "precision": results[0]["precision"],
        "steps": options.steps,
        "seed": options.seed,
        "step sizes": sizes,
    }
