"""Which files and functions of ours a flow runs through: a layer's call, a chat, a training job, each run for real.

    python tools/flows.py            print what the flows of docs/architecture.md run through, in order
    python tools/flows.py layer      print one of them

Every process of a flow, in all its threads, notes each function of ours when it is first called, from the moment that
the flow allows it: a warm call is counted after others.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

HOOK = """
import os, sys, threading, time
folder = os.environ["ATTN_FLOW"]
OF_A_FUNCTION = 1  # inspect.CO_OPTIMIZED, which bodies of classes and modules do not have
begun, noted, looked = os.path.join(folder, "begun"), set(), [0.0, False]
def on():
    now = time.monotonic()
    if now - looked[0] > 0.001:
        looked[:] = [now, os.path.exists(begun)]
    return looked[-1]
def note(frame, event, argument):
    code = frame.f_code
    if event == "call" and "/src/attn" in code.co_filename and code.co_flags & OF_A_FUNCTION:
        function = code.co_filename.partition("/src/")[2], code.co_qualname
        if function not in noted and on():
            noted.add(function)
            with open(os.path.join(folder, f"{os.getpid()}.calls"), "a") as out:
                print(time.monotonic_ns(), *function, file=out)
threading.setprofile(note)
sys.setprofile(note)
"""
START = """
import time
from pathlib import Path
folder = Path({folder!r})
def begin():
    (folder / "begun").touch()
    time.sleep(0.01)
def end():
    (folder / "begun").unlink()
    time.sleep(0.01)
"""
LAYER = """
from attn_core import MechanismConfig, installed
import torch
def call():
    config = MechanismConfig(hidden_size=64, num_heads=4, head_dim=16)
    layer = installed().mechanisms.get("mha").build(config)
    x = torch.randn(1, 8, 64)
    with torch.no_grad():
        layer(x)
        return layer, x
"""
FIRST_LAYER = LAYER + "begin()\ncall()"
WARM_LAYER = LAYER + "layer, x = call()\nbegin()\nwith torch.no_grad():\n    layer(x)"
TINY_MODEL = """
import dataclasses
from attn_models.decoder.decoder import Decoder
from attn_models.loading import save_model
from attn_models.tokenizers import character_tokenizer
from attn_schema.decoder import DecoderConfig
tokenizer = character_tokenizer("abcdefgh ")
spelled = "{% for message in messages %}{{ message.content }}{% endfor %}"
tokenizer.settings = dataclasses.replace(tokenizer.settings, chat_template=spelled)
config = DecoderConfig(
    vocab_size=tokenizer.vocab_size, max_seq_len=64, hidden_size=32, num_layers=2, num_heads=4, mechanism="mha"
)
save_model(folder / "tiny", Decoder(config), tokenizer)
"""
LOCAL_CHAT = (
    TINY_MODEL
    + """
from attn_engine import LocalClient
from attn_schema import SamplingParams
with LocalClient() as client:
    for warm in (False, False, True):
        if warm:
            begin()
        client.complete(str(folder / "tiny"), "abc", SamplingParams(temperature=0, max_new_tokens=8))
    end()
"""
)
TRAIN = "--dataset text.txt --hidden-size 32 --num-layers 1 --num-heads 2 --max-seq-len 16 --batch-size 2 --steps 4"
TRAIN += " --eval-steps 2 --save-steps 2 --job first"


class Trace:
    """What the processes of one flow noted; `folder` holds their notes and whatever else the flow needs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "sitecustomize.py").write_text(HOOK, encoding="utf-8")
        path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        self.environment = {**os.environ, "PYTHONPATH": path, "ATTN_FLOW": str(folder)}

    def run(self, program: str) -> None:
        """Run a program in a process of its own; its `begin()` begins the flow."""
        self.command("-c", START.format(folder=str(self.folder)) + program)

    def attn(self, *words: str) -> None:
        """Run the command `attn`."""
        self.command("-c", "from attn_cli.main import main; main()", *words)

    def command(self, *words: str) -> None:
        """Run Python with these arguments; raises `RuntimeError` with its messages if it fails."""
        done = subprocess.run(
            [sys.executable, *words],
            env=self.environment, cwd=self.folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{words[-1]}: {done.stdout}{done.stderr}")

    def begin(self) -> None:
        """From now on functions are noted."""
        (self.folder / "begun").touch()
        time.sleep(0.01)

    @contextmanager
    def served(self, *options: str) -> Iterator[dict[str, str]]:
        """Run `attn serve` and yield what its ready file says."""
        ready = self.folder / "ready"
        words = ["serve", "--port", "0", "--home", str(self.folder / "home"), "--ready-file", str(ready), *options]
        command = [sys.executable, "-c", "from attn_cli.main import main; main()", *words]
        with (self.folder / "log").open("wb") as log:
            server = subprocess.Popen(command, env=self.environment, cwd=self.folder, stdout=log, stderr=log)
        try:
            while not ready.exists():
                if server.poll() is not None:
                    raise RuntimeError((self.folder / "log").read_text("utf-8"))
                time.sleep(0.05)
            yield json.loads(ready.read_text("utf-8"))
        finally:
            (self.folder / "begun").unlink(missing_ok=True)
            server.send_signal(signal.SIGTERM)
            server.wait(60)

    @property
    def functions(self) -> list[tuple[str, str]]:
        """The file, such as `attn_core/spec.py`, and the name of every function, in the order of their first calls."""
        lines = [line for path in self.folder.glob("*.calls") for line in path.read_text("utf-8").splitlines()]
        return list(dict.fromkeys((file, name) for _, file, name in sorted(map(str.split, lines), key=first_time)))

    @property
    def files(self) -> list[str]:
        """The files, in the order of their first calls."""
        return list(dict.fromkeys(file for file, _ in self.functions))


def first_time(words: list[str]) -> int:
    """The time at which a noted function was called."""
    return int(words[0])


def http_chat(trace: Trace) -> None:
    """The third chat with a server, which runs the model in a child process."""
    trace.run(TINY_MODEL)
    with trace.served("--model", str(trace.folder / "tiny"), "--num-threads", "1", "--http-port", "0") as ready:
        for number in range(3):
            if number == 2:
                trace.begin()
            asked = {"model": "tiny", "max_tokens": 8, "stream": True}
            body = json.dumps(asked | {"messages": [{"role": "user", "content": "abc"}]}).encode()
            request = urllib.request.Request(
                f"http://{ready['http_address']}/v1/chat/completions", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 -- the server that was started above
                answer.read()


def training_job(trace: Trace) -> None:
    """A job that `attn train` submits to a server and follows to its end."""
    (trace.folder / "text.txt").write_text("to be or not to be, " * 50, encoding="utf-8")
    with trace.served() as ready:
        trace.begin()
        trace.attn("train", *TRAIN.split(), "--address", ready["address"])


FLOWS: dict[str, Callable[[Trace], None]] = {
    "layer": lambda trace: trace.run(FIRST_LAYER),
    "chat": http_chat,
    "job": training_job,
}
"""The flows that docs/architecture.md tells."""
WARM: dict[str, Callable[[Trace], None]] = {
    "layer": lambda trace: trace.run(WARM_LAYER),
    "local-chat": lambda trace: trace.run(LOCAL_CHAT),
}
"""The flows that have a ceiling."""


def main() -> None:
    """Print the files of the flows, each with its functions."""
    for name in sys.argv[1:] or FLOWS:
        with tempfile.TemporaryDirectory() as folder:
            trace = Trace(Path(folder))
            FLOWS[name](trace)
            print(f"{name}: {len(trace.files)} files, {len(trace.functions)} functions")
            for file in trace.files:
                print(f"  {file}: {', '.join(function for path, function in trace.functions if path == file)}")


if __name__ == "__main__":
    main()
