"""`--json` has one shape everywhere: arrays for lists, objects a line for streams, snake_case keys, plain values."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import workspace
from attn_cli.main import load
from attn_core import installed
from attn_engine.in_process import InProcess
from attn_gateway import Cluster, ClusterSettings, handlers_of, serving
from attn_models.decoder.decoder import Decoder
from attn_models.loading import save_model
from attn_models.tokenizers import character_tokenizer
from attn_schema import EngineConfig
from attn_schema.decoder import DecoderConfig
from attn_schema.methods import INFERENCE, MODELS
from attn_schema.output import print_rows, snake_case
from attn_serve.handlers import InferenceHandlers, ModelHandlers
from attn_serve.served_models import ServedModels
from attn_serve.sources import ModelSources
from attn_train.service import TrainingGrpc
from attn_train.settings import TrainSettings

LAYER = ("--hidden-size", "8", "--num-layers", "1", "--num-heads", "2", "--max-seq-len", "8", "--batch-size", "2")
ARRAY, OBJECT, LINES = "array", "object", "lines"
CALLS: dict[str, tuple[str, tuple[str, ...]]] = {
    "attribute": (OBJECT, ("tiny", "abc", "--method", "attention", "--method", "rollout")),
    "bench latency": (OBJECT, ("-m", "tiny", "--num-iters", "1", "--num-iters-warmup", "0", "--output-len", "2",
                               "--input-len", "2", "--batch-size", "1")),
    "bench serve": (OBJECT, ("-m", "tiny", "--num-prompts", "1", "--random-output-len", "2", "--random-input-len", "2",
                             "--num-warmups", "0")),
    "compare": (ARRAY, ("mha", "linear", "--seq", "64")),
    "compare-training": (ARRAY, ("--train", "mha", "--budget", "tokens=64", "--dry-run", "--dataset", "TEXT", *LAYER)),
    "convert model": (OBJECT, ("models/tiny", "converted")),
    "cost": (OBJECT, ("gpt2",)),
    "data prepare": (OBJECT, ("TEXT", "--tokenizer", "models/tiny", "--out", "prepared", "--workers", "1")),
    "data show": (OBJECT, ("prepared",)),
    "doctor": (ARRAY, ()),
    "energy": (OBJECT, ()),
    "evaluate": (OBJECT, ("tiny", "--dataset", "TEXT")),
    "explain": (ARRAY, ("gqa", "--num-kv-heads", "2")),
    "generate": (LINES, ("tiny", "abc", "--max-new-tokens", "3", "--top-logprobs", "2")),
    "jobs list": (ARRAY, ()),
    "jobs plot": (ARRAY, ("one",)),
    "jobs show": (OBJECT, ("one",)),
    "jobs watch": (LINES, ("one",)),
    "list": (ARRAY, ()),
    **{f"list {kind}": (ARRAY, ()) for kind in
       ("mechanisms", "kernels", "linears", "blocks", "caches", "models", "shapes", "recipes", "datasets", "rewards",
        "plugins")},
    "map": (OBJECT, ("tiny", "abc")),
    "models check": (OBJECT, ("tiny",)),
    "models list": (ARRAY, ()),
    "models local": (ARRAY, ()),
    "models show": (OBJECT, ("tiny",)),
    "plugins": (ARRAY, ()),
    "pull": (ARRAY, ()),
    "reproduce": (ARRAY, ()),
    "roofline": (OBJECT, ()),
    "score": (ARRAY, ("tiny", "abc", "cab")),
    "show": (OBJECT, ("sliding_window", "--option", "window=4")),
    "tokenize": (ARRAY, ("models/tiny", "abc")),
    "top": (OBJECT, ()),
    "train": (LINES, ("--job", "one", "--dataset", "TEXT", "--mechanism", "mha", *LAYER, "--steps", "2")),
    "worked": (OBJECT, ("dot",)),
}  # fmt: skip
"""What each command prints, and a call of it; a file of text is called TEXT."""
ELSEWHERE = {
    "check": "tests/command_line/test_answers.py",
    "convert heads": "packages/attn-models/tests/networks/conversion/test_convert_command.py",
    "convert latent": "packages/attn-models/tests/networks/conversion/test_convert_command.py",
    "convert mechanism": "packages/attn-models/tests/networks/conversion/test_mechanism.py",
    "convert merge": "services/attn-train/tests/service/test_fine_tuning.py",
    "conformance": "packages/attn-testing/tests/test_foreign.py",
    "embed": "packages/attn-engine/tests/local/test_embed.py",
    "models export": "packages/attn-models/tests/export/test_exports.py",
    "models quantize": "tests/command_line/test_answers.py",
    "transcribe": "packages/attn-engine/tests/local/test_transcribe.py",
    "translate": "packages/attn-engine/tests/local/test_translate.py",
}
"""Commands that take long or want a model of another kind, and the tests that read their JSON."""
NAMED_BY_DATA = {"options", "fields", "last_metrics", "values", "shares", "sets", "percentiles"}
"""Objects whose keys are names that a user or a model chose."""


def leaves(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """A command, or those of a group, by their words."""
    within = getattr(command, "commands", None) or {}
    for name, inner in within.items():
        yield from leaves(inner, (*path, name))
    if not within or command.invoke_without_command:
        yield " ".join(path), command


COMMANDS = {
    words: command
    for name in installed().commands.names()
    for words, command in leaves(load(installed().commands.get(name)), (name,))
}


class LocalInference:
    """The inference and model services with engines in this process."""

    names = (INFERENCE, MODELS)

    def __init__(self, home: Path) -> None:
        self.served = ServedModels(ModelSources(home), lambda _name, folder, config, _: InProcess(folder, config))

    def handlers(self) -> Any:
        inference, models = InferenceHandlers(self.served), ModelHandlers(self.served)
        return handlers_of(INFERENCE, inference) | handlers_of(MODELS, models)

    async def start(self) -> None:
        await self.served.load("tiny", "", EngineConfig(num_threads=1, max_num_seqs=4))

    async def stop(self, shutdown_timeout: float) -> None:
        await self.served.stop(shutdown_timeout)


@asynccontextmanager
async def served(home: Path) -> AsyncIterator[str]:
    training = TrainingGrpc(Cluster(ClusterSettings(home=home)), TrainSettings(data_roots=(home,)))
    async with serving([LocalInference(home), training], shutdown_timeout=20.0) as gateway:
        yield gateway.address


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a tiny decoder and a text."""
    folder = tmp_path_factory.mktemp("home")
    torch.manual_seed(1)
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz \n")
    config = DecoderConfig(vocab_size=tokenizer.vocab_size, max_seq_len=64, hidden_size=8, num_layers=1, num_heads=2,
                           mechanism="mha")  # fmt: skip
    save_model(folder / "models" / "tiny", Decoder(config), tokenizer)
    (folder / "data").mkdir()
    (folder / "data" / "text.txt").write_text("abc cab\n" * 200)
    return folder


@pytest.fixture(scope="module")
def address(home: Path) -> Iterator[str]:
    """A server of this process in a thread of its own."""
    loop, found, ended = asyncio.new_event_loop(), [], asyncio.Event()
    ready = threading.Event()

    async def run() -> None:
        try:
            async with served(home) as address:
                found.append(address)
                ready.set()
                await ended.wait()
        finally:
            ready.set()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    ready.wait()
    yield found[0]
    loop.call_soon_threadsafe(ended.set)
    thread.join()
    loop.close()


def strange(value: Any, at: str = "") -> Iterator[str]:
    """What in an answer is not of the one shape."""
    if isinstance(value, list):
        for item in value:
            yield from strange(item, at)
    elif isinstance(value, dict):
        for key, item in value.items():
            if at.rpartition(".")[2] not in NAMED_BY_DATA and not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", key):
                yield f"{at}.{key}"
            yield from strange(item, f"{at}.{key}")
    elif isinstance(value, str) and re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?( ± .*| [kMGTm]?(B|s|J|Wh))?", value):
        yield f"{at}: a number as text, {value!r}"


def test_every_command_for_programs_is_called_here_or_by_its_own_test() -> None:
    for_programs = {
        words for words, command in COMMANDS.items() if any("--json" in option.opts for option in command.params)
    }
    assert for_programs == CALLS.keys() | ELSEWHERE.keys()
    assert all((workspace.ROOT / path).is_file() for path in ELSEWHERE.values())


def test_every_command_can_be_quiet_or_verbose() -> None:
    for words, command in COMMANDS.items():
        flags = [flag for option in command.params for flag in option.opts]
        assert {"-q", "--quiet", "-v", "--verbose"} <= set(flags), words
        assert len(flags) == len(set(flags)), f"{words}: a flag of two meanings"


@pytest.fixture
def answer(home: Path, address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.setenv("ATTN_HOME", str(home))
    monkeypatch.setenv("ATTN_ADDRESS", address)
    monkeypatch.chdir(home)

    def ask(words: str) -> str:
        _, given = CALLS[words]
        typed = [str(home / "data" / "text.txt") if word == "TEXT" else word for word in given]
        command = COMMANDS[words]
        code = command.main([*typed, "--json"], standalone_mode=False, prog_name=f"attn {words}")
        assert code in (None, 0)
        return capsys.readouterr().out

    return ask


def test_what_programs_read_has_one_shape(answer: Any) -> None:
    # One test, in this order: some read what others wrote. A job is trained before jobs are listed.
    first = ["train", "data prepare"]
    for words in [*first, *(words for words in CALLS if words not in first)]:
        shape, _ = CALLS[words]
        lines = answer(words).splitlines()
        assert lines, words
        found = [json.loads(line) for line in lines]
        assert shape == LINES or len(lines) == 1, f"{words}: {shape} is one line"
        assert all(isinstance(one, list if shape == ARRAY else dict) for one in found), f"{words} is no {shape}"
        if shape == ARRAY:
            assert all(isinstance(row, dict) for row in found[0]), words
        assert not list(strange(found)), words


def test_headings_become_keys() -> None:
    assert snake_case("KV cache bytes") == "kv_cache_bytes"
    assert snake_case("FLOPs a step") == "flops_a_step"
    assert list(strange([{"KV cache": 1, "size": "2.5 MB", "n": "12", "of": [{"x y": 1}]}])) == [
        ".KV cache",
        ".size: a number as text, '2.5 MB'",
        ".n: a number as text, '12'",
        ".of.x y",
    ]


def test_no_rows_are_an_empty_array(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows([], "nothing", json=True)
    assert json.loads(capsys.readouterr().out) == []
