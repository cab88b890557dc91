"""The plugin hooks of this package: the in-process client and its commands. Imports no torch before a model runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attn_core import hookimpl
from attn_core.plugins.hooks import Command


@hookimpl
def attn_local_clients() -> list[Callable[[Any], Any]]:
    """The factory of clients that run models in this process."""
    return [local_client]


def local_client(engine: Any) -> Any:
    """A `LocalClient` for the models of this machine, run with the `attn_schema.EngineConfig` `engine`."""
    from attn_models.sources.progress import shown_progress
    from attn_schema.output import waiting

    from attn_engine.local_client import LocalClient

    return LocalClient(engine=engine, progress=shown_progress, waiting=waiting)


@hookimpl
def attn_commands() -> list[Command]:
    """`attn run` and `attn transcribe`."""
    return [
        Command(
            name="transcribe",
            summary="Transcribe audio files with a Whisper model on this machine.",
            target="attn_cli.commands.transcribe:transcribe_command",
        ),
        Command(
            name="run",
            summary="Fetch a model if it is not on this machine, and chat with it.",
            target="attn_cli.commands.run:run_command",
        ),
    ]
