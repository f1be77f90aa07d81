"""Start the runs one after the other, each in its own process, and show how far they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from lowpeak_bench.quickstart.settings import EVENT_PREFIX, SIDE_NAMES, RunSettings

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # the model is a folder: nothing has to be asked for
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "KINETO_LOG_LEVEL": "99",  # torch 2.13 writes lines to stderr for each recording otherwise
    "TOKENIZERS_PARALLELISM": "false",
    "TRL_EXPERIMENTAL_SILENCE": "1",  # rollout functions are experimental
}


class RunFailedError(Exception):
    """A run ended with an error; the message carries the end of its log."""


def execute(runs: Sequence[RunSettings]) -> list[dict[str, Any]]:
    """Run all of `runs` and return their results, under one progress bar of steps.

    TQDM_DISABLE=1 switches the bar off. Raises RunFailedError for the first run that fails.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]

    results = []
    with tqdm(total=sum(run.steps for run in runs), unit="step") as bar:
        for run in runs:
            bar.set_description(f"{run.trainer.upper()} with {SIDE_NAMES[run.side]}")
            results.append(_execute(run, bar))
    return results


def _execute(run: RunSettings, bar: Any) -> dict[str, Any]:
    command = [sys.executable, "-m", "lowpeak_bench.quickstart.run", str(run.write())]
    with (
        run.log_path.open("w", encoding="utf-8") as log,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **ENVIRONMENT},
            encoding="utf-8",
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(EVENT_PREFIX):
                bar.update()
            else:
                log.write(line)
    if process.returncode != 0:
        raise RunFailedError(_failure(run, process.returncode))
    result: dict[str, Any] = json.loads(run.result_path.read_text(encoding="utf-8"))
    return result


def _failure(run: RunSettings, code: int) -> str:
    lines = run.log_path.read_text(encoding="utf-8").splitlines()
    name = f"{run.trainer.upper()} with {SIDE_NAMES[run.side]}"
    end = "\n".join(f"    {line}" for line in lines[-25:])
    return f"{name} ended with exit status {code}; the end of {run.log_path}:\n{end}"
