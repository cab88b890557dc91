"""`attn run`: downloads a model of a hub, or a known one, if necessary, and starts a conversation with it."""

from __future__ import annotations

from typing import Annotated

import typer
from attn_schema import ChatMessage, EngineConfig, SamplingParams
from attn_schema.flags import with_flags

from attn_cli.commands.chat import Keeper, talk
from attn_cli.commands.options import Images, here, read_images
from attn_cli.conversations import ConversationStore


@with_flags
def run_command(
    *,
    model: Annotated[
        str,
        typer.Argument(
            metavar="NAME|OWNER/REPO|PATH",
            help="A model on this machine, the package index or a hub, or a folder or GGUF file.",
        ),
    ],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit; by default main.")] = None,
    file: Annotated[str | None, typer.Option(help="The GGUF file of a repository that has several.")] = None,
    system: Annotated[str | None, typer.Option(help="System message before the conversation.")] = None,
    image: Images = None,
    sampling: SamplingParams,
    engine: EngineConfig,
) -> None:
    """Download a model if it is not on this machine, like `attn pull`, and chat with it, like `attn chat`.

    Examples: `attn run smollm2-135m-instruct`, `attn run HuggingFaceTB/SmolLM2-135M-Instruct`, `attn run ./model.gguf`
    """
    images = read_images(image or ())  # before a model is downloaded, so that a wrong file is reported at once
    before = [ChatMessage(role="system", content=system)] if system else []
    with here(engine) as writer:
        writer.fetch(model, revision=revision, file=file)
        keeper = Keeper(ConversationStore(), model, None, served=False)
        talk(writer, model, sampling, before, keeper, images=images)
