#!/usr/bin/env bash
# keras 3.15.1, `MultiHeadAttention` (backends torch and jax alike): one would expect that asking for the weights, or a
# dropout rate that does nothing in inference, changes no output. For a query that may read no key both do: the fused
# path, taken without them, gives the mean of all values, of padding too; the other path gives weights and outputs of 0.
# Seen: with the same weights, its outputs are 0, or the projected mean of the values (up to 0.2).
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/pip" install -q keras==3.15.1
KERAS_BACKEND=torch "$folder/venv/bin/python" - <<'PYTHON'
import keras
import numpy as np

draw = np.random.default_rng(0)
rows = draw.standard_normal((2, 5, 8)).astype("float32")
mask = np.ones((2, 5, 5), bool)
mask[:, 1] = False

plain = keras.layers.MultiHeadAttention(num_heads=2, key_dim=4)
dropping = keras.layers.MultiHeadAttention(num_heads=2, key_dim=4, dropout=0.5)
plain(rows, rows), dropping(rows, rows)
dropping.set_weights(plain.get_weights())
outputs = {
    "alone": plain(rows, rows, attention_mask=mask, training=False),
    "with scores": plain(rows, rows, attention_mask=mask, training=False, return_attention_scores=True)[0],
    "dropout in inference": dropping(rows, rows, attention_mask=mask, training=False),
    "all keys alike": plain(0 * rows, rows, attention_mask=np.ones_like(mask), training=False),
}
outputs = {name: keras.ops.convert_to_numpy(one) for name, one in outputs.items()}
others = [row for row in range(5) if row != 1]
for name in ("with scores", "dropout in inference"):
    assert np.allclose(outputs[name][:, others], outputs["alone"][:, others], atol=1e-5)
print({name: [round(float(one), 3) for one in output[0, 1, :3]] for name, output in outputs.items()})
assert (outputs["with scores"][:, 1] == 0).all() and (outputs["dropout in inference"][:, 1] == 0).all()
assert np.allclose(outputs["alone"][:, 1], outputs["all keys alike"][:, 1], atol=1e-5) and abs(outputs["alone"][:, 1]).max() > 0.1
PYTHON
