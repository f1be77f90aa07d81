"""The figures as a picture. It needs matplotlib: the extra `plot`."""

from __future__ import annotations

import importlib.util
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..packing import STRATEGIES
from .advice import Advice
from .summary import Summary

__all__ = ["plotting_available", "write_plot"]

INK, QUIET = "#1f2933", "#7b8794"
ROWS, TOKENS, CHOSEN = "#9fb8d3", "#1f5fa8", "#b5541c"
# Of wasted positions: the batches that pad in warm colours, the packed rows in cold ones.
BARS = {
    "plain, random order": "#b5541c",
    "plain, grouped by length": "#e2a878",
    "bfd": "#1f5fa8",
    "bfd_split": "#6f9fd0",
    "wrapped": "#c3d5e8",
}


def plotting_available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def write_plot(
    path: Path, tokens: NDArray[np.int32], summary: Summary, advice: Advice, heading: str
) -> None:
    """Write a PNG: the distribution, what a max_length cuts, and the positions wasted.

    ``tokens``: int32 [sequences], as summarised. ``heading`` has one line or more.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(h_pad=0.09, w_pad=0.09, hspace=0.06, wspace=0.05)
    figure = Figure(figsize=(11, 8.2), layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    halves: Any = figure.subfigures(2, 1)
    top, bottom = halves
    left, right = bottom.subplots(1, 2, width_ratios=(1, 1.15))
    _draw_distribution(top.subplots(), tokens, summary, advice)
    _draw_cuts(left, tokens, summary, advice)
    _draw_waste(right, summary)
    figure.suptitle(heading, x=0.012, ha="left", fontsize=12, color=INK, fontweight="bold")
    text = textwrap.fill(f"{advice.arguments}: {advice.why} {advice.cost}", 160)
    figure.supxlabel(text, x=0.012, ha="left", fontsize=9, color=INK)
    figure.savefig(path, dpi=130, format="png")


def _unit(summary: Summary) -> str:
    return "rows" if summary.sequences_per_row == 1 else "chosen and rejected sequences"


def _quiet(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10.5, color=INK, pad=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(QUIET)
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(visible=True, axis="y", color=QUIET, alpha=0.2, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.yaxis.set_major_formatter("{x:g} %")


def _lengths_axis(axes: Any, least: float, most: float) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlim(least, most)
    ticks = [2**e for e in range(int(np.ceil(np.log2(least))), int(np.log2(most)) + 1)]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()


def _draw_distribution(
    axes: Any, tokens: NDArray[np.int32], summary: Summary, advice: Advice
) -> None:
    found = summary.distribution
    filled = tokens[tokens > 0]
    least, most = float(filled.min()), max(found.longest, advice.max_length)
    # Eight bins to each doubling; fewer where whole numbers lie further apart.
    edges = np.unique(np.round(2 ** np.arange(np.log2(least), np.log2(most + 1) + 0.25, 0.125)))
    if edges.size < 2:
        edges = np.array([least, least + 1])
    for weights, color, label, width in (
        (np.ones(filled.size), ROWS, f"share of {_unit(summary)}", 0),
        (filled.astype(np.float64), TOKENS, "share of tokens", 1.8),
    ):
        heights = np.histogram(filled, edges, weights=weights)[0]
        heights = 100 * heights / heights.sum()
        axes.stairs(heights, edges, color=color, label=label, fill=not width, linewidth=width)
    axes.axvline(advice.max_length, color=CHOSEN, linewidth=1.6)
    _lengths_axis(axes, edges[0] / 1.05, edges[-1] * 1.05)
    _quiet(axes, f"How long the {_unit(summary)} are")
    axes.set_xlabel("tokens", color=INK)
    high = axes.get_ylim()[1]
    axes.set_ylim(0, 1.18 * high)
    for q in (5, 50, 95, 99):
        value = found.percentiles[q]
        axes.plot([value, value], [0, 1.06 * high], color=QUIET, linewidth=0.9, linestyle=":")
        name = "median" if q == 50 else f"{q} %"
        axes.text(value, 1.07 * high, f"{name}\n{value:,}", ha="center", fontsize=8, color=QUIET)
    to_the_left = advice.max_length**2 > edges[0] * edges[-1]
    axes.annotate(
        f"max_length={advice.max_length:,}",
        (advice.max_length, 0.97 * high),
        xytext=(-5 if to_the_left else 5, 0),
        textcoords="offset points",
        ha="right" if to_the_left else "left",
        fontsize=9,
        color=CHOSEN,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.85},
    )
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=2,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        borderaxespad=0.2,
    )


def _draw_cuts(axes: Any, tokens: NDArray[np.int32], summary: Summary, advice: Advice) -> None:
    ordered = np.sort(tokens)
    sums = np.concatenate(([0], np.cumsum(ordered, dtype=np.int64)))
    last = max(summary.distribution.longest, summary.candidates[-1].max_length)
    lengths = np.geomspace(summary.candidates[0].max_length / 1.3, 1.5 * last, 300)
    fit = np.searchsorted(ordered, lengths, side="right")
    longer = ordered.size - fit
    cut = 100 * (sums[-1] - sums[fit] - longer * lengths) / sums[-1]
    axes.plot(
        lengths, 100 * longer / ordered.size, color=ROWS, linewidth=2, label=f"{_unit(summary)} cut"
    )
    axes.plot(lengths, cut, color=TOKENS, linewidth=2, label="tokens cut")
    for candidate in summary.candidates:
        chosen = candidate.max_length == advice.max_length
        share = 100 * candidate.cut_tokens / summary.distribution.tokens
        axes.plot(
            candidate.max_length,
            share,
            "o",
            color=CHOSEN if chosen else TOKENS,
            markersize=7 if chosen else 5,
            zorder=3,
        )
        axes.annotate(
            f"{share:.1f} %",
            (candidate.max_length, share),
            xytext=(5, 6),
            textcoords="offset points",
            fontsize=8,
            color=CHOSEN if chosen else TOKENS,
        )
    _lengths_axis(axes, lengths[0], lengths[-1])
    axes.set_ylim(bottom=0)
    _quiet(axes, "What a max_length cuts")
    axes.set_xlabel("max_length", color=INK)
    axes.legend(loc="upper right", frameon=False, fontsize=9, labelcolor=INK)


def _draw_waste(axes: Any, summary: Summary) -> None:
    waste: dict[str, list[float]] = {
        "plain, random order": [c.padding_random for c in summary.candidates],
        "plain, grouped by length": [c.padding_grouped for c in summary.candidates],
    }
    if summary.sequences_per_row == 1:
        for strategy in STRATEGIES:
            waste[strategy] = [1 - c.fill(strategy).fill_ratio for c in summary.candidates]
    width = 0.84 / len(waste)
    places = np.arange(len(summary.candidates))
    for index, (name, shares) in enumerate(waste.items()):
        middle = places + (index - (len(waste) - 1) / 2) * width
        bars = axes.bar(middle, 100 * np.array(shares), 0.9 * width, color=BARS[name], label=name)
        axes.bar_label(
            bars,
            [f"{100 * share:.0f}" if share >= 0.005 else "0" for share in shares],
            fontsize=7,
            color=QUIET,
            padding=1,
        )
    axes.set_xticks(places, [f"{c.max_length:,}" for c in summary.candidates])
    axes.set_ylim(0, max(1.0, 1.3 * axes.get_ylim()[1]))
    packed = " or packed rows" if summary.sequences_per_row == 1 else ""
    _quiet(axes, f"Positions without a token, in batches of {summary.batch_size}{packed}")
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("max_length", color=INK)
    axes.legend(loc="upper left", frameon=False, fontsize=8, labelcolor=INK, ncols=2)
