"""Every decoder family of a plugin gives the logits of transformers: whole, in steps, padded, written again, served
with shared prefixes and preemption, and whatever its config.json says."""

from __future__ import annotations

import json

import pytest
import torch
from attn_core import installed
from attn_core.errors import Incompatible
from attn_core.stores import StoreSize
from attn_engine import Engine, EngineConfig, Request
from attn_models.adapters.registry import decoder_adapter
from attn_models.loading import load_model, save_model
from attn_models.tokenizers import character_tokenizer
from attn_schema import SamplingParams
from attn_testing.checkpoints import require_same_parameters
from attn_testing.config_changes import changes, require_right, verdict
from attn_testing.families import LATENT, NARROW
from attn_testing.float64 import in_float64, widened
from attn_testing.memory import stepped_logits

transformers = pytest.importorskip("transformers")
transformers.logging.disable_progress_bar()
from transformers.modeling_outputs import CausalLMOutput  # noqa: E402
from transformers.models.glm5_next.modeling_glm5_next import (  # noqa: E402
    Glm5NextPreTrainedModel,
    Glm5NextTextConfig,
    Glm5NextTextModel,
)

FOUR = NARROW | {"num_hidden_layers": 4, "head_dim": 8, "sliding_window": 5}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
TWO_ROPES = {
    "full_attention": {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "partial_rotary_factor": 0.5}
    | {"original_max_position_embeddings": 16},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 1.0},
}
KINDS = {"layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
}
GEMMA4 = NARROW | {
    "num_hidden_layers": 5,
    "head_dim": 8,
    "global_head_dim": 12,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
}
MIXED = NARROW | {"num_hidden_layers": 3, "intermediate_size": 16, "num_local_experts": 5}
BLOCKS = NARROW | {
    "num_hidden_layers": 3,
    "head_dim": 8,
    "rotary_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "index_n_heads": 2,
    "index_head_dim": 10,
    "index_block_size": 3,
    "index_topk_blocks": 3,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "intermediate_size": 16,
    "dense_intermediate_size": 24,
    "shared_intermediate_size": 32,
}
INDEXED = (
    NARROW | LATENT | {"num_hidden_layers": 3, "head_dim": 4, "index_n_heads": 16, "index_head_dim": 6, "index_topk": 5}
)
STREAMS = {name: value for name, value in NARROW.items() if name != "num_key_value_heads"} | {
    "num_hidden_layers": 4,
    "head_dim": 12,
    "qk_rope_head_dim": 4,
    "q_lora_rank": 20,
    "o_groups": 2,
    "o_lora_rank": 6,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    "index_n_heads": 16,
    "index_head_dim": 6,
    "index_topk": 3,
    "moe_intermediate_size": 16,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
}
DELTA_AND_POOLS = {name: value for name, value in NARROW.items() if name != "num_key_value_heads"} | {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention", "indexed_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "index_n_heads": 16,
    "index_head_dim": 6,
    "index_topk": 8,
    "index_kpool": 4,
    "linear_num_heads": 3,
    "linear_head_dim": 6,
    "linear_conv_kernel_dim": 3,
    "moe_intermediate_size": 16,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
TINY = {
    "afmoe": {
        "": FOUR | EXPERTS | {"route_scale": 1.7, "mup_enabled": True},
        "all but one dense": FOUR | EXPERTS | KINDS | {"num_dense_layers": 3, "num_shared_experts": 1},
    },
    "deepseek_v32": {
        "": INDEXED | {"n_group": 4, "topk_group": 2},
        "stretched": INDEXED
        | {"mlp_layer_types": ["dense", "dense", "sparse"], "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5}
        | {
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale_all_dim": 0.7}
            | {"mscale": 1.0, "original_max_position_embeddings": 16}
        },
    },
    "deepseek_v4": {
        "": STREAMS | {"layer_types": [*STREAMS["layer_types"], "compressed_sparse_attention"]},
        "unscaled": STREAMS
        | {"num_hidden_layers": 3, "mlp_layer_types": ["hash_moe", "hash_moe", "moe"], "hc_mult": 2}
        | {"rope_scaling": None, "compress_rope_theta": 3e3, "hc_sinkhorn_iters": 3, "swiglu_limit": 0.4},
    },
    "gemma4_text": {
        "": GEMMA4
        | {"vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 6}
        | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "final_logit_softcapping": 3.0},
        "experts": GEMMA4 | EXPERTS | {"hidden_size_per_layer_input": 0, "enable_moe_block": True, "top_k_experts": 2},
        "keys are values": GEMMA4
        | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True}
        | {"num_global_key_value_heads": 1, "tie_word_embeddings": False},
    },
    "glm5_next_text": {
        "": DELTA_AND_POOLS | {"hc_mult": 2},
        "unbounded, groups": DELTA_AND_POOLS
        | {"linear_lower_bound": None, "n_group": 3, "topk_group": 2, "swiglu_limit": 0.4, "hc_sinkhorn_iters": 3}
        | {"index_kpool": 2, "num_hidden_layers": 3, "mlp_layer_types": ["dense"] * 2 + ["sparse"], "layer_types": None}
        | {"linear_attn_config": {"num_heads": 2, "head_dim": 4, "short_conv_kernel_size": 4, "safe_gate": False}}
        | {"layer_types": ["full_attention", "linear_attention", "indexed_attention"], "n_shared_experts": 2},
    },
    "glm_moe_dsa": {"": INDEXED | {"rms_norm_eps": 1e-5, "n_group": 1}},
    "diffllama": {
        "": NARROW | {"num_hidden_layers": 3, "head_dim": 8, "rms_norm_eps": 1e-4},
        "groups, biases": NARROW
        | {"num_attention_heads": 8, "num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True},
    },
    "flint": {
        "": FOUR | EXPERTS | {"shared_expert_intermediate_size": 32},
        "one dense": FOUR | EXPERTS | KINDS | {"shared_expert_intermediate_size": 16, "mlp_only_layers": [0]},
    },
    "granite_swa": {
        "": FOUR
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2}
        | {"logits_scaling": 2.0, "layer_rope_theta": [0, 1e4, 5e3, 1e4], "pad_token_id": None},
        "other kinds": FOUR | KINDS | {"attention_bias": True, "tie_word_embeddings": False},
    },
    "kimi_linear": {
        "": {name: value for name, value in NARROW.items() if name != "num_key_value_heads"}
        | {"num_hidden_layers": 4, "num_attention_heads": 4, "num_experts": 6, "num_experts_per_token": 2}
        | {"moe_intermediate_size": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
        | {"v_head_dim": 6, "num_shared_experts": 2, "first_k_dense_replace": 2, "num_key_value_heads": 4}
        | {
            "linear_attn_config": {"num_heads": 3, "head_dim": 6, "short_conv_kernel_size": 3}
            | {"full_attn_layers": [2, 4], "kda_layers": [1, 3]}
        },
    },
    "laguna": {
        "": FOUR
        | EXPERTS
        | KINDS
        | {"shared_expert_intermediate_size": 32, "moe_routed_scaling_factor": 1.7}
        | {"num_attention_heads_per_layer": [4, 6, 4, 2], "rope_parameters": TWO_ROPES},
        "per element": FOUR
        | EXPERTS
        | KINDS
        | {"gating": "per-element", "shared_expert_intermediate_size": 16}
        | {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"]},
    },
    "minimax": {
        "": MIXED | {"full_attn_alpha_factor": 1.4, "linear_attn_beta_factor": 0.6, "mlp_alpha_factor": 1.2},
        "linear first": MIXED
        | {"layer_types": ["linear_attention", "linear_attention", "full_attention"], "head_dim": 10}
        | {"linear_attn_alpha_factor": 0.8, "full_attn_beta_factor": 1.3, "mlp_beta_factor": 0.7},
    },
    "minimax_m2": {
        "": NARROW
        | {"head_dim": 12, "intermediate_size": 16, "num_local_experts": 5, "num_experts_per_tok": 2, "rotary_dim": 6},
    },
    "minimax_m3_vl_text": {
        "": BLOCKS | {"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]},
        "two local": BLOCKS
        | {"layer_types": ["minimax_m3_sparse"] * 3, "index_local_blocks": 2}
        | {"mlp_layer_types": ["sparse"] * 3, "shared_intermediate_size": 16}
        | {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
            "rotary_dim": 8,
        },
    },
    "qwen3_5_text": {
        "": FOUR | DELTA | {"sliding_window": None},
        "first full": NARROW
        | DELTA
        | {"head_dim": 16, "layer_types": ["full_attention", "linear_attention"]}
        | {"tie_word_embeddings": True},
    },
    "qwen3_5_moe_text": {"": FOUR | DELTA | EXPERTS | {"sliding_window": None, "shared_expert_intermediate_size": 32}},
    "lfm2": {
        "": NARROW
        | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8},
        "biased, tied": NARROW
        | {"layer_types": ["full_attention", "conv"], "conv_bias": True, "conv_L_cache": 5}
        | {"block_auto_adjust_ff_dim": False, "tie_word_embeddings": False},
    },
}
ROUNDED = {"minimax": 1e-6}
"""Families whose checkpoints hold decays, rounded to float32, which transformers reads."""
LEFT_TO_CHANCE = frozenset({"index_n_heads 1", "index_head_dim 1"})
"""With one head most index scores are exactly 0, and the norm of keys of one element is the same for all of them:
transformers takes any of those that are equal."""
CASES = [(family, name) for family in TINY for name in TINY[family]]


class Glm5NextForCausalLM(Glm5NextPreTrainedModel):
    """The text model with the matrix that transformers only has beside its vision model."""

    config_class = Glm5NextTextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = Glm5NextTextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, tokens, attention_mask=None, return_dict=True):
        hidden = self.model(tokens, attention_mask=attention_mask, return_dict=return_dict).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(hidden))


transformers.AutoModelForCausalLM.register(Glm5NextTextConfig, Glm5NextForCausalLM, exist_ok=True)


def drawn(config):
    """A random model of transformers, every weight and bias far from its initial value so that each one counts."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(mean=float("norm" in name), std=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith(("bias", "scalar")):
                buffer.normal_(mean=float(name.endswith("scalar")), std=0.3)
            if name.endswith("tid2eid"):
                buffer.random_(config.n_routed_experts)
    return model


@pytest.fixture(params=CASES, ids=lambda case: ", ".join(part for part in case if part))
def peer(request):
    family, name = request.param
    return drawn(transformers.AutoConfig.for_model(family, **TINY[family][name]))


NEAR = {"qwen3_5_moe_text": 2e-4}
"""Where float32 differs more by chip: recurrences before routers."""


def test_logits_are_those_of_transformers_whole_in_steps_and_padded(peer, tmp_path):
    peer.save_pretrained(tmp_path)
    model = load_model(tmp_path).model
    prompts, longest = [torch.randint(61, (length,)) for length in (20, 1, 7)], 20
    tokens, keep = torch.zeros(3, longest, dtype=torch.int64), torch.zeros(3, longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)], keep[row, : len(prompt)] = prompt, 1
    with torch.no_grad():
        theirs = peer(tokens, attention_mask=keep).logits
        for row, prompt in enumerate(prompts):
            expected = theirs[row, : len(prompt)]
            near = {"rtol": 1e-4, "atol": NEAR.get(peer.config.model_type, 2e-5)}
            torch.testing.assert_close(model(prompt[None])[0], expected, **near)
            sizes = [1] * len(prompt) if row else [6, 9, 1, 1, 1, 1, 1]
            torch.testing.assert_close(stepped_logits(model, prompt, sizes), expected, **near)


def test_transformers_reads_what_is_written_in_its_layout(peer, tmp_path):
    peer.save_pretrained(tmp_path / "theirs")
    loaded = load_model(tmp_path / "theirs")
    save_model(tmp_path / "ours", loaded.model, layout=peer.config.model_type)
    require_same_parameters(load_model(tmp_path / "ours").model, loaded.model)
    written = tmp_path / "ours" / "config.json"
    # Tokens that their config classes name by default are not among these few.
    written.write_text(json.dumps(json.loads(written.read_text()) | {"pad_token_id": None}))
    again = type(peer).from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    tokens = torch.randint(61, (2, 11))
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, peer(tokens).logits)


def test_requests_that_share_a_prefix_and_preempt_each_other_get_the_tokens_of_transformers(peer, tmp_path):
    """Memory for two of four requests, prompts in chunks of five tokens; the first has ended when the others come."""
    peer.save_pretrained(tmp_path)
    model, expected = load_model(tmp_path).model, {}
    prefix = torch.randint(1, 60, (17,)).tolist()
    prompts = {str(number): [*prefix, *range(3, 5 + number)] for number in range(4)}
    with torch.no_grad():
        for name, prompt in prompts.items():
            ids = list(prompt)
            for _ in range(20):
                ids.append(int(peer(torch.tensor([ids])).logits[0, -1].argmax()))
            expected[name] = ids
    store = installed().caches.get("shared").create(model.state_specs(), StoreSize(tokens=80, requests=4))
    letters = character_tokenizer("".join(map(chr, range(0x21, 0x21 + 61))))
    engine = Engine(model, store, letters, EngineConfig(max_num_batched_tokens=5, max_num_seqs=4))
    greedy = SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True)
    found = {name: list(prompt) for name, prompt in prompts.items()}
    for names in (["0"], ["1", "2", "3"]):
        for name in names:
            engine.submit(Request(id=name, token_ids=tuple(prompts[name]), params=greedy))
        while not engine.idle:
            for output in engine.step():
                found[output.request_id] += [token.id for token in output.delta.tokens]
    assert found == expected
    counted = engine.stats()
    assert counted.preemptions > 0
    assert counted.cached_tokens > 0


@torch.no_grad()
def outcome(folder, family, values, ids):
    """What a changed config.json comes to in float64, with weights that transformers wrote for it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    adapter = decoder_adapter(family)
    try:
        peer = drawn(transformers.AutoConfig.from_pretrained(folder))
        for weight in peer.parameters():
            # Some families store gains minus 1, which is added to multiples of 2⁻¹² without rounding.
            weight.mul_(4096).round_().div_(4096)
        peer.save_pretrained(folder / "written")
        (folder / "written" / "model.safetensors").rename(folder / "model.safetensors")
        peer(ids, return_dict=True)
    except Exception:  # noqa: BLE001  (whatever they raise for a config that means nothing)
        return verdict(None, lambda: adapter.build(adapter.from_hf_config(values))(ids))

    # torch multiplies the matrices of grouped experts in float32 only.
    plain = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float64}
    with in_float64():
        theirs = widened(lambda: type(peer)._from_config(peer.config, **plain), peer)(ids, return_dict=True).logits

    def ours():
        model = load_model(folder, "float32").model
        with in_float64():
            return widened(lambda: adapter.build(model.config), model)(ids)

    return verdict(theirs, ours, tolerance=ROUNDED.get(family, 1e-8))


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", TINY)
def test_every_change_of_a_config_gives_the_logits_of_transformers_or_is_refused(tmp_path, family, record_property):
    ids = torch.randint(1, 30, (1, 20), generator=torch.Generator().manual_seed(1))
    config = transformers.AutoConfig.for_model(family, **TINY[family][""])
    found = {
        f"{number}, {words}": outcome(
            tmp_path / str(number), family, values, ids if values.get("vocab_size") != 1 else 0 * ids
        )
        for number, (words, values) in enumerate(changes(config.to_dict()))
        if words not in LEFT_TO_CHANCE
    }
    record_property("outcomes", require_right(family, found, equal=30))


SEEING = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
PUBLISHED = {
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", "qwen3_5_text", SEEING | {"num_position_embeddings": 16}),
    "gemma4": ("Gemma4ForConditionalGeneration", "gemma4_text", SMALL | {"num_key_value_heads": 2, "head_dim": 8}),
    "glm5_next": ("Glm5NextForConditionalGeneration", "glm5_next_text", SEEING),
    "minimax_m3_vl": ("MiniMaxM3SparseForConditionalGeneration", "minimax_m3_vl_text", SMALL),
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_the_text_model_of_published_files_is_read_beside_their_vision_model(tmp_path, family):
    kind, text_family, vision = PUBLISHED[family]
    text = {name: value for name, value in TINY[text_family][""].items() if value is not None} | {"pad_token_id": 0}
    config = transformers.AutoConfig.for_model(family, text_config=text, vision_config=vision)
    torch.manual_seed(0)
    peer = getattr(transformers, kind)(config).float().eval()
    with torch.no_grad():
        for name, weight in peer.named_parameters():
            weight.normal_(mean=float("norm" in name), std=0.2)
    peer.save_pretrained(tmp_path)
    tokens = torch.randint(1, 30, (2, 11))
    model = load_model(tmp_path).model
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), peer(tokens).logits, rtol=1e-4, atol=2e-5)
    with pytest.raises(Incompatible, match=text_family):
        save_model(tmp_path / "ours", model, layout=family)


def test_deepseek_v4_is_read_as_published(tmp_path):
    """The files of its authors name the same tensors in another way, and lack the first component of most names."""
    from safetensors.torch import load_file, save_file

    peer = drawn(transformers.AutoConfig.for_model("deepseek_v4", **TINY["deepseek_v4"]["unscaled"]))
    peer.save_pretrained(tmp_path)
    model = load_model(tmp_path).model
    tensors = load_file(tmp_path / "model.safetensors")
    published = {"embed_tokens.": "embed.", "hc_head.hc_": "hc_head_", ".attn.norm.": ".attn.kv_norm."}
    renamed = {}
    for name, tensor in tensors.items():
        short = name.removeprefix("model.")
        for written, read in published.items():
            short = short.replace(written, read)
        renamed[short] = tensor
    save_file(renamed | {"mtp.0.norm.weight": torch.ones(32)}, tmp_path / "model.safetensors")
    ratios = {"layer_types": None, "compress_ratios": [0, 128, 4, 0], "compress_rates": None}
    config = json.loads((tmp_path / "config.json").read_text())
    listed = config | ratios | {"compress_rate_csa": 2, "compress_rate_hca": 4, "mlp_layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(listed | {"num_hash_layers": 2}))
    require_same_parameters(load_model(tmp_path).model, model)
    assert load_model(tmp_path).model.config == model.config
