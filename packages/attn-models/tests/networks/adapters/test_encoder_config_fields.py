"""Whatever a config.json of transformers says of an encoder, a folder gives their rows or is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from attn_models.adapters.hf_config import check_unread_keys
from attn_models.adapters.registry import VIT_ADAPTERS, require_known_family
from attn_models.encoder.encoder import VisionTransformer
from attn_models.loading import load_model
from attn_models.loading.encoders import build_encoder, load_image_classifier
from attn_models.loading.images import load_image_encoder
from attn_models.weights import read_folder
from attn_testing.config_changes import changes, require_right, verdict

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.oracle, pytest.mark.slow, pytest.mark.timeout(1200)]

NARROW = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
}
T5 = {
    "vocab_size": 61,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
}
BART = {
    "vocab_size": 61,
    "d_model": 32,
    "max_position_embeddings": 32,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
FAMILIES = {
    "t5": T5,
    "mt5": T5,
    "umt5": T5,
    "bart": BART,
    "marian": BART,
    "m2m_100": BART,
    "whisper": {
        "vocab_size": 61,
        "d_model": 32,
        "num_mel_bins": 6,
        "max_source_positions": 10,
        "max_target_positions": 24,
        **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1),
        "begin_suppress_tokens": None,
    },
    "clip": {
        "text_config": NARROW | {"eos_token_id": 60, "bos_token_id": 59},
        "vision_config": NARROW | {"image_size": 8, "patch_size": 4},
        "projection_dim": 12,
    },
    "bert": NARROW,
    "roberta": NARROW,
    "xlm-roberta": NARROW,
    "camembert": NARROW,
    "distilbert": {
        "vocab_size": 61,
        "dim": 32,
        "hidden_dim": 48,
        "n_layers": 2,
        "n_heads": 4,
        "max_position_embeddings": 64,
    },
    "modernbert": NARROW
    | {"local_attention": 8, "num_hidden_layers": 3, "global_attn_every_n_layers": 2}
    | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    "longformer": NARROW | {"attention_window": 4},
    "electra": NARROW | {"embedding_size": 16},
    "albert": NARROW | {"embedding_size": 16, "num_hidden_groups": 2, "inner_group_num": 2},
    "mpnet": NARROW,
    "nomic_bert": NARROW,
    "gte": NARROW,
    "jina_embeddings_v3": NARROW,
    "deberta-v2": NARROW
    | {"relative_attention": True, "pos_att_type": "p2c|c2p", "position_buckets": 8, "norm_rel_ebd": "layer_norm"}
    | {"share_att_key": True, "position_biased_input": False, "conv_kernel_size": 3, "conv_act": "gelu"},
    "big_bird": NARROW | {"attention_type": "original_full"},
    "reformer": {
        "vocab_size": 61,
        "hidden_size": 32,
        "attention_head_size": 8,
        "num_attention_heads": 4,
        "feed_forward_size": 48,
        "max_position_embeddings": 64,
        "attn_layers": ["local", "local"],
        "num_buckets": 4,
        "lsh_attn_chunk_length": 8,
        "local_attn_chunk_length": 8,
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [8, 24],
    },
    "vit": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "image_size": 8,
        "patch_size": 4,
    },
}
"""Sizes by `model_type`."""
FOREIGN = {
    "activation": ("relu",),
    "d_model": (16,),
    "dense_act_fn": ("gelu", "relu", "gelu_new"),
    "feed_forward_proj": ("gated-gelu", "gated-silu", "gelu", "relu", "gated-relu", "silu"),
    "is_gated_act": (True, False),
    "scale_decoder_outputs": (True, False),
    "tie_encoder_decoder": (True,),
    "n_positions": (64,),
    "num_decoder_layers": (None, 2),
    "attention_window": (2,),
    "attention_head_size": (8, 16),
    "conv_act": ("tanh", "relu", "silu"),
    "conv_groups": (2, 3),
    "conv_kernel_size": (0, 5, 2),
    "max_relative_positions": (12, 3),
    "norm_rel_ebd": ("none", "layer_norm|batch_norm"),
    "pos_att_type": ("c2p", ["p2c"], [], "c2c"),
    "position_biased_input": (True,),
    "position_buckets": (-1, 0, 5, 32),
    "relative_attention": (False,),
    "share_att_key": (False,),
    "activation_function": ("swish", "relu"),
    "decoder_attention_heads": (2,),
    "decoder_vocab_size": (30,),
    "scale_embedding": (True, False),
    "share_encoder_decoder_embeddings": (False,),
    "tie_word_embeddings": (False,),
    "block_size": (2,),
    "classifier_activation": ("relu",),
    "embedding_size": (16, 24, 32),
    "head_dim": (16, 8),
    "inner_group_num": (1, 3),
    "num_hidden_groups": (1, 3),
    "relative_attention_num_buckets": (16, 64),
    "rope_parameters": ({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e3},),
    "global_attn_every_n_layers": (1, 2),
    "global_rope_theta": (1e3,),
    "hidden_dim": (16,),
    "intermediate_size": (16,),
    "layer_norm_eps": (0.1,),
    "layer_norm_epsilon": (0.1,),
    "local_attention": (2,),
    "local_rope_theta": (1e3,),
    "n_heads": (2,),
    "norm_bias": (True,),
    "norm_eps": (0.1,),
    "pad_token_id": (0, 5),
    "position_embedding_type": ("relative_key", "relative_key_query", "absolute"),
    "qkv_bias": (False,),
    "rescale_embeddings": (True,),
    "scale_embeddings": (True,),
    "sinusoidal_pos_embds": (True,),
    "type_vocab_size": (1, 3),
    "use_bias": (False,),
    "use_mean_pooling": (True,),
}
"""Fields of other encoders with values that mean something there."""
ENCODER_DECODERS = ("t5", "mt5", "umt5", "bart", "marian", "m2m_100")
TOWERS = ("text_config", "vision_config")
HEADS = {"vit": "ForImageClassification", "whisper": "ForSpeechSeq2Seq"} | dict.fromkeys(
    ENCODER_DECODERS, "ForSeq2SeqLM"
)
TOLERANCE = 1e-4
TEXT = torch.randint(2, 30, (2, 20), generator=torch.Generator().manual_seed(1))
KEEP = torch.arange(20) < torch.tensor([[20], [13]])
IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def their_rows(folder, values):
    """What transformers computes of the config.json in `folder`, where the weights go; None where it cannot.

    Every weight is far from its initial value, so that each one counts.
    """
    torch.manual_seed(0)
    kind = getattr(transformers, f"AutoModel{HEADS.get(values['model_type'], '')}")
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        model = kind.from_config(config, attn_implementation="eager").float().eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.normal_(mean=float("norm" in name.lower()), std=0.2)
            model.save_pretrained(folder / "written")
            (folder / "written" / "model.safetensors").rename(folder / "model.safetensors")
            again = type(model).from_pretrained(folder, attn_implementation="eager", dtype="float32").eval()
            rows = again(IMAGES).logits if images(values) else of_text(again, values)
    except Exception:  # noqa: BLE001  (whatever they raise for a config that means nothing)
        return None
    return rows if rows.isfinite().all() else None


def of_text(model, values):
    """Rows of the real tokens; a Reformer's of each text alone, as in transformers they depend on its company."""
    tokens, keep = text(values)
    if values["model_type"] == "whisper":
        return model(sound(values), decoder_input_ids=target(values)).logits
    if values["model_type"] == "clip":
        found = model(input_ids=words(values), pixel_values=pixels(values))
        return torch.cat([found.text_embeds, found.image_embeds])
    if values["model_type"] in ENCODER_DECODERS:
        return model(tokens, keep, decoder_input_ids=target(values)).logits
    if values["model_type"] != "reformer":
        return model(tokens, keep).last_hidden_state[KEEP]
    return torch.cat([model(row[None, real]).last_hidden_state[0] for row, real in zip(tokens, KEEP, strict=True)])


def our_rows(folder, values):
    """The same of the folder, loaded here; raises `UserError` where it is refused."""
    if images(values):
        return load_image_classifier(folder).model(IMAGES)
    tokens, keep = text(values)
    if values["model_type"] == "whisper":
        return load_model(folder).model(target(values), sound(values).transpose(1, 2))
    if values["model_type"] == "clip":
        rows = build_encoder(read_folder(folder), torch.float32).eval()(words(values))[:, -1]
        seen = load_image_encoder(folder).embed(pixels(values))
        return torch.cat([torch.nn.functional.normalize(rows, dim=-1), seen])
    if values["model_type"] in ENCODER_DECODERS:
        return load_model(folder).model(target(values), tokens, keep.bool())
    return build_encoder(read_folder(folder), torch.float32).eval()(tokens, keep.bool())[KEEP]


def images(values):
    return values["model_type"] in VIT_ADAPTERS


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def sound(values):
    """Frames as many as the config says, as transformers lays them."""
    return drawn(2, values.get("num_mel_bins", 80), 2 * values.get("max_source_positions", 1500))


def words(values):
    """Texts with the token that ends them, of different lengths."""
    tokens, end = TEXT[:, :12].clone(), (values.get("text_config") or {}).get("eos_token_id", 49407)
    tokens[0, -1], tokens[1, 7:] = end, end
    return tokens


def pixels(values):
    """Images of the side that the config says."""
    tower = values.get("vision_config") or {}
    return drawn(2, tower.get("num_channels", 3), *[tower.get("image_size", 224)] * 2)


def every_change(config):
    """Changes of the config and, where it has towers, of each of them."""
    yield from changes(config, FOREIGN)
    for tower in set(TOWERS) & config.keys():
        for words, changed in changes(config[tower], FOREIGN):
            yield f"{tower}: {words}", config | {tower: changed}


def target(values):
    """What is written so far, from the token that begins it."""
    return torch.where(KEEP, TEXT, 1).flip(0) if values.get("vocab_size") != 1 else 0 * TEXT


def text(values):
    """Token ids, filled up as transformers fills up, and where they are real."""
    tokens = torch.where(KEEP, TEXT, values.get("pad_token_id") or 0)
    return (tokens if values.get("vocab_size") != 1 else 0 * tokens), KEEP.long()


def built(values):
    """A model of this config with random weights; raises `UserError` where it is refused."""
    layout = require_known_family(values.get("model_type"))
    check_unread_keys(values, layout.known_keys, Path("config.json"))
    if images(values):
        return VisionTransformer(layout.from_hf_config(values, Path("config.json")))
    return layout.build(layout.from_hf_config(values))


@torch.no_grad()
def outcome(folder, values):
    """What loading the folder comes to, beside transformers; without their weights, what reading the config does."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    theirs = their_rows(folder, values)
    if theirs is None:
        return verdict(None, lambda: built(values))
    largest = theirs.abs().max().item() if theirs.numel() else 0.0
    return verdict(theirs, lambda: our_rows(folder, values), TOLERANCE * max(1.0, largest))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_change_of_a_config_gives_the_rows_of_transformers_or_is_refused(family, tmp_path, record_property):
    transformers.logging.disable_progress_bar()
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    found = {
        f"{number}, {words}": outcome(tmp_path / str(number), values)
        for number, (words, values) in enumerate(every_change(config.to_dict()))
    }
    record_property("outcomes", require_right(family, found, equal=50))


def test_a_folder_as_it_is_gives_the_rows_of_transformers(tmp_path):
    for family, sizes in FAMILIES.items():
        config = transformers.AutoConfig.for_model(family, **sizes)
        assert outcome(tmp_path / family, config.to_dict()) == "equal", family
