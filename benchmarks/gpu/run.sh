#!/usr/bin/env bash
# One call: every kernel against float64 first, then the tables of those that are right; writes $OUT/h200-DATE.json, or the same in benchmarks/results.
# What is tuned is kept in $OUT/tuning where there is $OUT. `--tables engine_gpu train_gpu`, `--tables prompt_steps` or `--tables sanitizer` measure whole engines, updates of training, and what compute-sanitizer finds, each alone.
# Needs torch with CUDA, triton, pluggy and packaging; nothing of this tree need be installed; fla-core is a peer where it is. Under ten minutes on an H200.
# Each part has a process and a time limit of its own; the result is written as rows come, and at the end a table says which bars are met.
# Without a GPU, `DEVICE=cpu benchmarks/gpu/run.sh --small` rehearses it in the interpreter, and benchmarks/gpu/ahead.py compiles all that it would launch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
for source in packages/*/src services/*/src proto/src; do
    PYTHONPATH="$PWD/$source:${PYTHONPATH:-}"
done
if [ -n "${OUT:-}" ]; then
    export ATTN_TUNING="${ATTN_TUNING:-$OUT/tuning}"
fi
export PYTHONPATH TRITON_DEFAULT_FP_FUSION=1 TORCHINDUCTOR_COMPILE_THREADS=4
device="${DEVICE:-cuda}"
if [ "$device" = cpu ]; then
    export TRITON_INTERPRET=1
else
    nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,clocks.max.sm --format=csv || echo "nvidia-smi says nothing of a GPU" >&2
fi
exec "${PYTHON:-python3}" benchmarks/gpu/everything.py --device "$device" "$@"
