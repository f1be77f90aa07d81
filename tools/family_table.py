"""Write docs/families.md: what lowpeak does with each family of the installed transformers.

Run it from the repository: `python tools/family_table.py`. The checks are those of the slow tests.
"""

import contextlib
import io
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "core" / "models"))

import family_verdicts  # noqa: E402 - it lies in the folder above
import torch  # noqa: E402
import transformers  # noqa: E402

INTRODUCTION = """# Model families

This page is written by `python tools/family_table.py`. It was made with transformers {transformers}
and PyTorch {torch}; `pytest --run-slow tests/core/models/test_every_family.py` checks the same with
the versions you have.

Each family is built tiny and random from its configuration class. On it, values (log-probabilities,
entropy, mean logit, log of the summed squared probabilities, top-1) and the gradients of every
parameter are compared with those of the model's own logits.

- **right**: the fused head gives them.
- **tile by tile**: its logits are not a matrix times its hidden states, scaled and capped. Its own
  modules make them, a tile of tokens at a time, and they agree.
- **refused**: `ValueError` with the reason, before anything is trained.
- **not buildable**: its constructor or its own forward fails on the tiny configuration and a batch
  of text, with this exception; nothing is said about lowpeak.

The column `reduce_memory` says whether the loss it trains on is the model's own. Where it is
refused, the model's loss is another than the mean negative log-likelihood of the next token (labels
that are not shifted, for most). The trainers follow TRL's protocol for fused heads, which scores
the next token whatever the loss of the model.
"""


def table(title: str, families: tuple[str, ...], check: Callable[[str], object]) -> Iterator[str]:
    """The lines of one table; a family that is silently different ends the program."""
    verdicts = [checked(family, check) for family in families]
    counts = Counter(verdict.result for verdict in verdicts)
    yield f"\n## {title}\n"
    yield ", ".join(f"{count} {result}" for result, count in counts.most_common()) + ".\n"
    yield "| family | class | result | `reduce_memory` | reason |"
    yield "|---|---|---|---|---|"
    for v in verdicts:
        cells = (v.family, f"`{v.class_name}`", v.result, v.training, v.reason)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def checked(family: str, check: Callable[[str], object]) -> family_verdicts.Verdict:
    """The verdict on a family, without what its constructor prints."""
    print(family, flush=True)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdict = check(family)
    assert isinstance(verdict, family_verdicts.Verdict)
    return verdict


def main() -> None:
    """Check every family and write the page."""
    transformers.logging.set_verbosity_error()
    versions = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
    lines = [INTRODUCTION.format(**versions).rstrip()]
    causal, vision = family_verdicts.families(), family_verdicts.vision_families()
    lines += table("Causal language models", causal, family_verdicts.check)
    lines += table("Vision language models, on text", vision, family_verdicts.check_vision)
    text = "\n".join(lines) + "\n"
    (ROOT / "docs" / "families.md").write_text(
        text.encode("ascii", "backslashreplace").decode(), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
