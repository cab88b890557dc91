#!/usr/bin/env bash
# rotary-embedding-torch 0.9.1, `rotate_queries_or_keys` of bfloat16 tensors: one would expect the rotation of float32,
# rounded. The positions themselves are counted in the tensor's dtype, so that from 257 on (2049 in float16) several
# tokens share one position. The angles are kept for later calls, so that float32 tensors then get them too.
# Seen for 600 rows of ones: equal to 0.004 up to position 256, off by 1.3 at 257; 1.3 too in float32 on the same module.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/pip" install -q rotary-embedding-torch==0.9.1
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from rotary_embedding_torch import RotaryEmbedding

rows = torch.ones(1, 1, 600, 8)
true = RotaryEmbedding(dim=8).rotate_queries_or_keys(rows)
module = RotaryEmbedding(dim=8)
short = (module.rotate_queries_or_keys(rows.bfloat16()).float() - true).abs().amax((0, 1, 3))
later = (module.rotate_queries_or_keys(rows) - true).abs().amax((0, 1, 3))
print(f"bfloat16: {short[:257].max():.3f} up to 256, {short[257]:.3f} at 257; then float32: {later[257]:.3f} at 257")
assert short[:257].max() < 0.02 and short[257] > 0.5 and later[257] > 0.5 and later[:257].max() < 1e-4
PYTHON
