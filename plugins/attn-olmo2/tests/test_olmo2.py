"""OLMo 2 beside transformers: whole, in steps, padded, from GGUF, packed, served, and whatever its config.json says."""

from __future__ import annotations

import json
from pathlib import Path

import attn_olmo2.olmo2
import gguf
import numpy as np
import pytest
import torch
from attn_core.errors import CheckpointInvalid, Incompatible
from attn_engine import LocalClient
from attn_models.adapters.registry import decoder_adapter
from attn_models.loading import load_model, save_model
from attn_models.sources import convert
from attn_models.tokenizers import character_tokenizer
from attn_schema import SamplingParams
from attn_testing.config_changes import changes, require_right, verdict
from attn_testing.families import NARROW
from attn_testing.memory import stepped_logits


def written(folder, family="olmo2", **fields):
    """A random model of transformers in a folder, every weight far from its initial value."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **NARROW | fields)
    peer = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in peer.named_parameters():
            weight.normal_(mean=float("norm" in name), std=0.2)
    peer.save_pretrained(folder)
    return peer


def test_the_family_takes_at_most_90_lines():
    lines = [line for path in Path(attn_olmo2.olmo2.__file__).parent.glob("*.py") for line in path.open()]
    assert len(lines) <= 90


@pytest.mark.oracle
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_key_value_heads": 4, "tie_word_embeddings": True, "attention_bias": True},
        {"rms_norm_eps": 1e-3, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ],
    ids=["grouped", "tied, biased", "other base", "stretched"],
)
def test_logits_are_those_of_transformers_whole_in_steps_and_padded(tmp_path, fields):
    peer = written(tmp_path / "theirs", **fields)
    model = load_model(tmp_path / "theirs").model
    prompts, longest = [torch.randint(61, (length,)) for length in (20, 1, 7)], 20
    tokens, keep = torch.zeros(3, longest, dtype=torch.int64), torch.zeros(3, longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)], keep[row, : len(prompt)] = prompt, 1
    with torch.no_grad():
        theirs = peer(tokens, attention_mask=keep).logits
        for row, prompt in enumerate(prompts):
            expected = theirs[row, : len(prompt)]
            torch.testing.assert_close(model(prompt[None])[0], expected, rtol=0, atol=1e-5)
            sizes = [1] * len(prompt) if row else [6, 9, 1, 1, 1, 1, 1]
            torch.testing.assert_close(stepped_logits(model, prompt, sizes), expected, rtol=0, atol=1e-5)
    save_model(tmp_path / "ours", model, layout="olmo2")
    again = type(peer).from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, peer(tokens).logits)
    assert "attn-olmo2" in json.loads((tmp_path / "ours" / "config.json").read_text())["requires"]


def their_logits(transformers, folder, ids):
    """The logits of transformers for the config.json in `folder`, where the weights go; None where it has none."""
    torch.manual_seed(0)
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        peer = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
        for name, weight in peer.named_parameters():
            weight.normal_(mean=float("norm" in name), std=0.2)
        peer.save_pretrained(folder / "written")
        (folder / "written" / "model.safetensors").rename(folder / "model.safetensors")
        return peer(ids).logits
    except Exception:  # noqa: BLE001  (whatever they raise for a config that means nothing)
        return None


@torch.no_grad()
def outcome(transformers, folder, values, ids):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    theirs, adapter = their_logits(transformers, folder, ids), decoder_adapter("olmo2")
    if theirs is None:
        return verdict(None, lambda: adapter.build(adapter.from_hf_config(values))(ids))
    return verdict(theirs, lambda: load_model(folder).model(ids))


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_change_of_a_config_gives_the_logits_of_transformers_or_is_refused(tmp_path, record_property):
    transformers = pytest.importorskip("transformers")
    transformers.logging.disable_progress_bar()
    ids = torch.randint(1, 30, (1, 20), generator=torch.Generator().manual_seed(1))
    config = transformers.Olmo2Config(**NARROW)
    found = {
        f"{number}, {words}": outcome(
            transformers, tmp_path / str(number), values, ids if values.get("vocab_size") != 1 else 0 * ids
        )
        for number, (words, values) in enumerate(changes(config.to_dict()))
    }
    record_property("outcomes", require_right("olmo2", found, equal=50))


WORDS = ["<|end|>", *(chr(c) for c in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x144))), "he"]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_of(path, peer, **changed):
    """What llama.cpp's converter writes of the model, by gguf's own writer and names."""
    writer = gguf.GGUFWriter(path, "olmo2")
    config = peer.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"])
    if config.model_type == "olmo3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(WORDS)
    writer.add_token_types([3] + [1] * (len(WORDS) - 1))
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(0)
    for key, value in changed.items():
        writer.add_string(key, value)
    known = gguf.MODEL_TENSORS[gguf.MODEL_ARCH.OLMO2]
    published = {gguf.TENSOR_NAMES[kind] for kind in known}
    for name, tensor in peer.state_dict().items():
        module, _, leaf = name.rpartition(".")
        head, _, rest = module.removeprefix("model.layers.").partition(".")
        layered = module.startswith("model.layers.")
        theirs = NAMES[rest if layered else module]
        assert (f"blk.{{bid}}.{theirs}" if layered else theirs) in published
        writer.add_tensor(
            f"blk.{head}.{theirs}.{leaf}" if layered else f"{theirs}.{leaf}", tensor.numpy().astype(np.float32)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("family", "fields"), [("olmo2", {}), ("olmo3", {"num_hidden_layers": 4, "sliding_window": 5})]
)
def test_a_gguf_file_becomes_the_same_model(family, fields, tmp_path):
    peer = written(tmp_path / "theirs", family, vocab_size=len(WORDS), **fields)
    folder = convert(gguf_of(tmp_path / "olmo.gguf", peer), tmp_path / "folder", "float32")
    tokens = torch.randint(61, (2, 11))
    with torch.no_grad():
        torch.testing.assert_close(load_model(folder).model(tokens), peer(tokens).logits, rtol=0, atol=1e-5)
    with pytest.raises(Incompatible, match="scaling"):
        convert(gguf_of(tmp_path / "x.gguf", peer, **{"olmo2.rope.scaling.type": "longrope"}), tmp_path / "x")


@pytest.mark.oracle
def test_packed_weights_change_logits_a_little(tmp_path):
    peer = written(tmp_path / "theirs")
    tokens = torch.randint(61, (1, 12))
    with torch.no_grad():
        whole, packed = peer(tokens).logits, load_model(tmp_path / "theirs", quantization="int8").model(tokens)
    assert 0 < (packed - whole).norm() / whole.norm() < 0.05


@pytest.mark.oracle
def test_it_is_served(tmp_path):
    tokenizer = character_tokenizer("abcdefgh ")
    peer = written(tmp_path / "theirs", vocab_size=tokenizer.vocab_size)
    model = load_model(tmp_path / "theirs").model
    save_model(tmp_path / "models" / "olmo", model, tokenizer, layout="olmo2")
    ids = tokenizer.encode("abc")
    for _ in range(8):
        with torch.no_grad():
            ids.append(int(peer(torch.tensor([ids])).logits[0, -1].argmax()))
    with LocalClient(tmp_path) as client:
        answer = client.complete("olmo", "abc", SamplingParams(max_new_tokens=8, ignore_eos=True, temperature=0.0))
    assert answer.text == tokenizer.decode(ids[3:])


def test_a_tensor_that_is_missing_is_named(tmp_path):
    from safetensors.torch import load_file, save_file

    adapter = attn_olmo2.olmo2.Olmo2Adapter()
    values = {key: value for key, value in NARROW.items() if value is not None} | {"model_type": "olmo2"}
    folder = save_model(tmp_path / "model", adapter.build(adapter.from_hf_config(values)), layout="olmo2")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_norm.weight"]
    (folder / "manifest.json").unlink()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointInvalid, match=r"layers\.1\.self_attn\.q_norm\.weight' is missing"):
        load_model(folder)
