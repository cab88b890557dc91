"""A tiny GGUF file of AFMoE, arranged as llama.cpp's converter does, gives the logits of transformers."""

import pytest
from attn_models.loading import load_model
from attn_models.sources import convert
from attn_testing.families import NARROW
from attn_testing.gguf_files import described, difference, random_model, stored, write_gguf

pytest.importorskip("transformers")

AFMOE = (
    NARROW
    | {"num_hidden_layers": 4, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
    | {
        "moe_intermediate_size": 16,
        "num_shared_experts": 2,
        "num_dense_layers": 1,
        "route_scale": 1.5,
        "sliding_window": 5,
        "mup_enabled": True,
    }
)


def test_afmoe_gives_the_logits_of_transformers(tmp_path):
    model = random_model("afmoe", **AFMOE)
    said = described(AFMOE) | {"rope.freq_base": 1e4, "rope.dimension_count": 8, "attention.sliding_window": 5}
    said |= {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 16, "expert_shared_count": 2}
    said |= {"leading_dense_block_count": 1, "expert_weights_scale": 1.5, "expert_weights_norm": True}
    path = write_gguf(
        tmp_path / "m.gguf", "afmoe", said, stored("afmoe", model, {"mlp.expert_bias": "exp_probs_b.bias"})
    )
    assert difference(load_model(convert(path, tmp_path / "ours", "stored")).model, model) < 5e-5
