"""DeepSeek-V3 as transformers makes it, read from its folder and served from latents, says what theirs says."""

import pytest
import torch
from attn_core import state_bytes
from attn_engine import EngineConfig, Request, SamplingParams, build_engine
from attn_models.loading import load_model

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.oracle

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.fixture
def peer():
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**SIZES)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def greedy(peer, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(peer(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("cache", ["contiguous", "paged"])
def test_a_crowd_of_ragged_requests_gives_the_tokens_of_transformers(peer, cache, tmp_path):
    peer.save_pretrained(tmp_path)
    model = load_model(tmp_path).model
    prompts = {f"r{n}": torch.randint(61, (length,)).tolist() for n, length in enumerate((13, 1, 20, 6, 9))}
    engine = build_engine(model, config=EngineConfig(kv_cache=cache, max_num_seqs=3))
    for name, prompt in prompts.items():
        task = SamplingParams(max_new_tokens=8, temperature=0, ignore_eos=True)
        engine.submit(Request(id=name, token_ids=tuple(prompt), params=task))
    said = {name: [] for name in prompts}
    while not engine.idle:
        for event in engine.step():
            said[event.request_id] += [token.id for token in event.delta.tokens]
    assert said == {name: greedy(peer, prompt, 8) for name, prompt in prompts.items()}


def test_what_is_remembered_weighs_what_their_cache_holds(peer, tmp_path):
    peer.save_pretrained(tmp_path)
    specs = load_model(tmp_path).model.state_specs()
    prompt = torch.randint(61, (1, 10))
    with torch.no_grad():
        cache = peer(prompt, use_cache=True).past_key_values
    theirs = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert sum(state_bytes(states, tokens=10, dtype="float32") for states in specs.values()) == theirs
