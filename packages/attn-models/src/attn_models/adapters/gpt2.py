"""GPT-2 checkpoints in the layout of Hugging Face's transformers."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from attn_core import Causal, Heads
from attn_core.errors import Incompatible
from attn_schema.decoder import DecoderConfig

from attn_models.adapters.base import (
    ACTIVATIONS,
    HF_ACTIVATIONS,
    StateDictAdapter,
    StoredTensor,
    needed,
    require_allowed,
)
from attn_models.adapters.hf_config import require_fields, softmax_heads

log = logging.getLogger(__name__)

NORMS = {"attention_norm": "ln_1", "feed_forward_norm": "ln_2"}
# Conv1D stores its matrix as [in, out]; the three attention projections are concatenated in one matrix.
MATRICES = {
    "attn.c_attn": ("attention.query", "attention.key", "attention.value"),
    "attn.c_proj": ("attention.output",),
    "mlp.c_fc": ("feed_forward.up",),
    "mlp.c_proj": ("feed_forward.down",),
}
LEAVES = ("weight", "bias")
PREFIX = "transformer."
PLAIN = {"scale_embedding": False, "final_logit_softcapping": None, "num_experts": None, "num_nextn_predict_layers": 0}
FIXED = {"norm": "layer", "norm_place": "pre", "positions": "learned", "bias": True} | PLAIN
OUTSIDE = {"embedding": "wte", "positions": "wpe", "norm": "ln_f"}
READS = frozenset(
    {
        "vocab_size",
        "n_positions",
        "n_embd",
        "n_layer",
        "n_head",
        "n_inner",
        "layer_norm_epsilon",
        "activation_function",
        "tie_word_embeddings",
        "scale_attn_weights",
        "scale_attn_by_inverse_layer_idx",
        "add_cross_attention",
        "attn_pdrop",
        "embd_pdrop",
        "resid_pdrop",
    }
)


class Gpt2Adapter(StateDictAdapter):
    """Pre-norm blocks with LayerNorm, GELU, learned positions and biases everywhere (Radford et al. 2019)."""

    model_type = "gpt2"
    known_keys = READS
    keys: ClassVar[Mapping[str, str]] = {
        "max_seq_len": "n_positions",
        "hidden_size": "n_embd",
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "intermediate_size": "n_inner",
        "inner_width": "n_inner",
        "norm_eps": "layer_norm_epsilon",
        "attention_dropout": "attn_pdrop",
        "dropout": "embd_pdrop",
    }
    head = "lm_head.weight"
    derived_names = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)$")

    def from_hf_config(self, values: Mapping[str, Any]) -> DecoderConfig:
        """Build the decoder config from a GPT2Config."""
        activation = values.get("activation_function", "gelu_new")
        require_allowed(
            values,
            {
                "activation_function": tuple(ACTIVATIONS),
                "scale_attn_weights": (True,),
                "scale_attn_by_inverse_layer_idx": (False,),
                "add_cross_attention": (False,),
            },
        )
        return DecoderConfig(
            vocab_size=needed(values, "vocab_size"),
            max_seq_len=needed(values, "n_positions"),
            hidden_size=needed(values, "n_embd"),
            num_layers=needed(values, "n_layer"),
            num_heads=needed(values, "n_head"),
            mechanism="attn-variants/mha",
            norm="layer",
            norm_eps=values.get("layer_norm_epsilon", 1e-5),
            feed_forward=ACTIVATIONS[activation],
            intermediate_size=values.get("n_inner"),
            positions="learned",
            tie_word_embeddings=bool(values.get("tie_word_embeddings", True)),
            bias=True,
            dropout=dropout_of(values),
            attention_dropout=values.get("attn_pdrop") or 0.0,
        )

    def keys_of(self, config: DecoderConfig) -> dict[str, Any]:
        """The keys of a GPT2Config."""
        require_fields(config, FIXED, self.model_type)
        heads = softmax_heads(config, Causal(), self.model_type)
        whole = Heads(
            query=heads.query,
            key_value=heads.query,
            key_size=config.hidden_size // heads.query,
            value_size=heads.key_size,
        )
        if heads != whole:
            raise Incompatible("grouped heads and other head sizes cannot be expressed in a gpt2 config.json")
        if config.feed_forward not in HF_ACTIVATIONS:
            raise Incompatible(f"feed_forward {config.feed_forward!r} cannot be expressed in a gpt2 config.json")
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": self.model_type,
            "vocab_size": config.vocab_size,
            "n_positions": config.max_seq_len,
            "n_embd": config.hidden_size,
            "n_layer": config.num_layers,
            "n_head": config.num_heads,
            "n_inner": config.intermediate_size,
            "layer_norm_epsilon": config.norm_eps,
            "activation_function": HF_ACTIVATIONS[config.feed_forward],
            "tie_word_embeddings": config.tie_word_embeddings,
            "attn_pdrop": config.attention_dropout,
            "embd_pdrop": config.dropout,
            "resid_pdrop": config.dropout,
        }

    def tensor_mappings(self, parameters: Sequence[str]) -> list[StoredTensor]:
        """One tensor for each parameter, and one for the three attention projections; matrices are transposed."""
        known = set(parameters)
        found = [
            StoredTensor(f"{PREFIX}{their}.{leaf}", (f"{our}.{leaf}",))
            for our, their in OUTSIDE.items()
            for leaf in LEAVES
        ]
        found.append(StoredTensor(self.head, ("unembedding.weight",)))
        for layer in sorted({name.split(".")[1] for name in parameters if name.startswith("blocks.")}):
            for our, their in NORMS.items():
                found += [
                    StoredTensor(f"{PREFIX}h.{layer}.{their}.{leaf}", (f"blocks.{layer}.{our}.{leaf}",))
                    for leaf in LEAVES
                ]
            for their, ours in MATRICES.items():
                for leaf in LEAVES:
                    parts = tuple(f"blocks.{layer}.{our}.{leaf}" for our in ours)
                    found.append(StoredTensor(f"{PREFIX}h.{layer}.{their}.{leaf}", parts, transposed=leaf == "weight"))
        return [stored for stored in found if known.issuperset(stored.parameters)]

    def canonical_names(self, names: Iterable[str]) -> dict[str, str]:
        """Map names to the checkpoint's, which lack the prefix `transformer.` if saved without a head (OpenAI's do)."""
        known = list(names)
        if any(name.startswith(PREFIX) for name in known):
            return {name: name for name in known}
        return {name if name == self.head else PREFIX + name: name for name in known}


def dropout_of(values: Mapping[str, Any]) -> float:
    """The dropout of embeddings and sublayers; 0 with a warning if these differ in the config.json."""
    embedded: float = values.get("embd_pdrop") or 0.0
    added = values.get("resid_pdrop") or 0.0
    if embedded != added:
        log.warning(
            "embd_pdrop %s and resid_pdrop %s differ, which is not supported: dropout is set to 0", embedded, added
        )
        return 0.0
    return embedded
