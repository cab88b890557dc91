"""Reproductions of published claims about attention on a laptop, and explanations of model outputs.

This module is imported to list the commands, so torch is only imported when one runs.
"""

from __future__ import annotations

from attn_core.plugins.hooks import Command, hookimpl

COMMANDS = {
    "reproduce": ("Measure a claim of the literature on this machine.", "reproduce:reproduce_command"),
    "attribute": ("Show which tokens an output depends on.", "attribution.command:attribute_command"),
    "roofline": ("Bounds of attention on a known GPU, calculated.", "machine:roofline_command"),
    "worked": ("Compute a small example of a mechanism, number by number.", "worked.command:worked_command"),
    "energy": ("GPU hours and energy of training, calculated.", "machine:energy_command"),
}
"""The summary and the function of each command."""


@hookimpl
def attn_commands() -> list[Command]:
    """The commands of this package."""
    return [
        Command(name=name, summary=summary, target=f"attn_experiments.{target}")
        for name, (summary, target) in COMMANDS.items()
    ]
