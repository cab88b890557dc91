#!/usr/bin/env bash
# torch 2.13.0 and onnxruntime 1.32.0: `scaled_dot_product_attention` with the usual padding mask [batch, 1, 1, keys],
# exported with `opset_version=23` or 24, becomes one Attention operator with that mask. The standard lets masks
# broadcast, and onnx's reference evaluator runs it. onnxruntime opens the file, and fails at the first run: it wants
# as many rows of the mask as there are queries. The same export with opset 18 runs, and so does an expanded mask.
# Seen: "inconsistent q_sequence_length" for opsets 23 and 24.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/pip" install -q onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.32.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON' 2>/dev/null
import onnx
import onnxruntime
import torch
from onnx.reference import ReferenceEvaluator


class Attention(torch.nn.Module):
    def forward(self, query, key, value, mask):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


torch.manual_seed(0)
query, key, value = (torch.randn(2, 4, length, 8) for length in (3, 5, 5))
padding = torch.ones(2, 1, 1, 5, dtype=torch.bool)
padding[0, ..., 3:] = False
onnxruntime.set_default_logger_severity(4)


def run(opset: int, mask: torch.Tensor) -> str:
    inputs = (query, key, value, mask)
    torch.onnx.export(Attention(), inputs, "model.onnx", dynamo=True, opset_version=opset, verbose=False)
    names = [one.name for one in onnx.load("model.onnx").graph.input]
    arrays = dict(zip(names, (one.numpy() for one in inputs)))
    if opset > 18:
        out = torch.from_numpy(ReferenceEvaluator("model.onnx").run(None, arrays)[0])
        assert torch.allclose(out, Attention()(*inputs), atol=1e-5)
    session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    try:
        out = torch.from_numpy(session.run(None, arrays)[0])
    except Exception as error:
        return str(error).strip().rsplit(" was false. ", 1)[-1]
    return "equal" if torch.allclose(out, Attention()(*inputs), atol=1e-5) else "different"


found = {opset: run(opset, padding) for opset in (18, 23, 24)}
whole = run(23, padding.expand(2, 1, 3, 5).contiguous())
print(found, "expanded mask:", whole)
assert found[18] == whole == "equal" and all("q_sequence_length" in found[opset] for opset in (23, 24))
PYTHON
