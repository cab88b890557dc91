"""What a plugin may offer. Every hook returns a list; a plugin implements the ones it has something for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pluggy

from attn_core.kernels.base import Kernel
from attn_core.kernels.block import BlockKernel
from attn_core.kernels.linear import LinearKernel
from attn_core.mechanism import Mechanism
from attn_core.models import ModelFamily, ModelShape
from attn_core.stores import CacheFamily

PROJECT = "attn"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, kw_only=True)
class Command:
    """A subcommand of `attn`; `target` is "module:typer_app_or_function", imported when it is used."""

    name: str
    summary: str
    target: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a doctor's check found: a subject, whether it is well, and a sentence."""

    subject: str
    ok: bool
    detail: str


@hookspec
def attn_mechanisms() -> list[Mechanism]:  # type: ignore[empty-body]
    """Attention mechanisms."""


@hookspec
def attn_kernels() -> list[Kernel[Any]]:  # type: ignore[empty-body]
    """Kernels; must not import a tensor library before one runs."""


@hookspec
def attn_linears() -> list[LinearKernel]:  # type: ignore[empty-body]
    """Ways to keep and multiply the weights of linear layers; must not import a tensor library before one runs."""


@hookspec
def attn_blocks() -> list[BlockKernel]:  # type: ignore[empty-body]
    """Kernels of whole decoder blocks; must not import a tensor library before one is built."""


@hookspec
def attn_spec_layers() -> list[Callable[..., Any]]:  # type: ignore[empty-body]
    """Functions `(spec, config, inner) -> AttentionLayer` that compute any `AttentionSpec`.

    `inner` is None, or the `InnerAttention` that computes what lies between projections and output.
    """


@hookspec
def attn_caches() -> list[CacheFamily]:  # type: ignore[empty-body]
    """Stores for states."""


@hookspec
def attn_models() -> list[ModelFamily]:  # type: ignore[empty-body]
    """Model families."""


@hookspec
def attn_adapters() -> list[Any]:  # type: ignore[empty-body]
    """Layouts of checkpoints, each a `Layout` of `attn_models.adapters` by the `model_type` of its config.json."""


@hookspec
def attn_gguf_architectures() -> list[Any]:  # type: ignore[empty-body]
    """Layouts of GGUF files, each an `attn_models.weights.GgufArchitecture` by its `general.architecture`."""


@hookspec
def attn_shapes() -> list[ModelShape]:  # type: ignore[empty-body]
    """Published sizes of well-known models."""


@hookspec
def attn_commands() -> list[Command]:  # type: ignore[empty-body]
    """Subcommands of `attn`."""


@hookspec
def attn_local_clients() -> list[Callable[[Any], Any]]:  # type: ignore[empty-body]
    """Functions that open a client of this process from an `attn_schema.EngineConfig`; see `attn_client.Client`."""


@hookspec
def attn_local_stores() -> list[Callable[[], Any]]:  # type: ignore[empty-body]
    """Functions that open the store of the models of this machine; see `attn_client.commands.models`."""


@hookspec
def attn_services(cluster: Any) -> list[Any]:  # type: ignore[empty-body]
    """gRPC services for the server; `cluster` is attn-gateway's, what is returned are its `GrpcService`s."""


@hookspec
def attn_http_servers() -> list[Any]:  # type: ignore[empty-body]
    """HTTP servers in front of the gRPC services: attn-gateway's `HttpServer`s. The first is used."""


@hookspec
def attn_versions() -> list[str]:  # type: ignore[empty-body]
    """Lines of `attn --version` beside the versions; such as what of the processor is used; cheap to make."""


@hookspec
def attn_doctor_checks() -> list[Callable[[], list[Finding]]]:  # type: ignore[empty-body]
    """Checks of this machine and installation."""
