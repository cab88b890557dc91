"""Multi-head, grouped-query and multi-query softmax attention, as self-attention or cross-attention."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from attn_core import AttentionSpec, Capability, DeclaredMechanism, Heads, MechanismConfig, Paper
from attn_core.errors import InvalidValue

from attn_variants.mechanisms.common import GROUPED_SELF, SELF, ValueSizeConfig, heads_of, self_attention, whole_numbers


class MultiHeadAttention(DeclaredMechanism):
    """Scaled dot-product attention in several heads, each with its own keys and values."""

    name = "mha"
    summary = "scaled dot-product attention in several heads"
    used_by = ("GPT-2", "BERT", "Llama 2", "Whisper")
    paper = Paper(title="Attention Is All You Need", authors="Vaswani et al.", year=2017, arxiv="1706.03762")
    equation = (
        r"\mathrm{head}_h = \mathrm{softmax}\left(\frac{Q_h K_h^\top}{\sqrt{d_k}} + M\right) V_h,\quad"
        r" O = [\mathrm{head}_1; \dots; \mathrm{head}_H] W^O"
    )
    capabilities = SELF | {Capability.CROSS}
    Config = ValueSizeConfig

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The spec of plain softmax attention."""
        return self_attention(config)


class GroupedQueryAttention(DeclaredMechanism):
    """Scaled dot-product attention whose query heads share keys and values in equal groups.

    Without `num_kv_heads`, the groups are as small as possible: of the least prime factor of `num_heads`.
    """

    name = "gqa"
    summary = "query heads share keys and values in groups"
    used_by = ("Llama 3", "Qwen2.5", "Mixtral", "Granite 3", "SmolLM2")
    paper = Paper(
        title="GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints",
        authors="Ainslie et al.",
        year=2023,
        arxiv="2305.13245",
    )
    equation = (
        r"\mathrm{head}_h = \mathrm{softmax}\left(\frac{Q_h K_{g(h)}^\top}{\sqrt{d_k}} + M\right) V_{g(h)},\quad"
        r" g(h) = \lfloor h G / H \rfloor"
    )
    capabilities = GROUPED_SELF | {Capability.CROSS}

    @dataclass(frozen=True, kw_only=True)
    class Config(ValueSizeConfig):
        """`groups` lists the key/value head of each query head, for groups that are unequal or not consecutive;
        `value_size` is the size of the values of a head, `head_dim` by default."""

        groups: tuple[int, ...] | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.groups is not None:
                object.__setattr__(self, "groups", whole_numbers("groups", self.groups))
                if not self.groups:
                    raise InvalidValue.of("groups", self.groups, "the index of a key/value head for each query head")

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        return self_attention(config, heads=grouped_heads(config))


def grouped_heads(config: MechanismConfig) -> Heads:
    """The heads of a config; without `num_kv_heads`, in the smallest equal groups of more than one head."""
    groups = GroupedQueryAttention.Config.of(config).groups
    if groups is not None:
        shared = config.num_kv_heads or max(groups) + 1
        equal = heads_of(dataclasses.replace(config, num_kv_heads=None))
        return dataclasses.replace(equal, key_value=shared, groups=groups)
    if config.num_kv_heads is not None or config.num_heads == 1:
        return heads_of(config)
    share = next(share for share in range(2, config.num_heads + 1) if config.num_heads % share == 0)
    return dataclasses.replace(heads_of(config), key_value=config.num_heads // share)


class MultiQueryAttention(DeclaredMechanism):
    """Scaled dot-product attention whose query heads all share one head of keys and values."""

    name = "mqa"
    summary = "all query heads share one head of keys and values"
    used_by = ("Falcon 7B", "StarCoder")
    paper = Paper(
        title="Fast Transformer Decoding: One Write-Head is All You Need",
        authors="Shazeer",
        year=2019,
        arxiv="1911.02150",
    )
    equation = r"\mathrm{head}_h = \mathrm{softmax}\left(\frac{Q_h K^\top}{\sqrt{d_k}} + M\right) V"
    capabilities = GROUPED_SELF | {Capability.CROSS}
    Config = ValueSizeConfig

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` for more than one key/value head."""
        if config.num_kv_heads not in {None, 1}:
            raise InvalidValue.of("num_kv_heads", config.num_kv_heads, "1; use mechanism 'gqa' for more")
        return self_attention(config, heads=dataclasses.replace(heads_of(config), key_value=1))
