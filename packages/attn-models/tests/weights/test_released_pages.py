"""The pages of weight files that were read and packed leave memory; what was changed in place stays."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from attn_models.weights.safetensors_files import SMAPS, release_read_pages
from safetensors import safe_open
from safetensors.torch import save_file

BYTES = 8 << 20


def resident(path: Path) -> int:
    """The kB of a mapped file that are in this process's memory."""
    found = re.search(rf"{re.escape(str(path))}\n(?:\w+:.*\n)*?Rss: +(\d+) kB", SMAPS.read_text())
    assert found is not None
    return int(found[1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mappings are listed by Linux")
def test_what_was_only_read_is_released_and_read_again(tmp_path: Path) -> None:
    weights = torch.arange(BYTES // 4, dtype=torch.float32)
    save_file({"a": weights}, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        read = file.get_tensor("a")
    assert torch.equal(read, weights)
    assert resident(tmp_path / "model.safetensors") > BYTES / 1024 / 2
    release_read_pages(tmp_path)
    assert resident(tmp_path / "model.safetensors") < BYTES / 1024 / 4
    assert torch.equal(read, weights)
    read[0] = 7.0
    release_read_pages(tmp_path)
    assert read[0] == 7.0
