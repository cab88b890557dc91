"""The performance targets ("bars"): the minimum and the aim of every ratio, and whether measurements meet them.

python benchmarks/gpu/bars.py benchmarks/results/h200-DATE.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
LONG, VERY_LONG = 4096, 8192
BIG = 256 << 20
"""The size of a cache, in bytes, above which the time is dominated by reading it."""


def any_row(row: Row) -> bool:  # noqa: ARG001 -- any
    """Select every row of a part."""
    return True


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A target for the value `key` of the rows of `parts` that `where` selects: the worst must be at least `least`."""

    what: str
    parts: tuple[str, ...]
    key: str
    least: float
    aim: float
    where: Callable[[Row], bool] = any_row

    def found(self, rows: Iterable[Row]) -> dict[str, float]:
        """The measured values, by case."""
        own = (row for row in rows if row.get("part") in self.parts and isinstance(row.get(self.key), int | float))
        return {row["case"]: row[self.key] for row in own if self.where(row)}

    def refusals(self, rows: Iterable[Row]) -> list[str]:
        """The reasons why cases were not measured."""
        reasons = []
        for row in rows:
            said = row.get("refused") or row.get("stopped")
            if said and row.get("part") in self.parts and ("stopped" in row or self.where(row)):
                reasons.append(f"{row.get('case', row['part'])}: {said}")
        return reasons

    def verdict(self, rows: list[Row]) -> Row:
        """The row with the worst and best values and whether the target is met; or why nothing was measured."""
        found, said = self.found(rows), self.refusals(rows)
        row = {"bar": self.what, "least": self.least, "aim": self.aim, "cases": found, "not_measured": said}
        if not found:
            return {**row, "met": None}
        worst = min(found.values())
        met = "aim" if worst >= self.aim else "least" if worst >= self.least else "no"
        return {**row, "worst": worst, "best": max(found.values()), "met": met}


def beside(name: str, *, mask: str | None = None, least: int = 0) -> Callable[[Row], bool]:
    """A selector of the rows compared with a peer, with this mask and at least this length."""

    def picks(row: Row) -> bool:
        long = row.get("length", 0) >= least
        return row.get("beside") == name and long and mask in {None, row.get("mask")}

    return picks


def decoded(row: Row) -> bool:
    """Whether a row is of a decode step over a large, unquantised cache, without a tree."""
    return row.get("rows") == "plain" and not row.get("tree") and row.get("cache_bytes", 0) >= BIG


def decoded_by_latents(row: Row) -> bool:
    """Whether a row is of a decode step over latents (MLA) with 16 to 32 heads."""
    return row.get("rows") == "latents" and 16 <= row.get("heads", 0) <= 32


def of_8b(batch: int) -> Callable[[Row], bool]:
    """A selector of attn's engine with the model of 8B at a batch size."""
    return lambda row: row.get("system") == "attn" and row.get("case") == f"8B, batch {batch}"


def fails(row: Row) -> bool:
    """Whether a row is a failure of attn's: what is not measured, wrong, or refused; peers may refuse."""
    ours = row.get("system", "attn") == "attn" and not row.get("beside")
    return "stopped" in row or row.get("right") is False or bool(row.get("errors")) or ("refused" in row and ours)


FLA = ("beside_fla.constant", "beside_fla.by_head", "beside_fla.by_channel")
BARS = (
    Bar(
        what="forward, full, size 128, from 4096 on, beside cuDNN",
        parts=("attention.tables",),
        key="forward",
        least=0.72,
        aim=0.95,
        where=beside("cudnn", mask="full", least=LONG),
    ),
    Bar(
        what="forward, full and causal, from 4096 on, beside torch's default",
        parts=("attention.tables",),
        key="forward",
        least=1.35,
        aim=1.7,
        where=beside("default", least=LONG),
    ),
    Bar(
        what="forward, causal, from 8192 on, beside cuDNN",
        parts=("attention.tables",),
        key="forward",
        least=0.68,
        aim=0.85,
        where=beside("cudnn", mask="causal", least=VERY_LONG),
    ),
    Bar(
        what="backward, full and causal, from 4096 on, beside cuDNN",
        parts=("attention.tables",),
        key="backward",
        least=0.60,
        aim=0.80,
        where=beside("cudnn", least=LONG),
    ),
    *(
        Bar(
            what=f"{way}, masks, beside compiled FlexAttention",
            parts=("sparse.tables",),
            key=way,
            least=1.0,
            aim=1.2,
            where=beside("flex"),
        )
        for way in ("forward", "backward")
    ),
    *(
        Bar(
            what=f"{way}, windows and sparse blocks, each kept block beside own dense",
            parts=("sparse.kept",),
            key=way,
            least=0.75,
            aim=0.90,
            where=beside("own dense, by block"),
        )
        for way in ("forward", "backward")
    ),
    *(
        Bar(
            what=f"{way}, packed texts beside equal padded work",
            parts=("texts.tables",),
            key=way,
            least=0.90,
            aim=0.97,
            where=beside("padded rows"),
        )
        for way in ("forward", "backward")
    ),
    Bar(
        what="paged decoding over 256 MB and more, share of copying",
        parts=("decoding.tables",),
        key="share_of_copy",
        least=0.75,
        aim=0.90,
        where=decoded,
    ),
    Bar(
        what="MLA decoding, 16 to 32 heads, share of copying",
        parts=("decoding.tables",),
        key="share_of_copy",
        least=0.45,
        aim=0.70,
        where=decoded_by_latents,
    ),
    *(
        Bar(
            what=f"{way}, chunked recurrences, beside fla-core",
            parts=FLA,
            key=way,
            least=1.0,
            aim=1.3,
            where=beside("fla"),
        )
        for way in ("forward", "backward")
    ),
    Bar(
        what="decoding of recurrences, share of copying",
        parts=("recurrences.tables",),
        key="share_of_copy",
        least=0.5,
        aim=0.8,
    ),
    Bar(
        what="a training step of GPT-2 small, beside the plain computation",
        parts=("training_step.tables",),
        key="times_ours",
        least=3.0,
        aim=3.5,
        where=lambda row: row.get("way") == "plain",
    ),
    Bar(
        what="a training step of GPT-2 small, beside torch's attention",
        parts=("training_step.tables",),
        key="times_ours",
        least=1.0,
        aim=1.1,
        where=lambda row: row.get("way") == "torch",
    ),
    *(
        Bar(
            what=f"decoding with 8B at batch {batch}, share of copying",
            parts=("engine_gpu.tables",),
            key="share_of_copy",
            least=least,
            aim=aim,
            where=of_8b(batch),
        )
        for batch, least, aim in ((1, 0.71, 0.85), (64, 0.60, 0.80))
    ),
    Bar(
        what="an update of attn train, compiled blocks, beside plain torch compiled",
        parts=("train_gpu.tables",),
        key="beside_compiled",
        least=1.0,
        aim=1.1,
        where=lambda row: row.get("way") == "attn, compiled blocks",
    ),
    Bar(
        what="steps with prompts, recorded, beside eager ones",
        parts=("prompt_steps.tables",),
        key="eager_over_recorded",
        least=1.0,
        aim=1.2,
    ),
    Bar(
        what="int8, int4 and FP8 weights, one row, beside torch in bfloat16",
        parts=("packed_weights.tables",),
        key="forward",
        least=1.0,
        aim=1.5,
        where=lambda row: ", 1 rows," in row.get("case", ""),
    ),
    Bar(
        what="decode steps of recurrences in place, share of copying",
        parts=("recurrent_steps.tables",),
        key="share_of_copy",
        least=0.5,
        aim=0.8,
    ),
    Bar(
        what="memory of both passes grows as the length, 1k to 64k (1: just so)",
        parts=("growth.tables",),
        key="as_linear",
        least=0.95,
        aim=0.99,
    ),
)


def verdicts(rows: list[Row]) -> Iterator[Row]:
    """The verdicts on all targets."""
    return (bar.verdict(rows) for bar in BARS)


SAID = {"aim": "the aim is met", "least": "met", "no": "MISSED", None: "not measured"}


def table(rows: list[Row]) -> str:
    """The verdicts as text, with wrong results, stopped parts and errors found by compute-sanitizer."""
    lines = [f"{'bar':<78} {'least':>6} {'aim':>6} {'worst':>7} {'best':>7}"]
    for row in (row for row in rows if "bar" in row):
        numbers = [f"{row[key]:7.2f}" if key in row else f"{'-':>7}" for key in ("worst", "best")]
        said = SAID[row["met"]] + (", as far as it was measured" if row["met"] and row["not_measured"] else "")
        lines.append(f"{row['bar']:<78} {row['least']:6.2f} {row['aim']:6.2f} {' '.join(numbers)}  {said}")
        lines += [f"    {said}" for said in row["not_measured"]]
    judged = [row for row in rows if "right" in row]
    wrong = [row for row in judged if not row["right"]]
    lines.append(f"{len(judged) - len(wrong)} of {len(judged)} results are right")
    lines += [f"    WRONG {row['part']}: {row['case']}, {row['what']}: {row['error']}" for row in wrong]
    lines += [f"    {row['part']}: {row['stopped']}" for row in rows if "stopped" in row]
    lines += [f"    {row['part']}: {row.get('case')}: {row['refused']}" for row in rows if "refused" in row]
    lines += [
        f"    compute-sanitizer, {row['case']}: {row.get('why') or row['errors']}" for row in rows if "errors" in row
    ]
    return "\n".join(lines)


def main() -> None:
    """Print the table of a result file, with the verdicts computed again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    rows = [row for row in json.loads(parser.parse_args().result.read_text())["rows"] if "bar" not in row]
    print(table([*rows, *verdicts(rows)]))


if __name__ == "__main__":
    main()
