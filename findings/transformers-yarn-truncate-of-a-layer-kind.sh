#!/usr/bin/env bash
# transformers 5.23.0, rotary positions of kind `yarn` in a model whose kinds of layers have rotary parameters of their
# own (Gemma 3): one would expect that `"truncate": false` of a kind of layer holds for that kind, as its `factor` and
# `beta_fast` do. `truncate` is read from the outer parameters alone, so that it has no effect there.
# Seen: the inverse frequencies of full attention are equal with and without it; with one set of parameters for the
# whole model (Llama) they differ.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/pip" install -q transformers==5.23.0
"$folder/venv/bin/python" - <<'PYTHON' 2>/dev/null
import torch
import transformers
from transformers import Gemma3TextConfig, Gemma3TextModel, LlamaConfig, LlamaModel

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 8, "beta_slow": 2,
    "original_max_position_embeddings": 64,
}
SIZES = {
    "vocab_size": 8, "hidden_size": 24, "intermediate_size": 8, "num_hidden_layers": 6, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 12, "max_position_embeddings": 128,
}


def frequencies(one_for_all, **more):
    if one_for_all:
        return LlamaModel(LlamaConfig(**SIZES, rope_parameters=YARN | more)).rotary_emb.inv_freq
    kinds = {"full_attention": YARN | more, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    return Gemma3TextModel(Gemma3TextConfig(**SIZES, rope_parameters=kinds)).rotary_emb.full_attention_inv_freq


same = [torch.equal(frequencies(kind), frequencies(kind, truncate=False)) for kind in (True, False)]
print(f"transformers {transformers.__version__}: equal without truncation: one for all {same[0]}, by kind {same[1]}")
assert same == [False, True], same
PYTHON
