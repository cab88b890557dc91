#!/usr/bin/env bash
# torch 2.13.0: `scaled_dot_product_attention` gives zeros for a query that may read no key, for boolean and for
# additive masks. Exported to ONNX with the default opset it is written out as operators, and does not: a boolean mask
# becomes a large negative number, so that the query reads the mean of all values, those of padding too; an additive
# mask of minus infinity gives NaN. Nothing is said at export. With `opset_version=23` both are zeros again.
# Seen in onnxruntime 1.32.0 for the second of three queries: the mean of the values, and NaN.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/pip" install -q onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.32.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON' 2>/dev/null
import onnxruntime
import torch


class Attention(torch.nn.Module):
    def forward(self, query, key, value, mask):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


torch.manual_seed(0)
query, key, value = (torch.randn(2, 4, length, 8) for length in (3, 5, 5))
allowed = torch.ones(3, 5, dtype=torch.bool)
allowed[1] = False
masks = {"boolean": allowed, "additive": torch.zeros(3, 5).masked_fill(~allowed, -torch.inf)}


def exported(mask: torch.Tensor, **options: int) -> torch.Tensor:
    inputs = (query, key, value, mask)
    torch.onnx.export(Attention(), inputs, "model.onnx", dynamo=True, verbose=False, **options)
    session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    return torch.from_numpy(session.run(None, dict(zip(names, (one.numpy() for one in inputs))))[0])[:, :, 1]


mean = value.mean(2)
for name, mask in masks.items():
    eager = Attention()(query, key, value, mask)[:, :, 1]
    assert (eager == 0).all() and (exported(mask, opset_version=23) == 0).all()
    row = exported(mask)
    kind = "NaN" if row.isnan().all() else "the mean of all values" if torch.allclose(row, mean, atol=1e-5) else "other"
    print(f"{name}: eager zeros, exported {kind}")
    assert kind == {"boolean": "the mean of all values", "additive": "NaN"}[name]
PYTHON
