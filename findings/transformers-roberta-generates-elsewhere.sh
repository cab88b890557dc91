#!/usr/bin/env bash
# transformers 5.23.0, `RobertaForCausalLM` (CamemBERT, XLM-RoBERTa, data2vec-text, X-MOD alike): one would expect that
# `generate`, greedy, gives the likeliest token by the logits of the model's own forward pass. It does not: `generate`
# passes positions that start at 0, while forward counts from `padding_idx` + 1, as such checkpoints were trained.
# Seen: positions from 0, and of a tiny random model other logits than those of forward without positions.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0
"$folder/venv/bin/python" - <<'PYTHON' 2>/dev/null
import torch
import transformers

torch.manual_seed(0)
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
config = transformers.RobertaConfig(vocab_size=64, is_decoder=True, initializer_range=0.5, **sizes)
model = transformers.RobertaForCausalLM(config).eval()
ids, seen, forward = torch.arange(5, 12)[None], [], model.roberta.forward


def watched(*arguments, **named):
    seen.append(named.get("position_ids"))
    return forward(*arguments, **named)


with torch.no_grad():
    wanted = model(ids).logits[0, -1]
    model.roberta.forward = watched
    said = model.generate(ids, max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True)
positions, off = seen[0].flatten().tolist(), float((said.logits[0][0] - wanted).abs().max())
print(f"transformers {transformers.__version__}: positions {positions}, logits {off:.2f} off those of forward")
assert positions == list(range(7)) and off > 0.1, (positions, off)
PYTHON
