"""The hooks of plugins. Every hook returns a list of items; a plugin implements those for which it has items."""

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
    """A subcommand of `attn`; `target` is "module:typer_app_or_function", imported when the command is used."""

    name: str
    summary: str
    target: str


@dataclass(frozen=True, kw_only=True)
class NamedDataset:
    """Data that `attn train --dataset NAME` finds by its name; `kind` is text, pairs or images."""

    name: str
    kind: str
    summary: str


@dataclass(frozen=True, kw_only=True)
class Reward:
    """A reward of completions, for training by GRPO; `target` is "module:function", imported when it is used.

    The function is called with those of its parameters by name: `completions`, a list of texts; `completion_ids`, their
    token ids; `prompts`, the prompts as the dataset has them; others are columns of the dataset, a list each, which it
    must have unless the parameter has a default. It returns a list of numbers, None where it does not apply.
    """

    name: str
    summary: str
    target: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of a check of `attn doctor`: what was checked, whether it is fine, and an explanation."""

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
    """Kernels that pack and multiply the weights of linear layers; must not import a tensor library before one runs."""


@hookspec
def attn_blocks() -> list[BlockKernel]:  # type: ignore[empty-body]
    """Kernels of whole decoder blocks; must not import a tensor library before one is built."""


@hookspec
def attn_spec_layers() -> list[Callable[..., Any]]:  # type: ignore[empty-body]
    """Functions `(spec, config, inner) -> AttentionLayer` that compute any `AttentionSpec`.

    `inner` is None, or the `InnerAttention` between the input projections and the output projection.
    """


@hookspec
def attn_caches() -> list[CacheFamily]:  # type: ignore[empty-body]
    """Cache families, which create state stores."""


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
    """Functions that open the store of the models of this machine; see `attn_cli.commands.models`."""


@hookspec
def attn_datasets() -> list[NamedDataset]:  # type: ignore[empty-body]
    """Datasets for training that have a name."""


@hookspec
def attn_rewards() -> list[Reward]:  # type: ignore[empty-body]
    """Rewards of completions, which `attn train --reward-funcs NAME` names."""


@hookspec
def attn_services(cluster: Any) -> list[Any]:  # type: ignore[empty-body]
    """Services for the server: `Service`s of attn-gateway, for the `cluster`, which is its `Cluster`."""


@hookspec
def attn_http_servers() -> list[Any]:  # type: ignore[empty-body]
    """HTTP servers in front of the gRPC services: attn-gateway's `HttpServer`s. The first is used."""


@hookspec
def attn_versions() -> list[str]:  # type: ignore[empty-body]
    """Further lines for `attn --version`, such as the processor features in use; must be cheap to compute."""


@hookspec
def attn_doctor_checks() -> list[Callable[[], list[Finding]]]:  # type: ignore[empty-body]
    """Checks of this machine and installation, for `attn doctor`."""
