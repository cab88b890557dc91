"""Whatever a key of a config.json holds, the config is read or refused in words for people."""

from __future__ import annotations

import json
import math
from itertools import product

import pytest
from attn_core.errors import CheckpointInvalid, UserError
from attn_models.adapters.hf_config import check_unread_keys
from attn_models.adapters.registry import ADAPTERS, ENCODER_ADAPTERS
from attn_models.adapters.vit import VitAdapter
from attn_models.loading import load_model, save_model
from attn_models.loading.models import empty_model
from attn_testing.config_changes import ROPES
from attn_testing.families import FAMILIES

VALUES = [None, True, -1, 0, 1.5, math.nan, math.inf, "", "2", [], [[]], ["full"], {}, {"a": []}, 10**30]
IN_A_FILE = [None, True, -1, 1.5, "2", [[]], {"a": []}, 1 << 40, 1 << 60, 10**400]
"""Values that JSON can hold; the last three are too large for tensors, for their sizes, and for floats."""
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
REFORMER = {"attn_layers": ["lsh", "local"], "num_buckets": 4, "attention_head_size": 4, "feed_forward_size": 16}
AXES = {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16]}
VIT = {"image_size": 8, "patch_size": 4, "id2label": {"0": "cat"}}
GPT2 = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": None, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
EVERYTHING = SIZES | REFORMER | AXES | VIT | GPT2 | LATENT | EXPERTS


T5 = {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8, "vocab_size": 61}
AUDIO = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "num_mel_bins": 8}
AUDIO |= {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "max_source_positions": 10}
TOWER = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 40, "num_hidden_layers": 2}
TOWER |= {"image_size": 12, "patch_size": 3}
SEEING = {"text_config": SIZES, "vision_config": TOWER, "image_token_id": 60, "scale_factor": 2}
TRANSLATING = {**AUDIO, "d_model": 32, "max_position_embeddings": 64, "vocab_size": 61}
del TRANSLATING["num_mel_bins"], TRANSLATING["max_source_positions"]
OWN = {
    **dict.fromkeys(("bart", "mbart", "plbart", "pegasus", "blenderbot", "marian", "m2m_100"), TRANSLATING),
    "umt5": T5,
    "clip": {"text_config": {"hidden_size": 32, "num_attention_heads": 4}, "projection_dim": 16},
    "distilbert": {
        "dim": 32,
        "hidden_dim": 48,
        "n_layers": 2,
        "n_heads": 4,
        "vocab_size": 61,
        "max_position_embeddings": 64,
    },
    "deberta-v2": SIZES,
    "siglip": {"text_config": {"hidden_size": 32, "num_attention_heads": 4}},
    "gptj": GPT2 | {"vocab_size": 61, "rotary_dim": 4},
    "mamba2": {
        "hidden_size": 32,
        "num_heads": 4,
        "head_dim": 16,
        "expand": 2,
        "n_groups": 1,
        "num_hidden_layers": 2,
        "vocab_size": 61,
    },
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": 61},
    "smolvlm": SEEING,
    "idefics3": SEEING,
    "t5": T5,
    "mt5": T5 | {"tie_word_embeddings": False},
    "whisper": AUDIO | {"d_model": 32, "max_target_positions": 12, "vocab_size": 61},
}
"""Plain configs of layouts with names of their own."""


def read_by(layout, values, path):
    if layout == "vit":
        return VitAdapter().from_hf_config(values | {"model_type": "vit"}, path)
    adapter = ENCODER_ADAPTERS.get(layout) or ADAPTERS[layout]
    check_unread_keys(values, adapter.known_keys, path)
    return adapter.from_hf_config(values)


def keys_of(layout):
    reads = VitAdapter.known_keys if layout == "vit" else (ENCODER_ADAPTERS.get(layout) or ADAPTERS[layout]).known_keys
    if layout in OWN:
        return OWN[layout], sorted(reads)
    return {key: EVERYTHING[key] for key in EVERYTHING if key in reads}, sorted(reads)


LAYOUTS = sorted({"vit", *ENCODER_ADAPTERS, *ADAPTERS} - {"attn_decoder", "attn_encoder"})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_plain_config_that_is_spoilt_here_is_read(layout, tmp_path):
    config = read_by(layout, keys_of(layout)[0], tmp_path)
    assert getattr(config, "hidden_size", None) or config.size == 32


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_value_of_the_wrong_kind_is_refused_in_words_or_read(layout, tmp_path, some):
    plain, keys = keys_of(layout)
    wrong = []
    for key, value in some(product(keys, VALUES), 4, LAYOUTS.index(layout)):
        try:
            read_by(layout, plain | {key: value}, tmp_path)
        except UserError:
            continue
        except Exception as error:  # noqa: BLE001  (all that is no word for people)
            wrong.append(f"{key}={value!r}: {error!r}")
    assert not wrong, "\n".join(wrong)


def decoder_folder(tmp_path, family):
    """A decoder of the family in its layout, saved under a folder; and its config.json."""
    sizes = {key: value for key, value in FAMILIES[family][""].items() if value is not None}
    adapter = ADAPTERS[family]
    folder = save_model(tmp_path / family, adapter.build(adapter.from_hf_config(sizes)), layout=family)
    (folder / "manifest.json").unlink()
    return folder, json.loads((folder / "config.json").read_text())


def problem_of(folder, values, key, known):
    """What is wrong with the answer to a config.json whose `key` was set: anything but a model, or an error that names
    a key."""
    (folder / "config.json").write_text(json.dumps(values))
    try:
        empty_model(folder)
    except UserError as error:
        named = error.metadata.get("field", "").partition(".")[0]
        return None if key in error.message or named in known else f"names no key: {error!r}"
    except Exception as error:  # noqa: BLE001  (all that is no word for people)
        return repr(error)
    return None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_with_a_wrong_value_in_any_field_is_refused_by_a_key_of_its_config_or_read(family, tmp_path, some):
    folder, plain = decoder_folder(tmp_path, family)
    known, wrong = ADAPTERS[family].known_keys | {"model_type", "quantization_config", "requires", "dtype"}, {}
    for key, value in some(product(sorted(known), IN_A_FILE), 3, list(FAMILIES).index(family)):
        wrong[f"{key}={value!r}"] = problem_of(folder, plain | {key: value}, key, known)
    assert not {change: problem for change, problem in wrong.items() if problem}


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", ""),
        ("deepseek_v3", ""),
        ("phi3", ""),
        ("gemma3_text", "sliding_attention"),
        ("olmo3", "full_attention"),
    ],
)
def test_a_wrong_value_in_any_field_of_rotary_positions_is_refused_by_its_key_or_read(family, kind, tmp_path, some):
    folder, plain = decoder_folder(tmp_path, family)
    known, wrong = ADAPTERS[family].known_keys, {}
    long = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "attention_factor": 1.0}
    for rope in (*ROPES, long):
        keys = sorted(rope.keys() | {"partial_rotary_factor", "truncate", "original_max_position_embeddings"})
        for key, value in some(product(keys, IN_A_FILE), 3, len(kind)):
            changed = rope | {key: value}
            values = plain | {"rope_parameters": {kind: changed} if kind else changed}
            wrong[f"{changed}"] = problem_of(folder, values, key, known)
    assert not {change: problem for change, problem in wrong.items() if problem}


PARTS = [("smolvlm", "text_config"), ("smolvlm", "vision_config"), ("clip", "text_config")]
OF_PARTS = {"layer_norm_eps", "rms_norm_eps", "hidden_act", "rope_theta", "rope_scaling", "vocab_size", "eos_token_id"}


@pytest.mark.parametrize(("layout", "part"), PARTS)
def test_a_value_of_the_wrong_kind_in_a_part_is_refused_in_words_or_read(layout, part, tmp_path):
    wrong, plain = [], OWN[layout]
    for key in OF_PARTS.union(plain[part]):
        for value in VALUES:
            try:
                read_by(layout, plain | {part: plain[part] | {key: value}}, tmp_path)
            except UserError:
                continue
            except Exception as error:  # noqa: BLE001  (all that is no word for people)
                wrong.append(f"{key}={value!r}: {error!r}")
    assert not wrong, "\n".join(wrong)


def test_as_many_layers_as_no_model_has_are_refused_before_they_are_listed(tmp_path):
    many = {"num_hidden_layers": 10**5, "full_attention_interval": 10**5}
    with pytest.raises(UserError, match="layers"):
        read_by("qwen3_next", keys_of("qwen3_next")[0] | many, tmp_path)


@pytest.mark.parametrize(
    ("family", "layout", "change", "field"),
    [
        ("mixtral", "mixtral", {"num_local_experts": 32000}, "num_local_experts"),
        ("deepseek_v3", "deepseek_v3", {"n_routed_experts": 32000}, "n_routed_experts"),
        ("llama", "attn_decoder", {"num_nextn_predict_layers": 60}, "num_nextn_predict_layers"),
    ],
)
def test_more_modules_than_there_are_tensors_are_refused_before_they_are_built(family, layout, change, field, tmp_path):
    adapter = ADAPTERS[family]
    sizes = {key: value for key, value in FAMILIES[family][""].items() if value is not None}
    folder = save_model(tmp_path / "model", adapter.build(adapter.from_hf_config(sizes)), layout=layout)
    (folder / "manifest.json").unlink()
    values = json.loads((folder / "config.json").read_text())
    changed = {"decoder": values["decoder"] | change} if layout == "attn_decoder" else change
    (folder / "config.json").write_text(json.dumps(values | changed))
    with pytest.raises(CheckpointInvalid) as refused:
        load_model(folder)
    assert refused.value.metadata["field"] == field
