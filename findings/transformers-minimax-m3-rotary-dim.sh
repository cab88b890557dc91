#!/usr/bin/env bash
# transformers 5.23.0, MiniMax-M3's text model: `rotary_dim` is documented as the number of channels of a head that are
# rotated, 64 by default of 128. Its value changes nothing: without `partial_rotary_factor` in `rope_parameters` all 128
# turn, at the default too. MiniMax-M2's config of the same release reads its `rotary_dim`, and turns 64.
# Seen: 128 channels turn in M3 for a `rotary_dim` of 32, 64 and 128; 64 in M2 for one of 64.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/pip" install -q transformers==5.23.0
"$folder/venv/bin/python" - <<'PYTHON' 2>/dev/null
import torch
import transformers
from transformers.models.minimax_m2 import configuration_minimax_m2 as m2, modeling_minimax_m2 as model_m2
from transformers.models.minimax_m3_vl import configuration_minimax_m3_vl as m3, modeling_minimax_m3_vl as model_m3


def turned(model, rotary, config):
    """The channels of a head of ones that position 5 changes."""
    rows = torch.ones(1, 1, 1, 128)
    cos, sin = rotary(config)(rows[0], torch.tensor([[5]]))
    return int((model.apply_rotary_pos_emb(rows, rows, cos, sin)[0] != 1).sum())


third = [
    turned(model_m3, model_m3.MiniMaxM3VLRotaryEmbedding, m3.MiniMaxM3VLTextConfig(head_dim=128, rotary_dim=size))
    for size in (32, 64, 128)
]
second = turned(model_m2, model_m2.MiniMaxM2RotaryEmbedding, m2.MiniMaxM2Config(head_dim=128, rotary_dim=64))
default = m3.MiniMaxM3VLTextConfig()
print(f"transformers {transformers.__version__}: M3 {third} (default {default.rotary_dim} of {default.head_dim}), M2 {second}")
assert (third, second, default.rotary_dim, default.head_dim) == ([128, 128, 128], 64, 64, 128)
PYTHON
