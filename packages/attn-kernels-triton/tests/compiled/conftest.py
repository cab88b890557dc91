"""These tests compile, which a process that interprets cannot do."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

collect_ignore_glob = []
if os.environ.get("TRITON_INTERPRET") == "1" or find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    # Triton warns that its default will change; this is what it is now, on all versions.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    sys.path.insert(0, str(Path(__file__).parent))
