"""What `lowpeak_bench.parity` runs and compares, for the tests."""

from __future__ import annotations

from collections.abc import Callable

from transformers import Trainer

from lowpeak_bench.parity.harness import (
    STEPS,
    TOLERANCE,
    CompletionRecord,
    assert_same_logs,
    has_lowpeak_head,
    logged,
    script_completions,
    settings,
    train_both,
)

__all__ = [
    "STEPS",
    "TOLERANCE",
    "CompletionRecord",
    "assert_parity",
    "assert_same_logs",
    "has_lowpeak_head",
    "logged",
    "script_completions",
    "settings",
]


def assert_parity(
    stock: Callable[[], Trainer], ours: Callable[[], Trainer], *, online: bool = False
) -> tuple[Trainer, Trainer]:
    """Train both trainers, compare their logs, and return (stock, ours)."""
    stock_trainer, our_trainer = train_both(stock, ours, online=online)
    assert has_lowpeak_head(our_trainer)
    assert_same_logs(our_trainer, stock_trainer)
    return stock_trainer, our_trainer
