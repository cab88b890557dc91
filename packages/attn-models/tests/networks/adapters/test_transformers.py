"""Checkpoints that transformers writes, read by us, give transformers' logits; and the other way round."""

from __future__ import annotations

import json

import pytest
import torch
from attn_models.loading import load_model, save_model
from attn_testing.checkpoints import require_same_parameters

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.oracle

LLAMA = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}


def llama(**fields):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA | fields))


def mistral(**fields):
    return transformers.MistralForCausalLM(transformers.MistralConfig(**LLAMA | fields))


def mixtral(**fields):
    experts = {"num_local_experts": 4, "num_key_value_heads": 2, "head_dim": 8}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**LLAMA | experts | fields))


def gpt2(**fields):
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2 | fields))


def qwen3(**fields):
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**LLAMA | {"head_dim": 12} | fields))


LATENT = LLAMA | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
GROUPED = {"n_group": 4, "topk_group": 2, "num_hidden_layers": 3}


def deepseek2(**fields):
    return transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**LATENT | fields))


def deepseek3(**fields):
    """Its routers drawn with biases, which decide with the scores who is chosen."""
    peer = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**LATENT | GROUPED | fields))
    for name, buffer in peer.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.3)
    return peer


GEMMA = LLAMA | {"head_dim": 12, "num_key_value_heads": 1, "num_hidden_layers": 3, "sliding_window": 5}


def gemma2(**fields):
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**GEMMA | fields))


def gemma3(**fields):
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**GEMMA | fields))


def stretched(**fields):
    return {"rope_theta": 1e4, "original_max_position_embeddings": 16, "factor": 4.0} | fields


PEERS = {
    "llama": lambda: llama(num_key_value_heads=4),
    "llama grouped, tied": lambda: llama(num_key_value_heads=2, tie_word_embeddings=True),
    "llama multi-query": lambda: llama(num_key_value_heads=1),
    "llama with biases": lambda: llama(num_key_value_heads=2, attention_bias=True, mlp_bias=True),
    "llama, wide heads, other base": lambda: llama(
        num_key_value_heads=2,
        head_dim=12,
        rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    ),
    "llama 3, long waves stretched": lambda: llama(
        num_key_value_heads=2,
        rope_parameters=stretched(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    "llama, yarn": lambda: llama(rope_parameters=stretched(rope_type="yarn")),
    "llama, linear": lambda: llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
    "qwen 3": lambda: qwen3(num_key_value_heads=2, rms_norm_eps=1e-4),
    "gemma 2": gemma2,
    "gemma 2, without caps": lambda: gemma2(attn_logit_softcapping=None, final_logit_softcapping=None),
    "gemma 3": lambda: gemma3(layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    "gemma 3, only windows, other scale": lambda: gemma3(query_pre_attn_scalar=40, rms_norm_eps=1e-4),
    "gemma 3, stretched full layers": lambda: gemma3(
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    ),
    "mistral, window of 5": lambda: mistral(num_key_value_heads=2, sliding_window=5),
    "mistral without a window": lambda: mistral(num_key_value_heads=2, sliding_window=None),
    "mixtral": mixtral,
    "mixtral, window of 5, three of six experts": lambda: mixtral(
        num_local_experts=6, num_experts_per_tok=3, sliding_window=5, tie_word_embeddings=True
    ),
    "mixtral, one expert a token": lambda: mixtral(num_experts_per_tok=1, num_key_value_heads=4),
    "deepseek 2, best of all experts": lambda: deepseek2(q_lora_rank=None),
    "deepseek 2, in groups, scaled": lambda: deepseek2(
        topk_method="group_limited_greedy", routed_scaling_factor=16.0, **GROUPED
    ),
    "deepseek 2, yarn with both weights": lambda: deepseek2(
        rope_parameters=stretched(rope_type="yarn", mscale=0.707, mscale_all_dim=0.5)
    ),
    "deepseek 2, no experts": lambda: deepseek2(first_k_dense_replace=2),
    "deepseek 3": deepseek3,
    "deepseek 3, halves turned, no query latent": lambda: deepseek3(rope_interleave=False, q_lora_rank=None),
    "deepseek 3, yarn": lambda: deepseek3(
        rope_parameters=stretched(rope_type="yarn", mscale=1.0, mscale_all_dim=1.0), rms_norm_eps=1e-3
    ),
    "gpt2": gpt2,
    "gpt2 untied": lambda: gpt2(tie_word_embeddings=False),
    "gpt2, exact gelu, wide": lambda: gpt2(activation_function="gelu", n_inner=80, layer_norm_epsilon=1e-3),
}


@pytest.fixture(params=PEERS)
def peer(request):
    """A random model of transformers, every weight far from its initial value so that each one counts."""
    torch.manual_seed(0)
    model = PEERS[request.param]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name or "ln_" in name), std=0.2)
    return model


def ropes(config):
    """The rotary parameters of a config by kind of layer; of one kind that has no name, where all are alike."""
    given = config.rope_parameters
    return given if "full_attention" in given else {None: given}


class ExactRotary(torch.nn.Module):
    """Rotary angles in float64: transformers computes them in float32 whatever the model's type."""

    def __init__(self, config):
        super().__init__()
        size = config.head_dim or config.hidden_size // config.num_attention_heads
        steps = torch.arange(0, size, 2, dtype=torch.float64) / size
        self.frequencies = {kind: rope["rope_theta"] ** -steps for kind, rope in ropes(config).items()}

    def forward(self, hidden, position_ids, layer_type=None):
        angles = (position_ids[..., None].double() * self.frequencies[layer_type]).repeat(1, 1, 2)
        return angles.cos(), angles.sin()


class ExactNorm(torch.nn.RMSNorm):
    """RMSNorm in float64, with a gain that is kept as it is or, in Gemma's, as its distance from one."""

    def forward(self, hidden):
        return torch.nn.functional.rms_norm(hidden, self.normalized_shape, self.weight + self.above, self.eps)


class ExactRouter(torch.nn.Module):
    """Mixtral's router in float64: transformers takes its softmax in float32."""

    def __init__(self, router):
        super().__init__()
        self.weight, self.chosen = router.weight, router.top_k

    def forward(self, hidden):
        scores = hidden @ self.weight.T
        parts, experts = scores.softmax(-1).topk(self.chosen)
        return scores, parts / parts.sum(-1, keepdim=True), experts


def without_float32(peer):
    """The model with the parts of transformers that fall back to float32 replaced by exact ones."""
    peer.model.rotary_emb = ExactRotary(peer.config)
    if peer.config.model_type == "mixtral":
        peer.set_experts_implementation("eager")  # their grouped product knows no float64
    if hasattr(peer.model.embed_tokens, "embed_scale"):
        peer.model.embed_tokens.embed_scale = torch.tensor(peer.config.hidden_size**0.5, dtype=torch.float64)
    for name, module in list(peer.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
            norm = ExactNorm(len(module.weight), eps=eps, dtype=torch.float64)
            norm.weight, norm.above = module.weight, float("Gemma" in type(module).__name__)
            peer.set_submodule(name, norm)
        if type(module).__name__.endswith("TopKRouter"):
            peer.set_submodule(name, ExactRouter(module))
    return peer


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-10)])
def test_a_checkpoint_of_transformers_gives_its_logits_whole_and_in_steps(peer, dtype, tolerance, tmp_path, stepwise):
    peer = peer.to(getattr(torch, dtype))
    peer.save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype).model
    if dtype == "float64" and hasattr(peer, "model"):
        if any(rope["rope_type"] != "default" for rope in ropes(peer.config).values()):
            pytest.skip("transformers stretches angles in float32")
        if peer.config.model_type.startswith("deepseek"):
            pytest.skip("transformers routes and turns in float32")
        if peer.config.model_type == "gemma2":
            pytest.skip("transformers computes the softmax of Gemma 2 in float32")
        peer = without_float32(peer)
    prompts = [torch.randint(61, (length,)).tolist() for length in (20, 7)]
    plan = [[6, 9, 1, 1, 1, 1, 1], [0, 3, 1, 1, 1, 1, 0]]
    with torch.no_grad():
        wholes = [peer(torch.tensor([prompt])).logits[0] for prompt in prompts]
        for prompt, whole, stepped in zip(prompts, wholes, stepwise(model, prompts, plan), strict=True):
            torch.testing.assert_close(model(torch.tensor([prompt]))[0], whole, rtol=0, atol=tolerance)
            torch.testing.assert_close(stepped, whole, rtol=0, atol=tolerance)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_rows_of_a_padded_batch_of_transformers_are_ours_without_padding(peer, side, tmp_path):
    peer.save_pretrained(tmp_path)
    model = load_model(tmp_path).model
    prompts, longest = [torch.randint(61, (length,)) for length in (12, 1, 7)], 12
    tokens, keep = torch.zeros(3, longest, dtype=torch.int64), torch.zeros(3, longest, dtype=torch.int64)
    places = [slice(longest - len(prompt), None) if side == "left" else slice(len(prompt)) for prompt in prompts]
    for row, (prompt, place) in enumerate(zip(prompts, places, strict=True)):
        tokens[row, place], keep[row, place] = prompt, 1
    with torch.no_grad():
        theirs = peer(tokens, attention_mask=keep, position_ids=(keep.cumsum(1) - 1).clamp(min=0)).logits
        for row, (prompt, place) in enumerate(zip(prompts, places, strict=True)):
            torch.testing.assert_close(model(prompt[None])[0], theirs[row, place], rtol=0, atol=1e-5)


def test_transformers_reads_what_is_written_in_its_layout(peer, tmp_path):
    peer.save_pretrained(tmp_path / "theirs")
    loaded = load_model(tmp_path / "theirs")
    save_model(tmp_path / "ours", loaded.model, layout=peer.config.model_type)
    require_same_parameters(load_model(tmp_path / "ours").model, loaded.model)
    again = type(peer).from_pretrained(tmp_path / "ours").eval()
    tokens = torch.randint(61, (2, 11))
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, peer(tokens).logits)


def test_the_attention_maps_are_those_of_transformers(peer, tmp_path):
    peer.save_pretrained(tmp_path)
    peer.set_attn_implementation("eager")
    tokens = torch.randint(61, (13,))
    maps = load_model(tmp_path).model.attention_maps(tokens, [0, 1])
    with torch.no_grad():
        theirs = peer(tokens[None], output_attentions=True).attentions
    for layer in (0, 1):
        torch.testing.assert_close(maps[layer], theirs[layer][0], rtol=0, atol=4e-6)


def test_rotary_bases_are_read_from_both_generations_of_configs(tmp_path):
    llama(num_key_value_heads=2, rope_parameters={"rope_type": "default", "rope_theta": 5e5}).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert load_model(tmp_path).config.rope_theta == 5e5
    del config["rope_parameters"]
    path.write_text(json.dumps(config | {"rope_theta": 3e4, "rope_scaling": None}))
    assert load_model(tmp_path).config.rope_theta == 3e4


def test_gpt2_is_read_without_the_prefix_and_with_the_masks_of_old_checkpoints(tmp_path):
    from safetensors.torch import load_file, save_file

    peer = gpt2().eval()
    peer.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    old |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64).tril() for layer in (0, 1)}
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tokens = torch.randint(61, (2, 11))
    with torch.no_grad():
        torch.testing.assert_close(load_model(tmp_path).model(tokens), peer(tokens).logits, rtol=0, atol=1e-5)
