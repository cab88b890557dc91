"""Qwen3-Next, whose layers two plugins compute: folders of transformers both ways, steps, and the engine."""

from __future__ import annotations

import pytest
import torch
from attn_core import RaggedBatch, installed
from attn_core.errors import Incompatible, InvalidValue, UnknownName
from attn_engine import EngineConfig, Request, SamplingParams, build_engine
from attn_models.adapters.registry import decoder_adapter
from attn_models.decoder.decoder import Decoder
from attn_models.loading import load_model, save_model
from attn_schema.decoder import DecoderConfig
from attn_testing.checkpoints import require_same_parameters
from attn_testing.memory import DictionaryStore

transformers = pytest.importorskip("transformers")
modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")


TINY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 96,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 24,
    "rms_norm_eps": 1e-4,
    "pad_token_id": None,
}
CASES = {
    "three to one": {},
    "another period, scores of all experts": {
        "layer_types": ["full_attention", "linear_attention"] * 2,
        "norm_topk_prob": False,
    },
    "the first layer dense, a key for each head, tied": {
        "mlp_only_layers": [0],
        "linear_num_key_heads": 4,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-3,
    },
    "no experts, half of a head turned": {
        "num_experts": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    },
    "only softmax": {"layer_types": ["full_attention"] * 4},
}


@pytest.fixture(params=CASES)
def peer(request):
    """A random model of transformers, every weight far from its initial value so that each one counts."""
    torch.manual_seed(0)
    return shaken(**CASES[request.param])


def shaken(**fields):
    model = modeling.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**TINY | fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("A_log"):
                parameter.normal_(mean=float("linear_attn.norm" in name), std=0.1)
    return model


class Wide:
    """The module torch, in which float32 is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture
def exact(monkeypatch):
    """A call of a model of transformers in float64 throughout: it computes parts in float32 whatever its type."""

    def call(peer, tokens):
        rope, rotary = peer.config.rope_parameters, peer.model.rotary_emb
        steps = torch.arange(len(rotary.inv_freq), dtype=torch.float64) / len(rotary.inv_freq)
        rotary.inv_freq = rope["rope_theta"] ** -steps
        peer.set_experts_implementation("eager")  # their grouped product knows no float64
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(modeling, "torch", Wide())
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            return peer(tokens).logits

    return call


def loaded(peer, folder, dtype="float32"):
    peer.save_pretrained(folder)
    return load_model(folder, dtype).model


def in_steps(model, prompts, plan, dtype):
    """Logits of each prompt computed in steps; `plan[r]` lists how many tokens each step takes of prompt r."""
    store = DictionaryStore(model.state_specs(), dtype)
    for request in range(len(prompts)):
        store.admit(request)
    done, parts = [0] * len(prompts), [[] for _ in prompts]
    for counts in zip(*plan, strict=True):
        rows = [r for r, count in enumerate(counts) if count]
        batch = RaggedBatch.of([counts[r] for r in rows], [done[r] for r in rows], torch.tensor)
        tokens = torch.cat([prompts[r][done[r] : done[r] + counts[r]] for r in rows])
        with torch.no_grad():
            logits = model.logits(model.step(tokens, batch, store.view(batch, rows)))
        for span in batch.spans():
            parts[rows[span.request]].append(logits[span.start : span.stop])
        done = [before + count for before, count in zip(done, counts, strict=True)]
    return [torch.cat(part) for part in parts]


def test_a_checkpoint_gives_the_logits_of_transformers_whole_and_in_steps(peer, tmp_path):
    model = loaded(peer, tmp_path)
    prompts = [torch.randint(61, (length,)) for length in (20, 7)]
    plan = [[6, 9, 1, 1, 1, 1, 1], [0, 3, 1, 1, 1, 1, 0]]
    for prompt, stepped in zip(prompts, in_steps(model, prompts, plan, "float32"), strict=True):
        with torch.no_grad():
            whole = peer(prompt[None]).logits[0]
            torch.testing.assert_close(model(prompt[None])[0], whole, rtol=0, atol=1e-5)
        torch.testing.assert_close(stepped, whole, rtol=0, atol=1e-5)


def test_in_float64_the_logits_are_those_of_transformers_over_whole_chunks(peer, exact, tmp_path):
    model = loaded(peer.double(), tmp_path, "float64")
    tokens = torch.randint(61, (2, 90))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), exact(peer, tokens), rtol=0, atol=1e-10)


def test_padding_on_the_left_and_right_changes_no_logits_of_transformers_that_ours_has(tmp_path):
    peer = shaken()
    model, tokens = loaded(peer, tmp_path), torch.randint(61, (9,))
    for left, right in ((4, 0), (0, 4)):
        padded = torch.nn.functional.pad(tokens, (left, right))[None]
        keep = torch.nn.functional.pad(torch.ones(9, dtype=torch.int64), (left, right))[None]
        with torch.no_grad():
            theirs = peer(padded, attention_mask=keep).logits[0, left : left + 9]
            torch.testing.assert_close(model(tokens[None])[0], theirs, rtol=0, atol=1e-5)


def test_it_is_written_so_that_transformers_computes_the_same(peer, tmp_path):
    model = loaded(peer, tmp_path / "theirs")
    save_model(tmp_path / "ours", model, layout="qwen3_next")
    require_same_parameters(load_model(tmp_path / "ours").model, model)
    again = modeling.Qwen3NextForCausalLM.from_pretrained(tmp_path / "ours").eval()
    tokens = torch.randint(61, (2, 11))
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, peer(tokens).logits)


def test_its_maps_are_those_of_transformers_in_the_layers_that_have_them_there(tmp_path):
    peer = shaken()
    model, tokens = loaded(peer, tmp_path), torch.randint(61, (13,))
    peer.set_attn_implementation("eager")
    with torch.no_grad():
        theirs = peer(tokens[None], output_attentions=True).attentions
    torch.testing.assert_close(model.attention_maps(tokens, [3])[3], theirs[-1][0], rtol=0, atol=4e-6)


def requests():
    generator = torch.Generator().manual_seed(1)
    stem = torch.randint(61, (20,), generator=generator).tolist()
    task = SamplingParams(max_new_tokens=8, ignore_eos=True)
    return [Request(id=f"r{n}", token_ids=(*stem[: 5 * n + 1], n, 3), params=task) for n in range(5)]


def served(engine, asked):
    made, waiting, steps = {request.id: [] for request in asked}, list(asked), 0
    while waiting or not engine.idle:
        if waiting and steps % 2 == 0:
            engine.submit(waiting.pop(0))
        for event in engine.step():
            assert event.error is None, event.error
            made[event.request_id] += [token.id for token in event.delta.tokens]
        steps += 1
    return made


def test_a_crowd_in_little_room_is_served_the_tokens_that_transformers_generates(tmp_path):
    torch.manual_seed(2)
    peer = shaken()
    engine = build_engine(
        loaded(peer, tmp_path), config=EngineConfig(kv_cache="shared", max_num_seqs=3), kv_cache_tokens=96
    )
    made = served(engine, requests())
    for request in requests():
        with torch.no_grad():
            whole = peer.generate(
                torch.tensor([request.token_ids]), max_new_tokens=8, do_sample=False, eos_token_id=None
            )
        assert made[request.id] == whole[0, len(request.token_ids) :].tolist(), request.id
    assert (engine.stats().running, engine.stats().kv_tokens_used) == (0, 0)


@pytest.mark.parametrize(("name", "package"), [("gated", "attn-gated"), ("gated_deltanet", "attn-recurrent")])
def test_without_a_plugin_a_folder_says_what_to_install(name, package, tmp_path, monkeypatch):
    shaken().save_pretrained(tmp_path)
    monkeypatch.delitem(installed().mechanisms._items, f"{package}/{name}")
    with pytest.raises(UnknownName, match=f"'{name}'.*qwen3_next.*pip install {package}$"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers"),
        ({"shared_expert_intermediate_size": 13}, "shared_expert_intermediate_size: 13"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types"),
        ({"linear_num_key_heads": 3}, "key_heads: 3"),
        ({"linear_conv_kernel_dim": 0}, "taps: 0"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: 9"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size: is missing"),
    ],
)
def test_what_is_not_computed_or_contradicts_itself_is_refused_by_name(change, named):
    with pytest.raises(InvalidValue, match=named):
        Decoder(decoder_adapter("qwen3_next").from_hf_config(TINY | change))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"shared_expert_gate": False}, "without a gate"),
        ({"routing": "deepseek_v2"}, "routing 'deepseek_v2'"),
        ({"norm_eps": 1e-2}, "'gated'"),
        ({"num_kv_heads": 4}, None),
        ({"pattern": ["mha"]}, "'mha'"),
        ({"pattern": [{"mechanism": "gated", "options": {"per": "head", "norm_eps": 1e-4}}]}, "'gated'"),
        ({"pattern": [{"mechanism": "gated", "options": {"norm_eps": 1e-4, "rotary": None}}]}, "'gated'"),
        (
            {"pattern": [{"mechanism": "gated_deltanet", "options": {"rotary": None, "num_kv_heads": None}}]},
            "another eps",
        ),
    ],
)
def test_a_decoder_that_its_layout_cannot_say_is_refused(change, named):
    adapter = decoder_adapter("qwen3_next")
    config = DecoderConfig.from_plain(adapter.from_hf_config(TINY).plain() | change)
    if named is None:
        assert adapter.from_hf_config(adapter.to_hf_config(config)) == config
        return
    with pytest.raises(Incompatible, match=named):
        adapter.to_hf_config(config)


def test_a_config_of_the_first_generation_is_read():
    beside = {"rope_theta": 3e4, "partial_rotary_factor": 0.5, "full_attention_interval": 2}
    read = decoder_adapter("qwen3_next").from_hf_config(TINY | beside)
    assert (read.rope_theta, read.partial_rotary_factor) == (3e4, 0.5)
    assert [read.choice(layer).mechanism for layer in range(4)] == [
        "attn-recurrent/gated_deltanet",
        "attn-gated/gated",
    ] * 2
    assert decoder_adapter("qwen3_next").from_hf_config(TINY).partial_rotary_factor == 0.25


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_its_weights_can_be_packed(weights, tmp_path):
    torch.manual_seed(3)
    shaken(hidden_size=64, moe_intermediate_size=32, shared_expert_intermediate_size=32).save_pretrained(tmp_path)
    tokens = torch.randint(61, (1, 12))
    with torch.no_grad():
        whole, packed = (load_model(tmp_path, quantization=how).model(tokens) for how in (None, weights))
    torch.testing.assert_close(packed, whole, rtol=0, atol=1e-5 if weights == "auto" else 0.2)
