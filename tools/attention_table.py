"""Write the table of docs/attention.md: the attention of each family of the installed transformers.

Run it from the repository: `python tools/attention_table.py`. The checks are those of the slow
tests. What stands above the table in that page is written by hand and stays.
"""

import contextlib
import io
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "core" / name) for name in ("attention", "models")]

import attention_verdicts  # noqa: E402 - it lies in one of the folders above
import family_verdicts  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

PAGE = ROOT / "docs" / "attention.md"
HEADING = "## Families\n"


def verdicts() -> Iterator[attention_verdicts.AttentionVerdict]:
    """One for each family, without what its constructor prints."""
    for family in family_verdicts.families():
        print(family, flush=True)
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            verdict = attention_verdicts.check_attention(family, torch.device("cpu"))
        yield verdict


def table() -> Iterator[str]:
    """The lines of the table, and above it what was counted."""
    found = list(verdicts())
    counts = Counter(verdict.attention for verdict in found)
    versions = f"transformers {transformers.__version__}, PyTorch {torch.__version__.split('+')[0]}"
    yield f"Written by `python tools/attention_table.py` with {versions}: "
    yield ", ".join(f"{count} {name}" for name, count in counts.most_common()) + ".\n"
    yield "| family | attention | packed rows | shared prompts | reason |"
    yield "|---|---|---|---|---|"
    for v in found:
        packed = "safe" if v.separates_documents else "no"
        shared = "yes" if v.shares_prefixes else "no"
        if v.attention == attention_verdicts.NOT_BUILDABLE:
            packed = shared = ""
        reason = " ".join(v.reason.split()).replace("|", "\\|")
        yield f"| {v.family} | {v.attention} | {packed} | {shared} | {reason} |"


def main() -> None:
    """Check every family and write the page."""
    transformers.logging.set_verbosity_error()
    above, _, _ = PAGE.read_text(encoding="utf-8").partition(HEADING)
    text = above + HEADING + "\n" + "\n".join(table()) + "\n"
    PAGE.write_text(text.encode("ascii", "backslashreplace").decode(), encoding="utf-8")


if __name__ == "__main__":
    main()
