#!/usr/bin/env bash
# transformers 5.23.0, `RwkvForCausalLM`: one would expect that two sequences that are decoded together, each one token
# from its own state, give the logits that each gives alone. They do not: the state [batch, width] meets the new tokens
# [batch, 1, width] and is broadcast to [batch, batch, width].
# Seen of two sequences: logits of two tokens each instead of one.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0
"$folder/venv/bin/python" - <<'PYTHON' 2>/dev/null
import torch
import transformers

torch.manual_seed(0)
config = transformers.RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32)
model = transformers.RwkvForCausalLM(config).eval()
ids = torch.arange(12).view(2, 6)
with torch.no_grad():
    state = model(ids[:, :5], use_cache=True).state
    together = tuple(model(ids[:, 5:], state=state, use_cache=True).logits.shape)
print(f"transformers {transformers.__version__}: logits of one new token of two sequences {list(together)}")
assert together == (2, 2, 64), together
PYTHON
