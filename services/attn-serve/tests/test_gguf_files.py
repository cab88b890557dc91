"""GGUF files are converted outside of the process that asks for them, which is a gateway that has no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from attn_models.decoder.decoder import Decoder
from attn_models.export.model import export_model
from attn_models.loading import save_model
from attn_models.tokenizers.learned import character_tokenizer
from attn_schema.decoder import DecoderConfig
from safetensors.torch import load_file

from conftest import ALPHABET

ASK = """
import sys
from pathlib import Path
from shutil import copytree
from attn_serve.sources import find_folder

home, copy, file = sys.argv[1:]
found = find_folder(file, Path(home))
assert find_folder(file, Path(home)) == found
copytree(found, copy)
assert "torch" not in sys.modules
print(found)
"""


def test_a_gateway_gets_the_folder_of_a_file_and_no_torch(tmp_path: Path) -> None:
    tokenizer = character_tokenizer(ALPHABET)
    sizes = {"max_seq_len": 32, "hidden_size": 32, "num_layers": 1, "num_heads": 2, "mechanism": "mha"}
    llama = {"norm": "rms", "feed_forward": "swiglu", "positions": "rotary"}
    model = Decoder(DecoderConfig(vocab_size=tokenizer.vocab_size, **sizes, **llama))
    save_model(tmp_path / "own", model, tokenizer)
    file, taken = tmp_path / "model.gguf", tmp_path / "file"
    export_model(tmp_path / "own", file, "gguf", quantization="f32")
    taken.touch()  # below it no home can be made, so that the folder is one of the process's own
    command = [sys.executable, "-c", ASK, taken / "home", tmp_path / "copy", file]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert not Path(said.stdout.strip()).exists()
    made = load_file(tmp_path / "copy" / "model.safetensors")["model.embed_tokens.weight"]
    assert any(torch.equal(made, parameter) for parameter in model.parameters())
