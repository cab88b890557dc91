"""GPT-2 checkpoints in the layout of Hugging Face's transformers."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from attn_schema.decoder import DecoderConfig

from attn_models.adapters.families.gpt_bigcode import GptBigcodeAdapter
from attn_models.adapters.families.gptj import GptjAdapter
from attn_models.adapters.family import FamilyAdapter

log = logging.getLogger(__name__)

PREFIX = "transformer."


class Gpt2Adapter(FamilyAdapter):
    """Pre-norm blocks with LayerNorm, GELU, learned positions and biases everywhere (Radford et al. 2019).

    Conv1D stores its matrix as [in, out]; the three attention projections are concatenated in one matrix.
    """

    model_type = "gpt2"
    architecture = "GPT2LMHeadModel"
    fields, aliases = GptjAdapter.fields, GptjAdapter.aliases
    fixed = GptBigcodeAdapter.fixed
    defaults: ClassVar[Mapping[str, Any]] = {
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    }
    activation_key, activations = "activation_function", GptjAdapter.activations
    allowed = dict.fromkeys(("scale_attn_by_inverse_layer_idx", "add_cross_attention"), (False,)) | {
        "scale_attn_weights": (True,)
    }
    reads = frozenset({"embd_pdrop", "resid_pdrop"})
    nulls = frozenset({"n_inner"})
    layers = "transformer.h"
    derived_names = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)$")
    names, fused = GptBigcodeAdapter.names, GptBigcodeAdapter.fused
    transposed = re.compile(r"(attention|feed_forward)\.\w+\.weight$")

    def own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The dropout of embeddings and sublayers; 0 with a warning if these differ in the config.json."""
        embedded, added = (values.get(key) or 0.0 for key in ("embd_pdrop", "resid_pdrop"))
        if embedded == added:
            return {"dropout": embedded}
        said = "embd_pdrop %s and resid_pdrop %s differ, which is not supported: dropout is set to 0"
        log.warning(said, embedded, added)
        return {}

    def own_keys(self, config: DecoderConfig) -> dict[str, Any]:
        """The dropout of embeddings and sublayers."""
        return {"embd_pdrop": config.dropout, "resid_pdrop": config.dropout}

    def canonical_names(self, names: Iterable[str]) -> dict[str, str]:
        """Map names to the checkpoint's, which lack the prefix `transformer.` if saved without a head (OpenAI's do)."""
        known = list(names)
        if any(name.startswith(PREFIX) for name in known):
            return {name: name for name in known}
        return {name if name == self.head else PREFIX + name: name for name in known}
