"""Families that only transformers knows are built by it, and generate its tokens from our engine's batches and cache.

`benchmarks/transformers_types.py` does the same for all of its causal language models.
"""

from __future__ import annotations

import json

import pytest
import torch
from attn_core.errors import CheckpointInvalid, Incompatible, UserError
from attn_engine import EngineConfig, Request, SamplingParams, build_engine
from attn_engine.host.ranks import load_part
from attn_models.loading import load_model
from attn_models.sources.check import check_model
from attn_testing.families import NARROW

transformers = pytest.importorskip("transformers")
transformers.logging.disable_progress_bar()

SIZES = NARROW | {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TINY = {
    "arcee": {"head_dim": 8},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 3.0},
    "vaultgemma": {"head_dim": 8, "sliding_window": 5, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0},
    "mimo_v2_flash": {"head_dim": 8, "swa_head_dim": 8, "sliding_window": 5},
    "ctrl": {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 48, "n_positions": 64},
}
OTHER = {
    # Short convolutions beside keys and values, in padded batches.
    "lfm2_moe": {"layer_types": ["full_attention", "conv"], "num_experts": 4, "num_experts_per_tok": 2},
    # A window beside states: all rows are kept, and masks hide them.
    "zaya": {"num_experts": 4, "num_experts_per_tok": 1, "head_dim": 8},
    # Only states, of which no chunk but the first may be longer than a token.
    "falcon_mamba": {"state_size": 4},
    # Attention that cannot be exchanged, over windows.
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "window_size": 5, "attention_types": [[["global", "local"], 1]]},
    # Encoders that their config makes decoders, whose own layout here is that of an encoder.
    "bert": {"is_decoder": True},
    # Requests of a batch are mixed by transformers: each is computed alone.
    "rwkv": {"attention_hidden_size": 32, "context_length": 64},
    # Positions that count the cache: no request is computed with one of another length.
    "bart": {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},
}
LONGER = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 40}
BLOOM = {"n_layer": 2, "n_head": 4, "apply_residual_connection_post_layernorm": True}
REFUSED = {
    # Configs that the layout of the family refuses, and the field that it names.
    "phi": ({"qk_layernorm": True}, "qk_layernorm"),
    "stablelm": ({"qk_layernorm": True}, "qk_layernorm"),
    "opt": ({"word_embed_proj_dim": 16, "do_layer_norm_before": False, "ffn_dim": 48}, "word_embed_proj_dim"),
    "llama": ({"rope_parameters": LONGER}, "rope_parameters.rope_type"),
    "gpt2": ({"n_embd": 32, "n_layer": 2, "n_head": 4, "add_cross_attention": True}, "add_cross_attention"),
    "bloom": (BLOOM, "apply_residual_connection_post_layernorm"),
    "mixtral": ({"hidden_act": "gelu", "num_local_experts": 4}, "hidden_act"),
}
PROMPTS = [[(5 * row + 3 * place) % 60 + 3 for place in range(2 + 3 * row)] for row in range(8)]
NEW = 10


def saved(kind, folder, **sizes):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES | sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data += (
            0.2 * torch.randn_like(parameter) if parameter.dim() > 1 else 0.1 * torch.randn_like(parameter)
        )
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def alone(model, prompt):
    made = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
    return made[0, len(prompt) :].tolist()


def served(model, tokens=8 * 40):
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=12, kv_cache="paged")
    engine = build_engine(model, config=config, kv_cache_tokens=tokens)
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_new_tokens=NEW, temperature=0.0, ignore_eos=True)
        engine.submit(Request(id=str(number), token_ids=prompt, params=params))
    made: list[list[int]] = [[] for _ in PROMPTS]
    while not engine.idle:
        for event in engine.step():
            made[int(event.request_id)] += [token.id for token in event.delta.tokens]
    return made


@pytest.mark.parametrize("kind", [*TINY, *OTHER])
def test_a_batch_with_chunked_prompts_has_the_tokens_of_transformers(kind, tmp_path):
    peer = saved(kind, tmp_path, **(TINY | OTHER)[kind])
    loaded = load_model(tmp_path, "float32")
    assert loaded.family == kind
    tokens = torch.tensor([PROMPTS[5]])
    torch.testing.assert_close(loaded.model(tokens), peer(tokens).logits, rtol=1e-4, atol=1e-4)
    wanted = [alone(peer, prompt) for prompt in PROMPTS]
    assert served(loaded.model) == wanted
    # Too little memory for all: requests are interrupted and computed again.
    assert served(loaded.model, 48) == wanted
    packed = load_model(tmp_path, "float32", quantization="auto")
    assert packed.parameters == loaded.parameters > sum(each.numel() for each in packed.model.parameters())
    assert served(packed.model) == wanted


@pytest.mark.parametrize("kind", REFUSED)
def test_a_config_that_its_layout_refuses_is_built_by_transformers_and_said_to_be(kind, tmp_path):
    sizes, field = REFUSED[kind]
    peer = saved(kind, tmp_path, **sizes)
    assert served(load_model(tmp_path, "float32").model) == [alone(peer, prompt) for prompt in PROMPTS]
    checked = check_model("it", tmp_path)
    assert checked.refused is None
    assert f"{field}: " in checked.route
    assert type(peer).__name__ in checked.route
    with pytest.raises(CheckpointInvalid) as refused:
        load_model(tmp_path, "float32", model_impl="native")
    assert refused.value.metadata["field"] == field


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"hidden_act": "no such"}, "tried as well"),
        ({"num_hidden_layers": 9999}, "tried as well.*9999 layers"),
        ({"vocab_size": 1 << 40}, "tried as well.*parameters"),
        ({"attn_logit_softcapping": 5.0, "qk_layernorm": False}, "allowed: None$"),  # transformers would ignore it
    ],
)
def test_what_transformers_cannot_build_either_keeps_the_refusal_of_the_layout(change, why, tmp_path):
    saved("phi", tmp_path, **REFUSED["phi"][0])
    config = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointInvalid, match=rf"config\.json: \w+: .* is not allowed.*{why}"):
        load_model(tmp_path, "float32")


def test_what_gave_other_tokens_in_batches_stays_refused(tmp_path):
    saved("falcon", tmp_path, alibi=True)
    with pytest.raises(CheckpointInvalid, match=r"alibi: True is not allowed; allowed: False or None$"):
        load_model(tmp_path, "float32")


def test_who_builds_a_model_may_be_chosen(tmp_path):
    peer = saved("llama", tmp_path)
    config = EngineConfig(num_threads=1)
    built = [
        load_part(tmp_path, config.replace(model_impl=name), 0).model for name in ("auto", "native", "transformers")
    ]
    assert [hasattr(model, "causal") for model in built] == [False, False, True]
    assert [served(model) for model in built] == [[alone(peer, prompt) for prompt in PROMPTS]] * 3
    saved("arcee", tmp_path, **TINY["arcee"])
    with pytest.raises(UserError, match="unknown model_type"):
        load_model(tmp_path, "float32", model_impl="native")


def test_a_window_frees_the_rows_that_no_token_sees(tmp_path):
    saved("vaultgemma", tmp_path, **TINY["vaultgemma"], layer_types=["sliding_attention", "full_attention"])
    states = load_model(tmp_path, "float32").model.state_specs()
    assert [states[name]["kv"].window for name in states] == [5, None]


@pytest.mark.parametrize(
    ("kind", "sizes", "reason"),
    [
        ("bert-generation", {}, "neither causal.*keeps no cache"),
        ("openai-gpt", {"n_embd": 32, "n_layer": 2, "n_head": 4}, "exchanged.*takes no cache"),
    ],
)
def test_what_cannot_be_stepped_is_refused_with_the_reason(kind, sizes, reason, tmp_path):
    saved(kind, tmp_path, **sizes)
    with pytest.raises(Incompatible, match=reason):
        load_model(tmp_path, "float32")


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_positions_that_depend_on_the_longest_sequence_end_where_they_do(kind, tmp_path):
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {}
    rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 40, **factors}
    peer = saved("arcee", tmp_path, **TINY["arcee"], rope_parameters=rope)
    loaded = load_model(tmp_path, "float32")
    assert loaded.model.max_seq_len == 40 < peer.config.max_position_embeddings
    assert served(loaded.model) == [alone(peer, prompt) for prompt in PROMPTS]


def test_a_model_of_images_and_text_answers_to_text_alone(tmp_path):
    text = {"model_type": "arcee", **SIZES, **TINY["arcee"]}
    vision = {"model_type": "clip_vision_model", **NARROW, "image_size": 8, "patch_size": 4}
    torch.manual_seed(0)
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=63)
    peer = transformers.LlavaForConditionalGeneration(config).eval()
    peer.generation_config.eos_token_id = None
    peer.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, "float32")
    assert served(loaded.model) == [alone(peer, prompt) for prompt in PROMPTS]


def test_other_requests_of_the_loader_are_refused_by_name(tmp_path):
    peer = saved("arcee", tmp_path, **TINY["arcee"])
    with pytest.raises(Incompatible, match=r"int4.*int8"):
        load_model(tmp_path, "float32", quantization="int4")
    weights = dict(peer.state_dict())
    weights.pop("model.layers.0.mlp.up_proj.weight")
    peer.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(CheckpointInvalid, match="up_proj"):
        load_model(tmp_path, "float32")
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="code"):
        load_model(tmp_path, "float32")
