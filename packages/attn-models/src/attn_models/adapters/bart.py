"""BART, mBART, PLBart, Pegasus, Marian, M2M-100 (NLLB) and Blenderbot checkpoints in the layout of transformers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from attn_core.checks import require_flag
from attn_core.errors import Incompatible, InvalidValue
from attn_schema.decoder import FeedForwardKind

from attn_models.adapters.base import (
    ACTIVATIONS,
    StateDictAdapter,
    StoredTensor,
    needed,
    require_allowed,
    required_count,
)
from attn_models.adapters.whisper import PLACES, SAME, WhisperAdapter
from attn_models.adapters.whisper import SIZES as WHISPER_SIZES
from attn_models.encoder_decoder.config import BartConfig

if TYPE_CHECKING:
    from attn_models.encoder_decoder.bart import Bart

LENGTHS = ("num_mel_bins", "max_encoder_len", "max_seq_len")
SIZES = {ours: theirs for ours, theirs in WHISPER_SIZES.items() if ours not in LENGTHS}
KINDS: dict[str, FeedForwardKind] = ACTIVATIONS | {"silu": "silu", "swish": "silu"}
HF_KINDS = {ours: theirs for theirs, ours in reversed(KINDS.items())}
SHARED, BIAS = "model.shared.weight", "final_logits_bias"
TABLES = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
"""Other names of the embedding, which some checkpoints have beside or instead of `SHARED`."""
OUTSIDE = {
    "source_positions": "encoder.embed_positions",
    "positions": "decoder.embed_positions",
    "source_norm": "encoder.layernorm_embedding",
    "target_norm": "decoder.layernorm_embedding",
    "encoder_norm": "encoder.layer_norm",
    "decoder_norm": "decoder.layer_norm",
}


class BartAdapter(StateDictAdapter):
    """BART (Lewis et al. 2020, arXiv 1910.13461); the fields of relatives are class variables."""

    model_type = "bart"
    architecture: ClassVar[str] = "BartForConditionalGeneration"
    Config = BartConfig
    aliases: ClassVar[Mapping[str, str]] = WhisperAdapter.aliases
    head = "lm_head.weight"
    by_tensors = frozenset({"output_bias"})
    copies: ClassVar[Mapping[str, str]] = dict.fromkeys(TABLES, SHARED)
    norm_place: ClassVar[Literal["pre", "post"]] = "post"
    positions: ClassVar[Literal["learned", "sinusoidal", "tensor2tensor"]] = "learned"
    first_position: ClassVar[int] = 2
    embedding_norm: ClassVar[bool] = True
    activation: ClassVar[str] = "gelu"
    scales: ClassVar[bool] = False
    known_keys = frozenset(
        {
            *(*SIZES.values(), *SAME, "max_position_embeddings", "activation_function", "scale_embedding"),
            *("is_decoder", "add_cross_attention", "tie_word_embeddings", "decoder_vocab_size", "pad_token_id"),
            *("share_encoder_decoder_embeddings", "encoder_layerdrop", "decoder_layerdrop", "init_std"),
        }
    )

    def from_hf_config(self, values: Mapping[str, Any]) -> BartConfig:
        """Build the model's config from a BartConfig."""
        for name, other in SAME.items():
            require_allowed(values, {name: (values.get(other),)})
        only = {"is_decoder": (False, None), "add_cross_attention": (False, None), "tie_word_embeddings": (True,)}
        only |= {"share_encoder_decoder_embeddings": (True,), "decoder_vocab_size": (values.get("vocab_size"), None)}
        require_allowed(values, only | {"activation_function": tuple(KINDS)})
        for name in SAME:
            needed(values, name)
        context = required_count(values, "max_position_embeddings")
        sizes: dict[str, Any] = {ours: required_count(values, theirs) for ours, theirs in SIZES.items()}
        require_flag("scale_embedding", values.get("scale_embedding", self.scales))
        return BartConfig(
            **sizes,
            max_seq_len=context,
            max_encoder_len=context,
            norm_place=self.norm_place,
            positions=self.positions,
            first_position=self.first_position,
            padding_id=self.padding_of(values),
            embedding_norm=self.embedding_norm,
            scale_embedding=values.get("scale_embedding", self.scales),
            feed_forward=KINDS[values.get("activation_function", self.activation)],
        )

    def padding_of(self, values: Mapping[str, Any]) -> int | None:  # noqa: ARG002 -- of M2M-100 only
        """The id of padding, where its position is the zero vector."""
        return None

    def without_missing(self, config: BartConfig, names: Iterable[str]) -> BartConfig:
        """Leave out the bias of logits if the checkpoint has none."""
        return dataclasses.replace(config, output_bias=BIAS in set(names))

    def keys_of(self, config: BartConfig) -> dict[str, Any]:
        """The keys of a BartConfig; raises `Incompatible` for what it cannot express."""
        names, plain = (config.encoder, config.decoder, config.cross), (BartConfig.encoder,) * 3
        if names != plain or config.encoder_options or config.decoder_options or config.cross_options:
            raise Incompatible(f"other mechanisms than {plain} cannot be expressed in a {self.model_type} config.json")
        if config.feed_forward not in HF_KINDS:
            raise InvalidValue.of("feed_forward", config.feed_forward, ", ".join(HF_KINDS))
        sizes = {theirs: getattr(config, ours) for ours, theirs in SIZES.items()}
        sizes["decoder_layers"] = config.decoder_layers
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **sizes,
            **{name: sizes[other] for name, other in SAME.items()},
            "max_position_embeddings": config.max_seq_len,
            "activation_function": HF_KINDS[config.feed_forward],
            "scale_embedding": config.scale_embedding,
            "pad_token_id": config.padding_id,
        }

    def build(self, config: BartConfig) -> Bart:
        """Build a model with random weights."""
        from attn_models.encoder_decoder.bart import Bart

        return Bart(config)

    def canonical_names(self, names: Iterable[str]) -> dict[str, str]:
        """Map `SHARED` to the embedding's name in the checkpoint, and every other name to itself."""
        found = {name: name for name in names}
        table = next((name for name in (SHARED, *TABLES, self.head) if name in found), None)
        return found if table is None else found | {SHARED: table}

    def tensor_mappings(self, parameters: Sequence[str]) -> list[StoredTensor]:
        """One tensor for each parameter."""
        return [StoredTensor(hf_name(name), (name,)) for name in parameters]


def hf_name(ours: str) -> str:
    """The checkpoint's name of a model parameter."""
    module, _, leaf = ours.rpartition(".")
    if ours in ("embedding.weight", "output_bias"):
        return SHARED if module else BIAS
    if module in OUTSIDE:
        return f"model.{OUTSIDE[module]}.{leaf}"
    stack, layer, part = module.split(".", 2)
    return f"model.{stack}.layers.{layer}.{PLACES[part]}.{leaf}"


class MbartAdapter(BartAdapter):
    """BART with pre-norm blocks, over many languages (Liu et al. 2020, arXiv 2001.08210)."""

    model_type = "mbart"
    architecture = "MBartForConditionalGeneration"
    norm_place = "pre"


class PlbartAdapter(BartAdapter):
    """BART over programs (Ahmad et al. 2021, arXiv 2103.06333)."""

    model_type = "plbart"
    architecture = "PLBartForConditionalGeneration"
    scales = True


class PegasusAdapter(MbartAdapter):
    """mBART without norms of embeddings, its position tables sinusoids that are stored (Zhang et al. 2020, arXiv
    1912.08777)."""

    model_type = "pegasus"
    architecture = "PegasusForConditionalGeneration"
    first_position = 0
    embedding_norm = False


class BlenderbotAdapter(PegasusAdapter):
    """mBART without norms of embeddings (Roller et al. 2020, arXiv 2004.13637)."""

    model_type = "blenderbot"
    architecture = "BlenderbotForConditionalGeneration"


class MarianAdapter(BartAdapter):
    """BART with sinusoids and without norms of embeddings (Junczys-Dowmunt et al. 2018, arXiv 1804.00344)."""

    model_type = "marian"
    architecture = "MarianMTModel"
    positions = "sinusoidal"
    first_position = 0
    embedding_norm = False
    derived_names = re.compile(r"^model\.(en|de)coder\.embed_positions\.")


class M2m100Adapter(MbartAdapter):
    """mBART with sinusoids, without norms of embeddings and bias of logits (Fan et al. 2020, arXiv 2010.11125), and
    NLLB (arXiv 2207.04672)."""

    model_type = "m2m_100"
    architecture = "M2M100ForConditionalGeneration"
    positions = "tensor2tensor"
    embedding_norm = False
    activation = "relu"
    scales = True
    derived_names = re.compile(r"^model\.(en|de)coder\.embed_positions\.")

    def padding_of(self, values: Mapping[str, Any]) -> int:
        """The id of padding, from which positions are counted too."""
        require_allowed(values, {"pad_token_id": (1,)})
        return 1
