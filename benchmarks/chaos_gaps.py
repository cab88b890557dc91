"""Draw the gaps in streams while replicas were killed: `python benchmarks/chaos_gaps.py REPORT PICTURE`.

The report is written by `ATTN_CHAOS_REPORT=FILE nox -s cluster`. Each point is a request: its start time, and the
largest time between two of its messages. Vertical lines mark kills.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

BAR = 1.5
"""The limit for the 95th percentile of the requests' largest gaps, in seconds."""


def main(report: Path, picture: Path) -> None:
    """Draw the report as a picture."""
    found = json.loads(report.read_text())
    figure, axes = plt.subplots(figsize=(10, 4))
    for at in found["killed [s]"]:
        axes.axvline(at, color="0.85", linewidth=1, zorder=0)
    begun, gaps = zip(*found["began [s], largest gap [s]"], strict=True)
    axes.scatter(begun, gaps, s=3, linewidths=0)
    axes.axhline(found["gap p95 of all [s]"], color="tab:green", linewidth=1, label="p95")
    axes.axhline(BAR, color="tab:red", linewidth=1, linestyle="--", label=f"bar for p95, {BAR} s")
    axes.set(yscale="log", xlabel="request began [s]", ylabel="largest gap between its messages [s]")
    axes.set_title(
        f"{found['requests']} requests in {found['streams']} streams, {found['kills']} kills of {found['replicas']} "
        f"replicas, {found['resumed']} resumed, {sum(found['lost, doubled or different'].values())} lost or different"
    )
    axes.legend(loc="upper right")
    figure.tight_layout()
    figure.savefig(picture, dpi=100)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
