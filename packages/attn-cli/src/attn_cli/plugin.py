"""The subcommands of attn-cli itself, registered like those of any plugin."""

from __future__ import annotations

from attn_core.plugins.hooks import Command, hookimpl

COMMANDS = {
    "installation": {
        "list": "List mechanisms, kernels, models, recipes, datasets and whatever else is installed.",
        "plugins": "List plugins, with the reason if one did not load.",
        "doctor": "Check this machine and installation.",
    },
    "mechanisms": {
        "show": "Show a mechanism: equation, paper, state, costs, kernels, picture.",
        "explain": "Show which kernel computes a mechanism, and why the others refuse.",
        "check": "Check a mechanism against the laws of attention.",
    },
    "conformance": {"conformance": "Check attention of other packages against the laws of attention."},
    "costs": {
        "compare": "Compare the compute and memory of mechanisms as sequences grow.",
        "cost": "Compute and memory of attention at the size of a known model.",
    },
}
"""The name and summary of each subcommand, by the module of `attn_cli.commands` with its function."""
TARGETS = {"compare": "compare_app"}
"""The targets of subcommands that are not plain functions."""


@hookimpl
def attn_commands() -> list[Command]:
    """The commands that need only the contract, attn-core."""
    return [
        Command(name=name, summary=summary, target=f"attn_cli.commands.{module}:{TARGETS.get(name, f'{name}_command')}")
        for module, commands in COMMANDS.items()
        for name, summary in commands.items()
    ]
