"""Pictures of benchmark results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowpeak_bench.lm_head import Measurement

MIB = 2**20


def plot_lm_head(results: Sequence[Measurement], path: Path) -> None:
    """Plot time against memory, a panel for each shape and head, a point for each row.

    Rows without a known memory (on the CPU, or failed) have no point.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((result.shape, result.head) for result in results))
    heads = list(dict.fromkeys(head for _, head in panels))
    shapes = list(dict.fromkeys(shape for shape, _ in panels))
    figure = Figure(figsize=(5 * len(shapes), 4 * len(heads) + 1), layout="constrained")
    FigureCanvasAgg(figure)
    grid: Any = figure.subplots(len(heads), len(shapes), squeeze=False)
    names = list(dict.fromkeys(result.implementation for result in results))
    for row, head in enumerate(heads):
        for column, shape in enumerate(shapes):
            axes = grid[row][column]
            axes.set(title=f"{shape}, {head} head", xlabel="MiB above inputs and gradients")
            axes.set(ylabel="ms forward and backward", xscale="log")
            axes.grid(visible=True, alpha=0.3)
            for result in results:
                if (result.shape, result.head) == (shape, head):
                    _draw(axes, result, names.index(result.implementation))
            axes.set_ylim(bottom=0)
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=120)


def _draw(axes: Any, result: Measurement, index: int) -> None:
    if result.milliseconds is None:
        return
    if result.peak_bytes is None or result.extra_bytes is None:
        # The floor has no memory of its own worth a point: it is a line that none can cross.
        axes.axhline(result.milliseconds, color="0.5", linestyle=":", label=result.implementation)
        return
    # Below one MiB a logarithmic axis says nothing more.
    size = max(result.extra_bytes / MIB, 1.0)
    marker = "*" if result.implementation.startswith("lowpeak") else "o"
    color = f"C{index % 10}"
    axes.scatter(
        size, result.milliseconds, marker=marker, color=color, s=70, label=result.implementation
    )
