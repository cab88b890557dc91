"""The report of a comparison: a self-contained HTML page with tables and plots, and the plots as an image file."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from attn_core.errors import MissingPackage

from attn_train.comparison.plan import Question, Run
from attn_train.comparison.results import ACCURACY, LOSS, RunGroup, scaling, scaling_points, table
from attn_train.comparison.runs import Course

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1b1b1b; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; overflow-x: auto; }
th, td { text-align: right; padding: .3rem .7rem; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
svg { max-width: 100%; height: auto; } code { background: #f3f3f3; padding: .1rem .3rem; }
"""


def figure_class() -> Any:
    """Return matplotlib's `Figure`; raises `MissingPackage` if it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackage.of("attn-train[compare]", "plotting a comparison") from error
    return Figure


def picture(question: Question, groups: Sequence[RunGroup]) -> Any:
    """Plot the loss against FLOPs, seconds and KV cache bytes, and the accuracy of probes and the scaling, if any."""
    main = [group for group in groups if group.dataset == question.config.data.dataset and group.runs]
    panels = [_against_flops, _against_seconds, _against_cache]
    probed = [group for group in groups if group.interval(ACCURACY) is not None]
    columns = 2 if len(panels) + bool(probed) > 1 else 1
    count = len(panels) + bool(probed) + (len(question.sizes) > 2)
    figure = figure_class()(figsize=(13, 4.6 * -(-count // columns)), layout="constrained")
    grid = figure.subplots(-(-count // columns), columns, squeeze=False).flat
    for panel in panels:
        panel(next(grid), main)
    if probed:
        _accuracies(next(grid), probed)
    if len(question.sizes) > 2:
        _sizes(next(grid), main, question.config.data.dataset)
    for axes in grid:
        axes.set_axis_off()
    return figure


def _color(number: int) -> tuple[str, str]:
    """Return the colour and line style of a mechanism; the combinations repeat after thirty."""
    return f"C{number % 10}", ("-", "--", ":")[number // 10 % 3]


def _course(axes: Any, groups: Sequence[RunGroup], place: int, label: str) -> None:
    for number, group in enumerate(groups):
        curve = group.curve(LOSS)
        color, style = _color(number)
        x = [point[place] for point in curve]
        axes.plot(x, [i.value for *_, i in curve], color=color, linestyle=style, label=group.name)
        low, high = ([i.value + sign * i.half_width for *_, i in curve] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=color, alpha=0.12, linewidth=0)
    axes.set(xlabel=label, ylabel="validation loss, nats per token", title=f"Loss against {label}")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="x-small", ncols=2)


def _against_flops(axes: Any, groups: Sequence[RunGroup]) -> None:
    _course(axes, groups, 0, "training FLOPs")


def _against_seconds(axes: Any, groups: Sequence[RunGroup]) -> None:
    _course(axes, groups, 1, "training seconds")


def _against_cache(axes: Any, groups: Sequence[RunGroup]) -> None:
    sizes = [group.runs[0][0].price.cache_bytes for group in groups if group.interval(LOSS) is not None]
    for number, group in enumerate(groups):
        loss = group.interval(LOSS)
        if loss is not None:
            width = 0.0 if loss.half_width != loss.half_width else loss.half_width
            bytes_kept = group.runs[0][0].price.cache_bytes
            # In the right half of the logarithmic axis, the label is placed to the left of its point, where it fits.
            right = bytes_kept**2 > min(sizes) * max(sizes)
            place = {"xytext": (-6, 3), "ha": "right"} if right else {"xytext": (6, 3), "ha": "left"}
            axes.errorbar(bytes_kept, loss.value, yerr=width, fmt="o", color=_color(number)[0], capsize=3)
            axes.annotate(group.name, (bytes_kept, loss.value), textcoords="offset points", fontsize=8, **place)
    axes.set_xscale("log")
    axes.set(xlabel="bytes of KV cache or state per sequence", ylabel="validation loss, nats per token")
    axes.set_title("Loss against KV cache")
    axes.grid(visible=True, alpha=0.3)


def _accuracies(axes: Any, groups: Sequence[RunGroup]) -> None:
    datasets, names = (list(dict.fromkeys(found)) for found in zip(*((g.dataset, g.name) for g in groups), strict=True))
    height = 0.8 / len(datasets)
    for group in groups:
        accuracy = group.interval(ACCURACY)
        if accuracy is not None:
            number = datasets.index(group.dataset)
            width = 0.0 if accuracy.half_width != accuracy.half_width else accuracy.half_width
            place = names.index(group.name) + number * height
            axes.barh(place, accuracy.value, height, xerr=width, color=f"C{number}", capsize=2)
    for number, dataset in enumerate(datasets):
        axes.barh(0, 0, color=f"C{number}", label=dataset)
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(names))], names, fontsize=8)
    axes.set(xlabel="accuracy", xlim=(0, 1.05), title="Probes")
    axes.invert_yaxis()
    axes.legend(fontsize="x-small")


def _sizes(axes: Any, groups: Sequence[RunGroup], dataset: str) -> None:
    for number, label in enumerate(dict.fromkeys(group.label for group in groups)):
        points = sorted(scaling_points(groups, label, dataset))
        color, style = _color(number)
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, color=color, linestyle=style, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set(xlabel="non-embedding parameters", ylabel="validation loss", title="Loss against size")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(fontsize="x-small")


def png(figure: Any) -> bytes:
    """Return the figure as PNG."""
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=110)
    return target.getvalue()


def page(question: Question, groups: Sequence[RunGroup], figure: Any, command: str) -> str:
    """Return one HTML page that needs no other files and no network."""
    target = io.StringIO()
    figure.savefig(target, format="svg")
    drawn = target.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    fits = scaling(question, groups)
    introduction = (
        f"<p>Budget of every run: <b>{escape(str(question.budget))}</b>; {question.seeds} seeds; data: "
        f"{escape(', '.join(question.datasets()))}. Intervals are 95 % confidence intervals (Student's t) over seeds. "
        "FLOPs count the matrix products of forward and backward passes, for attention only the pairs that the mask "
        "allows.</p>"
    )
    parts = [
        f"<h1>{escape(question.title)}</h1>",
        introduction,
        html_table(table(question, groups)),
        drawn,
        *(["<h2>Scaling</h2>", html_table(fits)] if fits else []),
        f"<h2>Command</h2><p><code>{escape(command)}</code></p>",
        "<h2>Models</h2>",
        html_table([_model(*run) for group in groups for run in group.runs]),
    ]
    failures = [failure for group in groups for failure in group.failures]
    if failures:
        parts += ["<h2>Failed</h2>", "<ul>", *(f"<li>{escape(failure)}</li>" for failure in failures), "</ul>"]
    head = f'<meta charset="utf-8"><title>{escape(question.title)}</title><style>{STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _model(run: Run, course: Course) -> dict[str, str]:
    return {"run": run.id, "model": course.model_path, "serve it with": f"attn models load {run.id}"}


def html_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as an HTML table with a column for each key."""
    if not rows:
        return "<p>none</p>"
    keys = list(dict.fromkeys(key for row in rows for key in row))
    head = "".join(f"<th>{escape(key)}</th>" for key in keys)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(row.get(key, '')))}</td>" for key in keys) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
