"""The attn plugin of the client: the commands of attn-cli that it makes possible, those that call a server."""

from __future__ import annotations

from attn_core.plugins.hooks import Command, hookimpl

COMMANDS = {
    "generate": ("Generate text with a server's model or one that runs here.", "generate:generate_command"),
    "chat": ("Talk with a model, here or on a server.", "chat:chat_command"),
    "translate": ("Translate with an encoder-decoder model, and measure BLEU.", "translate:translate_command"),
    "embed": ("Embed texts and compare them.", "embed:embed_command"),
    "score": ("Rank texts by their probability.", "embed:score_command"),
    "train": ("Train a model on the server and watch it.", "train:train_command"),
    "jobs": ("List, show, watch, cancel and resume training jobs.", "jobs:app"),
    "models": ("List, load and unload the models of a server; list and remove those of this machine.", "models:app"),
    "bench": ("Measure the throughput and latency of a server.", "bench:app"),
    "top": ("Watch the models, requests and jobs of a server.", "top:top_command"),
    "map": ("Draw the attention weights of a sentence.", "map:map_command"),
}


@hookimpl
def attn_commands() -> list[Command]:
    """The commands that need this package; attn-cli imports each when it is used."""
    return [
        Command(name=name, summary=summary, target=f"attn_cli.commands.{target}")
        for name, (summary, target) in COMMANDS.items()
    ]
