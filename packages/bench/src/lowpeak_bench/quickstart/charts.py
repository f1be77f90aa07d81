"""Pictures of live memory over a step, both sides in one chart."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

from lowpeak_bench.quickstart.compare import Comparison
from lowpeak_bench.quickstart.settings import SIDE_NAMES

MIB = 2**20
COLORS = {"trl": "#b5541c", "lowpeak": "#1f5fa8"}


def draw_memory(comparison: Comparison) -> Any:
    """Return a figure: live MiB over the seconds of the last step of both sides."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    highest = 0.0
    for side, result in (("trl", comparison.stock), ("lowpeak", comparison.ours)):
        step = result["steps"][-1]
        seconds = [point[0] for point in step["timeline"]]
        live = [point[1] / MIB for point in step["timeline"]]
        peak = step["peak_bytes"] / MIB
        highest = max(highest, peak)
        label = f"{SIDE_NAMES[side]}, peak {peak:,.0f} MiB"
        axes.fill_between(seconds, live, step="post", alpha=0.15, color=COLORS[side], linewidth=0)
        axes.step(seconds, live, where="post", color=COLORS[side], linewidth=1.1, label=label)
        axes.axhline(peak, color=COLORS[side], linewidth=0.8, linestyle=":")
        _mark_optimizer(axes, step, COLORS[side])
    state = comparison.stock["steps"][-1]["state_bytes"] / MIB
    axes.axhline(state, color="0.35", linewidth=1, linestyle="--")
    axes.annotate(
        f"weights and optimizer state, {state:,.0f} MiB",
        (0.01, state),
        xycoords=("axes fraction", "data"),
        xytext=(0, -4),
        textcoords="offset points",
        horizontalalignment="left",
        verticalalignment="top",
        fontsize=8,
        color="0.25",
    )
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.06 * highest)
    axes.set_xlabel("time since the start of the step (s)")
    axes.set_ylabel("live memory (MiB)")
    number = len(comparison.stock["steps"])
    axes.set_title(f"{comparison.trainer.upper()}, step {number}", loc="left")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    return figure


def _mark_optimizer(axes: Any, step: Mapping[str, Any], color: str) -> None:
    """Mark on the time axis where the backward ended."""
    axes.annotate(
        "optimizer",
        (step["backward_seconds"], 0),
        xytext=(step["backward_seconds"], 0.07),
        textcoords=("data", "axes fraction"),
        arrowprops={"arrowstyle": "->", "color": color},
        horizontalalignment="center",
        fontsize=8,
        color=color,
    )


def as_data_uri(figure: Any) -> str:
    """Return a figure as a data URI of an SVG picture, for a page that needs no other file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
