"""Pictures of measurements; needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tierzero.profiling.compare import Row


def draw_comparison(rows: Sequence[Row], path: Path) -> None:
    """Step time and peak memory of every system, as bars, with the ratio to the first beside each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 0.5 * len(rows) + 1.5), sharey=True, layout="constrained")
    names = [row.name for row in rows]
    for axis, title, values in (
        (axes[0], "step time, s", [row.step_s for row in rows]),
        (axes[1], "peak memory, GB", [row.peak_rss / 1e9 for row in rows]),
    ):
        bars = axis.barh(names, values, color=["#888888" if not n.startswith("tierzero") else "#2266aa" for n in names])
        axis.bar_label(bars, [f"{value / values[0]:.2f} x" for value in values], padding=3)
        axis.set_title(title)
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
