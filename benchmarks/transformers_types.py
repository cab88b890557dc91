"""Counts transformers' causal language models by how attn serves them: native, through transformers, or refused.

    python benchmarks/transformers_types.py [MODEL_TYPE ...] [--json FILE]

For every model_type a tiny random model is built by transformers and saved; attn loads the folder and generates from
eight prompts in one batch, in chunks of prompts, with a paged cache. A type counts if all its tokens are those that
transformers generates alone. Where `generate` gives other tokens than the logits of whole sequences do, a type is
counted apart, with the latter. Types that have no small config here are counted apart.

With --images the models of images and text are given conversations with images of several sizes, by the processors of
transformers; types of which `tiny_image_models.py` writes no model are counted apart.
"""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from attn_core.errors import AttnError, Incompatible
from attn_engine import EngineConfig, Request, SamplingParams, build_engine
from attn_engine.host.image_rows import image_prompts
from attn_models.adapters.registry import through_transformers
from attn_models.loading import load_model
from tiny_image_models import TYPES, chats, write_tiny
from tiny_image_models import wanted_tokens as images_wanted
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

NAMES = {
    64: "hidden_size d_model n_embd embed_dim hidden_dim dim word_embed_proj_dim embedding_size lru_width",
    4: "num_hidden_layers n_layer n_layers num_layers num_attention_heads n_head n_heads num_heads num_experts "
    "encoder_attention_heads decoder_attention_heads "
    "num_local_experts n_routed_experts moe_num_experts num_routed_experts linear_num_value_heads",
    2: "num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k "
    "top_k_experts expert_top_k n_mamba_heads mamba_expand linear_num_key_heads decoder_layers "
    "eos_token_id",
    16: "head_dim global_head_dim d_kv attention_head_dim swa_head_dim kv_lora_rank qk_nope_head_dim v_head_dim "
    "index_head_dim linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim",
    96: "intermediate_size ffn_dim d_ff n_inner ffn_hidden_size dff inner_dim block_ff_dim intermediate_size_mlp "
    "dense_intermediate_size prefix_dense_intermediate_size decoder_ffn_dim",
    # With few heads of an indexer many keys score exactly zero, and the choice among equal ones is nobody's rule.
    32: "index_n_heads moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size q_lora_rank "
    "expert_dim moe_shared_expert_intermediate_size shared_intermediate_size",
    8: "qk_rope_head_dim index_topk sliding_window attention_chunk_size attention_window_size state_size mamba_d_state "
    "mamba_n_heads mamba_num_heads ssm_state_size rotary_dim window_size hidden_size_per_layer_input laurel_rank",
    1: "n_group topk_group n_shared_experts num_shared_experts first_k_dense_replace zero_expert_num mamba_n_groups "
    "n_groups bos_token_id moe_num_shared_experts",
    0: "pad_token_id num_kv_shared_layers",
    128: "vocab_size max_position_embeddings n_positions n_ctx vocab_size_per_layer_input",
    24: "qk_head_dim",
}
SMALL = {name: value for value, names in NAMES.items() for name in names.split()}
PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
LAYER_TYPES = ("full_attention", "sliding_attention")
QSA = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8}
QSA |= {"indexer_compress_ratio": 4, "hc_lowrank": 16, "ngram_vocab_size_base": 50, "split_ngram_parts": 1}
HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2}
FURTHER: dict[str, dict[str, Any]] = {
    "bailing_hybrid": HYBRID | {"n_group": 1, "topk_group": 1},
    "bamba": {"attn_layer_indices": [1, 3]},
    "bloom": {"seq_length": 128},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(LAYER_TYPES, PLAIN["rope_parameters"])},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}},
    "deepseek_v4": {"num_key_value_heads": 1},
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {"head_dim": 24},
    "falcon": {"num_kv_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 128},
    "git": {"vision_config": {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": HYBRID,
    "hunyuan_v1_dense": PLAIN | {"head_dim": 16},
    "hunyuan_v1_moe": PLAIN | {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": HYBRID,
    "ministral": PLAIN | {"head_dim": 16},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"] * 2},
    "minimax_m3_vl_text": {"rotary_dim": 16, "shared_intermediate_size": 96},
    "mamba2": {"head_dim": 32},
    "modernbert-decoder": {"global_attn_every_n_layers": 2},
    "moshi": {"ffn_dim": 96, "num_codebooks": 2},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": QSA,
    "qwen4_exp_text": QSA,
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 1},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
    "mpt": {"max_seq_len": 128, "d_model": 64, "n_heads": 4, "n_layers": 4},
    "xlm": {"emb_dim": 64, "causal": True, "is_encoder": False},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX"},
}
"""What the defaults of a type lack, or need besides."""
LARGEST = 15_000_000
PROMPTS = [[(7 * row + 3 * place) % 120 + 4 for place in range(3 + 2 * row)] for row in range(8)]
NEW = 8
UNRULED = ("eos_token_id", "forced_eos_token_id", "forced_bos_token_id", "suppress_tokens", "begin_suppress_tokens")
"""Settings of `generate` that replace the likeliest tokens, which are not asked for here."""


def small_values(config: Any) -> dict[str, Any]:
    """The small sizes of the fields that a config has."""
    given = config.to_dict()
    fields = {*inspect.signature(type(config).__init__).parameters, *given}
    fields -= set(getattr(config, "attribute_map", None) or {})
    found = {name: SMALL[name] for name in fields & SMALL.keys() if given.get(name) is not None}
    found |= {name: SMALL[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    if "is_decoder" in fields:
        # Encoders that are given a causal head attend causally only so.
        found["is_decoder"] = True
    if "kv_lora_rank" in found:
        found |= {"num_key_value_heads": 4} if "num_key_value_heads" in found else {}
        found |= {"head_dim": 8} if "head_dim" in found else {}
    return found | ({"n_inner": 96} if "n_inner" in fields else {})


def class_of(kind: str) -> Any:
    """The class of causal language models of a type."""
    return getattr(transformers, (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES | MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)[kind])


def tiny_config(kind: str) -> Any:
    """A small config of a type; raises what transformers raises where its defaults cannot be made small so."""
    default = CONFIG_MAPPING[kind]()
    made = class_of(kind).config_class
    if made is not type(default) and not isinstance(default.get_text_config(), made):
        default = made()
    inner = {name: getattr(default, name, None) for name in getattr(default, "sub_configs", None) or {}}
    values = {name: small_values(config) for name, config in inner.items() if config is not None}
    if "text_config" not in values:
        values |= small_values(default)
    further = FURTHER.get(kind, {})
    if "text_config" in values:
        values["text_config"] |= further
    else:
        values |= further
    return type(default)(**values)


def tiny_model(kind: str) -> Any:
    """A small model with random weights, large enough for distinct tokens."""
    config, found = tiny_config(kind), class_of(kind)
    config = config if isinstance(config, found.config_class) else config.get_text_config()
    with torch.device("meta"):
        parameters = sum(each.numel() for each in found._from_config(config).parameters())  # noqa: SLF001
    if parameters > LARGEST:
        raise ValueError(f"{parameters:,} parameters")
    torch.manual_seed(0)
    model = found._from_config(config, attn_implementation="eager").eval()  # noqa: SLF001 -- AutoModel's own
    draw = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=draw)
        parameter.data = noise * 0.15 if parameter.dim() > 1 else parameter.data + 0.1 * noise
    return model


@torch.inference_mode()
def wanted_tokens(model: Any) -> list[list[int]]:
    """What transformers generates from each prompt alone, the likeliest tokens."""
    made = []
    for name in (
        "eos_token_id",
        "forced_eos_token_id",
        "forced_bos_token_id",
        "suppress_tokens",
        "begin_suppress_tokens",
    ):
        setattr(model.generation_config, name, None)
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(ids, max_new_tokens=NEW, do_sample=False)
        made.append(out[0, len(prompt) :].tolist())
    return made


@torch.inference_mode()
def tokens_of_forward(model: Any) -> list[list[int]]:
    """The likeliest tokens by the logits of whole sequences, each without a cache."""
    made = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(NEW):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        made.append(ids[len(prompt) :])
    return made


def served_tokens(folder: Path) -> tuple[list[list[int]], str]:
    """What attn generates from all prompts together, in steps of at most 16 tokens, and how they are stepped."""
    loaded = load_model(folder, "float32", verify="sizes")
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=16, kv_cache="paged")
    engine = build_engine(loaded.model, config=config, kv_cache_tokens=8 * 32)
    params = SamplingParams(max_new_tokens=NEW, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(PROMPTS):
        engine.submit(Request(id=str(number), token_ids=tuple(prompt), params=params))
    found: list[list[int]] = [[] for _ in PROMPTS]
    while not engine.idle:
        for event in engine.step():
            found[int(event.request_id)] += [token.id for token in event.delta.tokens]
    return found, str(getattr(loaded.model, "way", None) or "")


def seen_tokens(folder: Path) -> tuple[list[list[int]], str]:
    """What attn generates from conversations with images together, in steps of at most 16 tokens, and by what."""
    loaded = load_model(folder, "float32", verify="sizes")
    prompts = image_prompts(loaded, loaded.tokenizer)
    if prompts is None:
        raise Incompatible("cannot run images: its layout here takes none")
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=16, kv_cache="paged")
    params = SamplingParams(max_new_tokens=NEW, temperature=0.0, ignore_eos=True)
    asked = []
    for number, chat in enumerate(chats()):
        said = [{"role": message.role, "content": message.content} for message in chat]
        prompt = prompts.encode(said, [message.images for message in chat])
        given = prompts.embeddings(prompt)
        asked.append(Request(id=str(number), token_ids=prompt.token_ids, params=params, prompt_embeddings=given))
    engine = build_engine(loaded.model, config=config, kv_cache_tokens=1024)
    for request in asked:
        engine.submit(request)
    found: list[list[int]] = [[] for _ in asked]
    while not engine.idle:
        for event in engine.step():
            found[int(event.request_id)] += [token.id for token in event.delta.tokens]
    return found, str(getattr(loaded.model, "way", None) or "")


def outcome_of_images(kind: str) -> tuple[str, str]:
    """How a type sees images, and the reason if it does not."""
    if kind not in TYPES:
        return "no tiny model", ""
    with tempfile.TemporaryDirectory() as folder:
        try:
            model, processor = write_tiny(kind, Path(folder))
            wanted = [images_wanted(model, processor, chat, NEW) for chat in chats()]
        except Exception as error:  # noqa: BLE001 -- whatever a config of transformers raises
            said = str(error).strip().splitlines() or [""]
            return "no tiny model", f"{type(error).__name__}: {said[0][:120]}"
        native = not through_transformers(json.loads((Path(folder) / "config.json").read_text()))
        try:
            found, way = seen_tokens(Path(folder))
        except AttnError as error:
            return "refused", error.message.partition("cannot run ")[2] or error.message.partition("here: ")[2]
    if found != wanted:
        return "WRONG TOKENS", way
    return "native" if native else "through transformers, its own cache" if way else "through transformers", way


def outcome(kind: str) -> tuple[str, str]:
    """How a type is served, and the reason if it is not."""
    try:
        model = tiny_model(kind)
    except Exception as error:  # noqa: BLE001 -- whatever a config of transformers raises
        return "no small config", f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = json.loads((Path(folder) / "config.json").read_text())
        how = "through transformers" if through_transformers(saved) else "native"
        try:
            served, way = served_tokens(Path(folder))
        except AttnError as error:
            return "refused", error.message.splitlines()[0].partition("cannot run ")[2][:300] or error.message[-160:]
    try:
        wanted = wanted_tokens(model)
    except Exception as error:  # noqa: BLE001 -- a model that transformers cannot generate from
        return "transformers fails", f"{type(error).__name__}: {str(error)[:120]}"
    if served == wanted:
        return (f"{how}, its own cache" if way else how), way
    return ("transformers contradicts itself" if served == tokens_of_forward(model) else "WRONG TOKENS"), how


def main() -> None:
    """Print the outcome of each type, and how many there are of each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--image-text", action="store_true", help="the models of images and text, of text alone")
    parser.add_argument("--images", action="store_true", help="the models of images and text, with images")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    results = {}
    several = options.image_text or options.images
    names = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if several else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    for kind in options.types or sorted(names):
        results[kind] = outcome_of_images(kind) if options.images else outcome(kind)
        print(f"{kind:28} {': '.join(filter(None, results[kind]))}", flush=True)
    counts: dict[str, int] = {}
    for how, _ in results.values():
        counts[how] = counts.get(how, 0) + 1
    print(counts)
    if options.json:
        options.json.write_text(json.dumps({"counts": counts, "types": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
