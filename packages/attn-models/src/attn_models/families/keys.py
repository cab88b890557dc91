"""Keys of a config.json that a door does not read: passed over where they change nothing, said, or refused."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from attn_models.families.door import refuse_others

log = logging.getLogger(__name__)

# What concerns training, files, or the use of transformers, and nothing that a forward pass computes.
HARMLESS = re.compile(
    r"_.*|architectures|(torch_)?dtype|transformers_version|model_type|use_cache|pretraining_tp|problem_type"
    r"|(id2label|label2id|num_labels)|output_\w+|return_dict\w*|is_encoder_decoder|chunk_size_feed_forward|name_or_path"
    r"|initializer_(range|factor|cutoff_factor)|rescale_prenorm_residual|\w+_token_ids?|\w*(dropout(_prob)?|_pdrop)|summary_\w+"
    r"|task_specific_params|gradient_checkpointing|tokenizer_class|finetuning_task|prefix|n_ctx|reorder_and_upcast_attn"
    r"|router_aux_loss_coef|aux_loss_alpha|seq_aux|ep_size|qk_head_dim|max_window_layers|cache_implementation"
    r"|eos_id|bos_id|attn_implementation|flash_attn\w*|unsloth_\w+"
)
FULL = "full_attention"
# Keys of other families that change what is computed, and what they say where they change nothing.
CHANGING: Mapping[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "num_local_experts": (None, 0, 1),
    "num_experts": (None, 0, 1),
    "n_routed_experts": (None, 0),
    "kv_lora_rank": (None,),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "attention_multiplier": (None,),
    "logits_scaling": (None, 1),
    "logit_scale": (None, 1),
    "no_rope_layers": (None, []),
    "use_qk_norm": (False, None),
    "qk_layernorm": (False, None),
    "clip_qkv": (None,),
    "alibi": (False, None),
    "parallel_attn": (False, None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "rope_interleave": (False, None),
    "moe_layer_freq": (1, None),
    "is_decoder": (True, None),
}


def say_unread(values: Mapping[str, Any], read: Collection[str], path: Path) -> None:
    """Raises `InvalidValue` for a key outside `read` that would change what is computed, and warns of unknown ones."""
    unread = {key: value for key, value in values.items() if key not in read}
    refuse_others(unread, CHANGING)
    layers = unread.get("layer_types")
    if layers is not None and not (isinstance(layers, list) and all(kind == FULL for kind in layers)):
        refuse_others({"layer_types": layers}, {"layer_types": (f"{FULL!r} for every layer",)})
    unknown = sorted(key for key in unread if key not in {*CHANGING, "layer_types"} and not HARMLESS.fullmatch(key))
    if unknown:
        log.warning("%s: unknown keys, which change nothing here: %s", path, ", ".join(unknown))
