#!/usr/bin/env bash
# One call: every kernel against float64 first, and only if all are right the tables; writes benchmarks/results/h200-DATE.json.
# Needs torch with CUDA, triton, pluggy and packaging; nothing of this tree need be installed; fla-core is a peer where it is. Under ten minutes on an H200.
# Without a GPU, `DEVICE=cpu benchmarks/gpu/run.sh --small` goes the same way through Triton's interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
for part in attn-core attn-testing attn-variants attn-models attn-kernels-triton; do
    PYTHONPATH="$PWD/packages/$part/src:${PYTHONPATH:-}"
done
export PYTHONPATH TRITON_DEFAULT_FP_FUSION=1
device="${DEVICE:-cuda}"
if [ "$device" = cpu ]; then
    export TRITON_INTERPRET=1
else
    nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,clocks.max.sm --format=csv || true
fi
exec "${PYTHON:-python3}" benchmarks/gpu/everything.py --device "$device" "$@"
