"""`attn transcribe`: speech to text with a Whisper model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from attn_schema import DeviceConfig, EngineConfig
from attn_schema.flags import with_flags
from attn_schema.output import Json, print_json

from attn_cli.commands.options import here


@with_flags
def transcribe_command(
    *,
    files: Annotated[list[Path], typer.Argument(metavar="FILE.wav...", help="WAV files, 16000 samples per second.")],
    model: Annotated[
        str, typer.Option("--model", "-m", help="The Whisper model: its name on this machine, or a folder.")
    ],
    language: Annotated[
        str | None,
        typer.Option(help="Spoken language, such as en; by default the model's setting, or detected."),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="transcribe, or translate (into English); by default the model's setting.")
    ] = None,
    json: Json = False,
    engine: DeviceConfig,
) -> None:
    """Transcribe the speech in WAV files with a Whisper model on this machine.

    Audio longer than the model's input, 30 s, is transcribed in segments, independently of each other. Convert other
    files first: `ffmpeg -i talk.mp3 -ar 16000 talk.wav`.

    Example: `attn transcribe --model whisper-tiny talk.wav`
    """
    with here(EngineConfig(dtype=engine.dtype, device=engine.device)) as client:
        for file, text in zip(files, client.transcribe(model, files, language=language, task=task), strict=True):
            if json:
                print_json({"file": str(file), "text": text})
            else:
                typer.echo(text if len(files) == 1 else f"{file}: {text}")
