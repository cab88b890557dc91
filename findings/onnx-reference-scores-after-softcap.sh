#!/usr/bin/env bash
# onnx 1.23.2, `ReferenceEvaluator`, operator Attention (opsets 23 to 25) with `softcap` and `qk_matmul_output_mode=0`:
# the standard calls this output the product of queries and keys, and mode 1 the one after the softcap. The reference
# gives the capped scores for both. onnxruntime 1.32.0 gives the scaled product for mode 0, as the text says.
# Seen with a softcap of 2 on scores up to 18: mode 0 of the reference stays below 2, onnxruntime's does not.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

draw = np.random.default_rng(0)
inputs = {name: 3 * draw.standard_normal((1, 1, 4, 8)).astype(np.float32) for name in ("query", "key", "value")}
scores = inputs["query"] @ inputs["key"].swapaxes(2, 3) / 8**0.5


def run(mode: int) -> tuple[np.ndarray, np.ndarray]:
    outputs = ["out", "", "", "scores"]
    node = helper.make_node("Attention", [*inputs], outputs, softcap=2.0, qk_matmul_output_mode=mode)
    kinds = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("out", "scores")]
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape) for name, array in inputs.items()]
    graph = helper.make_graph([node], "attention", given, kinds)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return ReferenceEvaluator(model).run(None, inputs)[1], session.run(None, inputs)[1]


capped = 2 * np.tanh(scores / 2)
reference, runtime = run(0)
print(f"largest score {abs(scores).max():.1f}; mode 0: reference {abs(reference).max():.2f}, onnxruntime {abs(runtime).max():.1f}")
assert np.allclose(reference, capped, atol=1e-4) and np.allclose(runtime, scores, atol=1e-4)
assert all(np.allclose(one, capped, atol=1e-4) for one in run(1))
PYTHON
