"""Descriptions of the models and attention mechanisms that a server offers."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType

from attn_schema.schema import Schema


class ModelState(StrEnum):
    """The lifecycle state of a model. UNKNOWN: not known to this version."""

    UNKNOWN = "unknown"
    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"
    SLEEPING = "sleeping"
    FAILED = "failed"


class ModelInfo(Schema, frozen=True, kw_only=True):
    """A model on a server; the sizes are 0 until it is loaded."""

    name: Annotated[str, Meta(description="Name that requests use.")] = ""
    source: Annotated[
        str, Meta(description="What it was loaded from: a folder, a registered name or a training job.")
    ] = ""  # fmt: skip
    architecture: Annotated[str, Meta(description="Model family, such as decoder.")] = ""
    mechanisms: Annotated[tuple[str, ...], Meta(description="Mechanisms of its attention layers, each once.")] = ()
    num_parameters: Annotated[int, Meta(description="Number of parameters, tied ones counted once.")] = 0
    max_seq_len: Annotated[int, Meta(description="Maximum length of prompt and completion together, in tokens.")] = 0
    vocab_size: Annotated[int, Meta(description="Number of token ids.")] = 0
    num_layers: Annotated[int, Meta(description="Attention layers.")] = 0
    num_heads: Annotated[int, Meta(description="Query heads of a layer.")] = 0
    dtype: Annotated[str, Meta(description="Element type of the computation.")] = ""
    quantization: Annotated[str, Meta(description="Storage of the weights of its linear layers.")] = ""
    device: Annotated[str, Meta(description="Device that runs the model.")] = ""
    chat: Annotated[bool, Meta(description="Whether it has a chat template.")] = False
    base_model: Annotated[
        str, Meta(description="For an adapter, the loaded base model that it is applied to; else empty.")
    ] = ""
    state: Annotated[ModelState, Meta(description="Lifecycle state of the model.")] = ModelState.UNKNOWN
    state_detail: Annotated[
        str, Meta(description="Reason for the state, such as a load error; empty while it is serving.")
    ] = ""
    load_time: Annotated[datetime, Meta(description="When loading began.")] | None = None
    note: Annotated[
        str, Meta(description="Engine options that this model does not support, such as tree speculation; empty if "
        "none.")
    ] = ""  # fmt: skip
    replicas: Annotated[int, Meta(description="Number of engines that are serving it.")] = 0
    recommended_sampling: Annotated[
        dict[str, float], Meta(description="What its generation_config.json recommends: the defaults of requests.")
    ] = {}  # noqa: RUF012 - msgspec copies it
    max_encoder_len: Annotated[
        int, Meta(description="Maximum length of an encoder's input, in tokens; 0 for a model that reads none beside "
        "its prompt.")
    ] = 0  # fmt: skip


class Paper(Schema, frozen=True, kw_only=True):
    """The publication that introduced a mechanism."""

    title: Annotated[str, Meta(description="Title.")] = ""
    authors: Annotated[str, Meta(description="Authors, as usually cited.")] = ""
    year: Annotated[int, Meta(description="Year of publication.")] = 0
    arxiv: Annotated[str, Meta(description="arXiv identifier; empty if there is none.")] = ""


class StateKind(StrEnum):
    """The kind of state that a mechanism keeps between decoding steps.

    PAGED: entries for each decoder token, such as keys and values. SLOT: a fixed number of bytes for each sequence,
    such as the state of linear attention. SOURCE: entries for each encoder token, written once.
    """

    PAGED = "paged"
    SLOT = "slot"
    SOURCE = "source"


class MechanismOption(Schema, frozen=True, kw_only=True):
    """An option of a mechanism's config."""

    name: Annotated[str, Meta(description="Name of the option.")]
    type: Annotated[str, Meta(description="Python type, as written in the config.")]
    default_value: Annotated[
        Any | UnsetType, Meta(description="Value if not given; absent for a required option.")
    ] = UNSET  # fmt: skip
    description: Annotated[str, Meta(description="What it does; may be empty.")] = ""

    @property
    def required(self) -> bool:
        """Whether the option has no default value."""
        return self.default_value is UNSET


class Mechanism(Schema, frozen=True, kw_only=True):
    """An attention mechanism installed on a server."""

    name: Annotated[str, Meta(description="Short name, unique unless `ambiguous`.")]
    distribution: Annotated[str, Meta(description="Installed package that provides it.")] = ""
    version: Annotated[str, Meta(description="Version of that package.")] = ""
    summary: Annotated[str, Meta(description="Description in one line.")] = ""
    paper: Annotated[Paper, Meta(description="Where it was published.")] = Paper()
    equation: Annotated[str, Meta(description="Equation in LaTeX; may be empty.")] = ""
    capabilities: Annotated[
        tuple[str, ...], Meta(description='What it supports, such as "causal" or "returns_weights"; sorted.')
    ] = ()  # fmt: skip
    state_kinds: Annotated[
        tuple[StateKind, ...], Meta(description="Kinds of state kept between decoding steps, with default options.")
    ] = ()  # fmt: skip
    options: Annotated[tuple[MechanismOption, ...], Meta(description="Options of its config.")] = ()
    ambiguous: Annotated[
        bool, Meta(description='Whether another package has the same short name; then use "distribution/name".')
    ] = False  # fmt: skip

    @property
    def full_name(self) -> str:
        """The name that selects this mechanism: the short name, or "distribution/name" if that is ambiguous."""
        return f"{self.distribution}/{self.name}" if self.ambiguous else self.name


class BrokenPlugin(Schema, frozen=True, kw_only=True):
    """A plugin that is installed but cannot be used."""

    distribution: Annotated[str, Meta(description="Installed package.")]
    version: Annotated[str, Meta(description="Its version.")]
    reason: Annotated[str, Meta(description="Why it cannot be used, in one line.")]
