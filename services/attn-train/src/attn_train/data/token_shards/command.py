"""The commands `attn data prepare` and `attn data show`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from attn_core.errors import InvalidValue
from attn_models.sources.store import ModelStore
from attn_models.tokenizers import Tokenizer
from attn_models.vision_language.prompts import TileTexts
from attn_schema.cores import usable_cores
from attn_schema.flags import with_flags
from attn_schema.output import Json, note, print_json
from attn_schema.prepared import PrepareConfig, ShowConfig

from attn_train.data.pictures import ALONE, tiles_in
from attn_train.data.preview import EXAMPLES, Preview, preview, shown
from attn_train.data.token_shards.pools import inline, processes, ray_tasks
from attn_train.data.token_shards.prepare import Pool, Progress, Request, prepare
from attn_train.data.token_shards.shards import MANIFEST, TRAIN, VALIDATION, PreparedData
from attn_train.tasks.seq2seq import is_byte_pairs

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Prepare training data that does not fit into memory, and inspect it.",
)

LINE_SECONDS = 10.0
"""Interval between lines of progress."""


@app.command("prepare")
@with_flags(top="preparation")
def prepare_command(
    *,
    data: Annotated[
        list[str], typer.Argument(help="Files, folders or glob patterns: text, JSON lines, Parquet, Arrow.")
    ],
    preparation: PrepareConfig,
    out: Annotated[
        Path, typer.Option("--out", "-O", help="Output folder: new, empty, or that of an interrupted preparation.")
    ],
    workers: Annotated[int, typer.Option(min=0, help="Number of processes; 0 means one per CPU.")] = 0,
    use_ray: Annotated[
        bool, typer.Option("--ray", help="Use the Ray cluster at RAY_ADDRESS, whose machines must share the folder.")
    ] = False,
    json: Json = False,
) -> None:
    """Tokenize data once, in parallel, into shards that training reads from disk in constant memory.

    Examples: `attn data prepare corpus/ --tokenizer smollm2-135m-instruct --out tokens --validation held-out.txt`,
    `attn data prepare 'web/*.jsonl.zst' --columns text=content --tokenizer byte_pairs:32000 --out web`. Repeat a
    command to resume a preparation that was interrupted. Then: `attn train --data tokens`,
    `attn train --data web:7,books:3`.
    """
    named = preparation.tokenizer
    if not named:
        raise InvalidValue.of(
            "tokenizer", "", "the name of a model on this machine, a folder with a tokenizer.json, or byte_pairs:N"
        )
    kept = is_byte_pairs(named) or (Path(named).expanduser() / "tokenizer.json").is_file()
    tokenizer = named if kept else str(ModelStore().find(named))
    request = Request(data, preparation.replace(tokenizer=tokenizer), _sets(preparation.validation))
    count = workers or usable_cores()
    pool: Pool = ray_tasks if use_ray else (inline if count == 1 else processes)
    began = time.monotonic()
    prepared = prepare(request, out, workers=count, pool=pool, progress=_progress(began))
    _show(prepared, json=json, seconds=time.monotonic() - began)


@app.command("show")
@with_flags
def show_command(
    *,
    data: Annotated[Path, typer.Argument(help="A folder of prepared data; or a file or folder of rows or text.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Verify the SHA-256 of every file of prepared data against the manifest.")
    ] = False,
    documents: Annotated[
        int, typer.Option(min=0, help="Number of sequences whose beginnings are printed, of prepared data.")
    ] = 0,
    json: Json = False,
    showing: ShowConfig,
) -> None:
    """Show what data holds: of prepared data its sets, shards and vocabulary; of other files the shape that is found,
    its columns, lengths, and the first examples with what is learned of them.

    Examples: `attn data show tokens --verify --documents 3`, `attn data show chats.jsonl --tokenizer
    smollm2-135m-instruct`, `attn data show qa.csv --columns prompt=question,completion=answer`.
    """
    if not (data / MANIFEST).is_file():
        found = preview(str(data), showing, *(_opened(showing.tokenizer) if showing.tokenizer else (None, ALONE)))
        _show_rows(data, found, showing.max_seq_len, json=json)
        return
    prepared = PreparedData.open(data, verify=verify)
    _show(prepared, json=json, seconds=None)
    training = prepared.set(TRAIN)
    for number in range(min(documents, training.records)):
        for window in training.record(number):
            typer.echo(f"{number}: {prepared.tokenizer.decode(window.ids[:64].tolist(), skip_special=False)!r}")


def _show_rows(path: Path, found: Preview, max_seq_len: int, *, json: bool) -> None:
    facts = found.facts(max_seq_len or None)
    if json:
        print_json(facts)
        return
    shapes = ", ".join(f"{count} {name}" for name, count in facts["shapes"].items())
    aside = ", ".join(facts["left_aside"]) or "none"
    typer.echo(f"{path}: {facts['format']}, of the first {facts['rows']} rows {shapes or 'none'}")
    typer.echo(f"columns: {', '.join(facts['columns'])}; left aside: {aside}")
    for remark, count in facts["remarks"].items():
        typer.echo(f"{count} {remark}")
    if facts["first_broken"]:
        typer.echo(f"the first of them: {facts['first_broken']}")
    lengths = ", ".join(f"{name} {length}" for name, length in facts["lengths"].items())
    typer.echo(f"{facts['unit']} of a sequence: {lengths or 'none'}; {facts['learned']:.0%} of them are learned")
    if "too_long" in facts:
        typer.echo(f"{facts['too_long']} sequences are longer than {max_seq_len} tokens, and not trained on")
    for number, example in enumerate(found.examples[:EXAMPLES], start=1):
        for pieces in example:
            typer.echo(f"{number}: {shown(pieces, tokenized=found.tokenized)}")


def _opened(named: str) -> tuple[Tokenizer, TileTexts | str]:
    """A tokenizer, and what encodes images for its model."""
    folder = Path(named).expanduser()
    folder = folder if (folder / "tokenizer.json").is_file() else ModelStore().find(named)
    tokenizer = Tokenizer.from_folder(folder)
    return tokenizer, tiles_in(folder, tokenizer)


def _sets(given: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for text in given:
        name, separator, files = text.partition("=")
        if separator and not files:
            raise InvalidValue.of("validation", text, "FILES or NAME=FILES")
        found.setdefault(name if separator else VALIDATION, []).append(files if separator else text)
    return found


def _progress(began: float) -> Progress:
    printed_at = [began]

    def print_progress(done: int, units: int, tokens: int) -> None:  # noqa: ARG001 - part of `Progress`
        now = time.monotonic()
        if now - printed_at[0] > LINE_SECONDS:
            printed_at[0] = now
            note(f"{done} of {units} parts after {now - began:.0f} s")

    return print_progress


def _facts(prepared: PreparedData) -> dict[str, Any]:
    manifest = prepared.manifest
    notes: Counter[str] = sum((Counter(shard.notes) for each in manifest.sets.values() for shard in each), Counter())
    sets = {
        name: {
            "tokens": prepared.set(name).tokens,
            "records": prepared.set(name).records,
            "shards": len(shards),
            "bytes": sum(file.size for shard in shards for file in shard.files.values()),
        }
        for name, shards in manifest.sets.items()
    }
    return {
        "kind": manifest.kind,
        "vocab_size": manifest.vocab_size,
        "tokenizer_sha256": manifest.tokenizer_sha256,
        "dtype": manifest.dtype,
        "columns": list(manifest.columns),
        "remarks": dict(notes),
        "sources": len(manifest.sources),
        "source_bytes": sum(source.size for source in manifest.sources),
        "sets": sets,
    }


def _show(prepared: PreparedData, *, json: bool, seconds: float | None) -> None:
    facts = _facts(prepared)
    if json:
        print_json(facts | ({} if seconds is None else {"seconds": round(seconds, 3)}))
        return
    typer.echo(f"{prepared.folder}: {facts['kind']} of {facts['sources']} files, {facts['source_bytes']} bytes")
    typer.echo(f"vocabulary of {facts['vocab_size']} tokens, {facts['tokenizer_sha256'][:12]}, as {facts['dtype']}")
    for name, counts in facts["sets"].items():
        typer.echo(f"{name}: {counts['tokens']} tokens, {counts['records']} records in {counts['shards']} shards")
    for remark, count in facts["remarks"].items():
        typer.echo(f"{count} rows {remark}")
    if seconds is not None:
        typer.echo(f"{seconds:.1f} s, {facts['source_bytes'] / max(seconds, 1e-9) / 1e6:.1f} MB/s")
