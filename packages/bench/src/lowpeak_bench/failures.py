"""How a benchmark reports that something it wanted to measure failed."""

from __future__ import annotations

import re

MAX_REASON = 120


def reason(error: Exception) -> str:
    """Return type and first line of an error, without paths of this machine."""
    lines = str(error).strip().splitlines()
    text = re.sub(r"\s*\(/[^)]*\)?", "", lines[0]) if lines else ""
    return f"{type(error).__name__}: {text}"[:MAX_REASON]
