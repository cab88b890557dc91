"""Puts the helpers of these tests on the path; with importlib mode a test file cannot import its neighbour."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
