"""What this package offers to attn. Imports neither torch nor Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attn_core.plugins.hooks import Command, hookimpl

if TYPE_CHECKING:
    from attn_gateway import Cluster
    from attn_gateway.service import GrpcService


@hookimpl
def attn_services(cluster: Cluster) -> list[GrpcService]:
    """TrainingService."""
    from attn_train.service import TrainingGrpc

    return [TrainingGrpc(cluster)]


@hookimpl
def attn_commands() -> list[Command]:
    """`attn evaluate`."""
    return [
        Command(
            name="evaluate",
            summary="Measure a model that names images, tags words or guesses masked tokens.",
            target="attn_train.evaluate_command:evaluate_command",
        )
    ]
