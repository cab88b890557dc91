"""Makes the mechanisms, kernels, caches and models that break laws on purpose importable: `broken`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
