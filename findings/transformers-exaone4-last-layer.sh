#!/usr/bin/env bash
# transformers 5.23.0, `Exaone4Config` without `layer_types`: its documentation says that the final layer always uses
# global attention, whatever `sliding_window_pattern`. It does not: the last layer is one of the pattern like any other,
# so it has a window unless the number of layers is a multiple of the period.
# Seen: of seven layers with period 4, only layer 3 is full.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.23.0
"$folder/venv/bin/python" - <<'PYTHON' 2>/dev/null
import transformers
from transformers import Exaone4Config

promised = "final layer always uses global attention" in " ".join(Exaone4Config.__doc__.split())
full = [i for i, kind in enumerate(Exaone4Config(num_hidden_layers=7).layer_types) if kind == "full_attention"]
print(f"transformers {transformers.__version__}: documented {promised}, full layers of seven: {full}")
assert (promised, full) == (True, [3]), (promised, full)
PYTHON
