"""What other systems lack is asked for where it is used: models chat and are served without it.

macOS refuses limits of memory; Windows has no module `resource` or `readline`, no SIGHUP, SIGPROF, getuid or nice, and
event loops without signal handlers. Here these are taken away from every process, on Linux: this is not a run there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LACKS = {
    "macOS": """
import resource
limit = resource.setrlimit
def setrlimit(which, limits):
    if which == resource.RLIMIT_AS:
        raise ValueError("current limit exceeds maximum limit")
    limit(which, limits)
resource.setrlimit = setrlimit
import os
del os.sched_getaffinity
""",
    "Windows": """
import asyncio, os, signal, sys
import psutil  # whose part for Linux wants `resource`
sys.modules["resource"] = sys.modules["readline"] = None
def refused(*_):
    raise NotImplementedError
asyncio.SelectorEventLoop.add_signal_handler = refused
for name in ("getuid", "nice", "sched_getaffinity"):
    delattr(os, name)
for name in ("SIGHUP", "SIGPROF", "setitimer"):
    delattr(signal, name)
""",
}
SAVED = """
import dataclasses, sys, torch
from attn_models.decoder.decoder import Decoder
from attn_models.loading import save_model
from attn_models.tokenizers import character_tokenizer
from attn_schema.decoder import DecoderConfig
torch.manual_seed(0)  # whose answer is no space
tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz <>:?")
template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
tokenizer.settings = dataclasses.replace(tokenizer.settings, chat_template=template)
sizes = dict(vocab_size=tokenizer.vocab_size, max_seq_len=64, hidden_size=16, num_layers=1, num_heads=2)
save_model(sys.argv[1], Decoder(DecoderConfig(**sizes)), tokenizer)
"""
SERVED = """
import asyncio, os, signal, sys, threading
from pathlib import Path
from attn_client import Client, ClientSettings
from attn_gateway import GatewaySettings
from attn_gateway.cluster import ClusterSettings, ModelToLoad
from attn_gateway.serve import ServeSettings, serve
from attn_schema import ChatMessage, SamplingParams
def ask(gateway):
    with Client(ClientSettings(address=gateway.address)) as client:
        answer = client.complete("tiny", [ChatMessage(role="user", content="hello")], SamplingParams(max_new_tokens=4))
        print("answered", answer.usage.completion_tokens, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
model = ModelToLoad.parse("tiny=" + sys.argv[1])
cluster = ClusterSettings(home=Path(sys.argv[2]), models=(model,))
settings = ServeSettings(gateway=GatewaySettings(port=0), cluster=cluster)
started = lambda gateway: threading.Thread(target=ask, args=(gateway,), daemon=True).start()
print(asyncio.run(serve(settings, started)).name)
"""


@pytest.mark.parametrize("system", LACKS)
def test_a_model_chats_and_is_served_without_what_the_system_lacks(system: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LACKS[system])
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "ATTN_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}

    def run(*words: str, text: str = "") -> str:
        done = subprocess.run(
            [sys.executable, *words],
            input=text,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("-c", SAVED, str(tmp_path / "model"))
    main = "from attn_cli.main import main; main()"
    assert run("-c", main, "chat", "--model", str(tmp_path / "model"), "--max-new-tokens", "4", text="hello\n").strip()
    assert run("-c", SERVED, str(tmp_path / "model"), str(tmp_path / "home")).split() == ["answered", "4", "SIGTERM"]
