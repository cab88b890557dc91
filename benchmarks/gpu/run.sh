#!/usr/bin/env bash
# Checks every kernel against float64, then measures those that pass; writes $OUT/CARD-DATE.json, or the same file in benchmarks/results.
# Tuning results are stored in $OUT/tuning if $OUT is set. `--tables engine_gpu train_gpu` measures whole engines and training updates, `--tables prompt_steps` prompt steps, and `--tables sanitizer` runs compute-sanitizer; each table can be measured alone.
# Requires torch with CUDA and triton, and what `nox -s gpu-kit` lays in out/gpu-kit, or the same installed; no package of this repository needs to be installed. fla-core is measured as a reference if it is installed. Takes less than ten minutes on an H200.
# Each part runs in its own process with its own time limit; the result file is updated with every row, and a table at the end shows which performance targets are met.
# Without a GPU, `benchmarks/gpu/rehearse.py` runs all of it in Triton's interpreter and fails on what would fail on one, and benchmarks/gpu/ahead.py compiles all kernels that it would launch.
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
