"""`attn serve` on one machine where Ray cannot be imported: it serves and chats, and says what to do for more."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from attn_client import Client, ClientSettings
from attn_models.decoder.decoder import Decoder
from attn_models.loading import save_model
from attn_models.tokenizers import character_tokenizer
from attn_schema import SamplingParams
from attn_schema.decoder import DecoderConfig

BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "ray":
            raise ModuleNotFoundError("No module named 'ray'", name="ray")
sys.meta_path.insert(0, Blocked())
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny random model."""
    torch.manual_seed(0)
    tokenizer = character_tokenizer("abc ")
    config = DecoderConfig(vocab_size=tokenizer.vocab_size, max_seq_len=64, hidden_size=16, num_layers=1, num_heads=2)
    save_model(tmp_path / "tiny", Decoder(config), tokenizer)
    return tmp_path / "tiny"


def served(folder: Path, *options: str) -> subprocess.Popen[str]:
    """A server of a model in whose processes Ray cannot be imported."""
    (folder / "sitecustomize.py").write_text(BLOCKED)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    words = ["serve", "--port", "0", "--home", str(folder / "home"), "--ready-file", str(folder / "ready"), *options]
    command = [sys.executable, "-c", "from attn_cli.main import main; main()", *words]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE, text=True)


def test_a_model_is_served_by_two_processes_none_of_which_is_rays(model: Path, tmp_path: Path) -> None:
    server = served(tmp_path, str(model), "--num-threads", "1")
    try:
        while not (tmp_path / "ready").exists():
            assert server.poll() is None, server.communicate()[1]
            time.sleep(0.05)
        family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        assert len(family) == 2
        assert not [one for one in family if "ray" in one.name()]
        address = json.loads((tmp_path / "ready").read_text())["address"]
        with Client(ClientSettings(address=address)) as client:
            deltas = list(client.generate("tiny", "abc", SamplingParams(max_new_tokens=8, ignore_eos=True)))
        assert sum(len(delta.tokens) for delta in deltas) == 8
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
    assert not [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("options", [("--ray",), ("--replicas", "2")], ids=" ".join)
def test_asking_for_ray_says_how_to_install_it(model: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    server = served(tmp_path, "--model", str(model), *options)
    _, said = server.communicate(timeout=120)
    assert server.returncode not in (0, None)
    assert "pip install ray" in said
    assert "Traceback" not in said
