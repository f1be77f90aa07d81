"""Which max_length and which strategy, why, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass

from ..packing import Strategy
from .summary import AtMaxLength, Summary

__all__ = ["Advice", "advise", "percent", "within_limit"]

# Below these nobody gains from another choice: they are the resolution of the advice.
TOKENS_WORTH_KEEPING = 0.01
FULL_ENOUGH = 0.95
POSITIONS_WORTH_SAVING = 0.05


@dataclass(frozen=True)
class Advice:
    """A choice, and the sentences that give its reasons and its price."""

    max_length: int
    strategy: Strategy | None
    """None: do not pack."""
    arguments: str
    """For the trainer's config."""
    why: str
    cost: str


def percent(share: float) -> str:
    """A share in percent, told from none."""
    return f"{100 * share:.1f} %" if share >= 0.0005 or share <= 0 else "< 0.1 %"


def advise(summary: Summary) -> Advice:
    """Recommend the shortest max_length that loses next to nothing, and how to fill its rows.

    Of the candidates within the model's positions that cut at most 1 % of the tokens it is the
    first whose `bfd` rows are 95 % full, else the fullest; where all cut more, the longest, with
    `bfd_split`, which cuts none. No packing where it saves less than 5 % of the positions, and none
    for pairs.
    """
    tokens = summary.distribution.tokens
    candidates = within_limit(summary)
    keeping = [c for c in candidates if c.cut_tokens <= TOKENS_WORTH_KEEPING * tokens]
    if summary.sequences_per_row > 1:
        return _pairs(summary, keeping[0] if keeping else candidates[-1])
    if not keeping:
        return _split(summary, candidates[-1])
    full = [c for c in keeping if c.fill("bfd").fill_ratio >= FULL_ENOUGH]
    best = full[0] if full else max(keeping, key=lambda c: c.fill("bfd").fill_ratio)
    positions = best.fill("bfd").rows * best.max_length
    if positions > (1 - POSITIONS_WORTH_SAVING) * best.plain_positions:
        return _plain(summary, best)
    return _packed(summary, best)


def within_limit(summary: Summary) -> list[AtMaxLength]:
    """The candidates that the model has positions for; all, where it has for none."""
    limit = summary.position_limit
    within = [c for c in summary.candidates if limit is None or c.max_length <= limit]
    return within or list(summary.candidates)


def _longer(summary: Summary) -> str:
    """The max_length that would do, and whether the model could."""
    enough, limit = summary.length_for_99_percent, summary.position_limit
    beyond = f", the model has {limit:,} positions" if limit is not None and enough > limit else ""
    return f"max_length={enough} would hold 99 % of the tokens uncut{beyond}."


def _keeps(summary: Summary, chosen: AtMaxLength) -> str:
    """What the choice of the max_length goes by."""
    if not chosen.truncated:
        return f"max_length={chosen.max_length} cuts no token"
    share = percent(chosen.cut_tokens / summary.distribution.tokens)
    return (
        f"max_length={chosen.max_length} cuts only {share} of the tokens, "
        f"off {_sequences(summary, chosen.truncated)}"
    )


def _sequences(summary: Summary, count: int) -> str:
    share = percent(count / summary.distribution.sequences)
    name = "rows" if summary.sequences_per_row == 1 else "chosen or rejected answers"
    return f"{count:,} {name} ({share})"


def _padding(summary: Summary, chosen: AtMaxLength) -> str:
    return (
        f"plain batches of {summary.batch_size} are {percent(chosen.padding_random)} padding "
        f"({percent(chosen.padding_grouped)} grouped by length)"
    )


def _unlabelled(chosen: AtMaxLength) -> str:
    if not chosen.unlabelled:
        return ""
    return (
        f" {chosen.unlabelled:,} rows lose every token with a loss: their prompts fill max_length."
    )


def _steps(summary: Summary, chosen: AtMaxLength, strategy: Strategy) -> str:
    fill = chosen.fill(strategy)
    shorter = chosen.plain_positions / (fill.rows * chosen.max_length)
    faster = f", and {shorter:.1f} times fewer positions to compute" if shorter > 1.05 else ""
    return (
        f"An epoch has {fill.rows:,} packed rows instead of {summary.rows:,}{faster}: lower the "
        "batch size to keep the number of steps."
    )


def _packed(summary: Summary, chosen: AtMaxLength) -> Advice:
    fill = chosen.fill("bfd")
    why = (
        f"{_keeps(summary, chosen)}, and bfd keeps documents whole and apart in rows that are "
        f"{percent(fill.fill_ratio)} full, where {_padding(summary, chosen)}."
    )
    arguments = f'max_length={chosen.max_length}, packing=True, packing_strategy="bfd"'
    cost = _steps(summary, chosen, "bfd") + _unlabelled(chosen)
    return Advice(chosen.max_length, "bfd", arguments, why, cost)


def _split(summary: Summary, chosen: AtMaxLength) -> Advice:
    fill, tokens = chosen.fill("bfd_split"), summary.distribution.tokens
    why = (
        f"Even max_length={chosen.max_length} cuts {percent(chosen.cut_tokens / tokens)} of the "
        f"tokens; bfd_split keeps them, in rows that are {percent(fill.fill_ratio)} full, where "
        f"{_padding(summary, chosen)}."
    )
    cost = (
        f"{_sequences(summary, fill.split_rows)} become several documents: "
        f"{percent(fill.split_tokens / tokens)} of the tokens do not see the start of theirs. "
        f"{_longer(summary)} {_steps(summary, chosen, 'bfd_split')}"
    )
    arguments = f'max_length={chosen.max_length}, packing=True, packing_strategy="bfd_split"'
    return Advice(chosen.max_length, "bfd_split", arguments, why, cost)


def _plain(summary: Summary, chosen: AtMaxLength) -> Advice:
    why = (
        f"{_keeps(summary, chosen)}. Do not pack: {_padding(summary, chosen)}, and packed rows, "
        f"{percent(chosen.fill('bfd').fill_ratio)} full, would save next to nothing."
    )
    cost = f"{percent(chosen.padding_random)} of the positions are padding.{_unlabelled(chosen)}"
    return Advice(chosen.max_length, None, f"max_length={chosen.max_length}", why, cost)


def _pairs(summary: Summary, chosen: AtMaxLength) -> Advice:
    if chosen.cut_tokens <= TOKENS_WORTH_KEEPING * summary.distribution.tokens:
        why = f"{_keeps(summary, chosen)}. "
    else:
        share = percent(chosen.cut_tokens / summary.distribution.tokens)
        why = f"Even max_length={chosen.max_length} cuts {share} of the tokens: {_longer(summary)} "
    why += (
        f"Pairs are not packed, and {_padding(summary, chosen)}: padding_free, on by default in "
        "lowpeak_trainers, computes none of it."
    )
    longest = 2 * chosen.max_length
    cost = (
        f"Memory for pairs of up to {longest:,} tokens: max_tokens_per_batch={longest} keeps "
        f"batches of several to that.{_unlabelled(chosen)}"
    )
    return Advice(chosen.max_length, None, f"max_length={chosen.max_length}", why, cost)
