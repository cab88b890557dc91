"""The subcommands of attn-cli itself, registered as any plugin's are."""

from __future__ import annotations

from attn_core.plugins.hooks import Command, hookimpl

COMMANDS = {
    "list": "List mechanisms, kernels, caches, models, shapes or plugins.",
    "show": "Show a mechanism: equation, paper, state, price, kernels, picture.",
    "compare": "Compare what mechanisms cost and remember as sequences grow.",
    "cost": "Price attention at the size of a known model.",
    "explain": "Say which kernel computes a mechanism, and why the others refuse.",
    "check": "Check a mechanism against the laws of attention.",
    "plugins": "List plugins, and why one did not load.",
    "doctor": "Check this machine and installation.",
}


@hookimpl
def attn_commands() -> list[Command]:
    """The commands that need only the contract."""
    return [
        Command(name=name, summary=summary, target=f"attn_cli.commands.{name}:{name}_command")
        for name, summary in COMMANDS.items()
    ]
