"""`attn chat` and `attn generate --model`: no server anywhere."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from attn_cli.main import load
from attn_core import installed
from attn_core.errors import ContextLengthExceeded, Incompatible, InvalidValue, UnknownName
from attn_engine import LocalClient
from attn_models.decoder.decoder import Decoder
from attn_models.loading import save_model
from attn_models.tokenizers import character_tokenizer
from attn_schema import ChatMessage, EngineConfig, SamplingParams
from attn_schema.decoder import DecoderConfig
from click.testing import CliRunner

ATTN = "from attn_cli.main import main; main()"
SLOW = "import time, attn_engine; step = attn_engine.Engine.step; "
SLOW += "attn_engine.Engine.step = lambda engine: (time.sleep(0.05), step(engine))[1]; "


@pytest.fixture
def attn(home):
    def run(name: str, *words: str, text: str = ""):
        """What `attn NAME WORDS` does with `text` typed; raises what the command line tells in one line."""
        environment = {"ATTN_HOME": str(home), "ATTN_ADDRESS": "127.0.0.1:1"}
        command = load(installed().commands.get(name))
        return CliRunner().invoke(command, words, input=text, env=environment, catch_exceptions=False)

    return run


def test_generate_runs_a_model_here(attn, client):
    done = attn("generate", "--model", "writer", "to be or ", "--max-new-tokens", "12")
    assert done.stdout == client.complete("writer", "to be or ", SamplingParams(max_new_tokens=12)).text + "\n"
    assert done.stderr == "attn: loading writer ...\n"


def test_the_engine_is_configured_where_no_server_is(attn, home):
    """Eight bits change what is written no more than they change in a model loaded so; branches change nothing."""
    words = ("--model", "writer", "to be or ", "--max-new-tokens", "12")
    with LocalClient(home, EngineConfig(quantization="int8")) as coded:
        expected = coded.complete("writer", "to be or ", SamplingParams(max_new_tokens=12)).text
        assert coded.engine("writer").host.info.quantization == "int8"
    assert attn("generate", *words, "--quantization", "int8").stdout == expected + "\n"
    plain = attn("generate", *words)
    assert (
        attn("generate", *words, "--num-speculative-tokens", "3", "--speculative-tree-width", "3").stdout
        == plain.stdout
    )
    assert attn("chat", "--max-new-tokens", "6", "--quantization", "int8", text="hello\n").exit_code == 0
    for command, given in (("generate", words), ("chat", ("--max-new-tokens", "6"))):
        with pytest.raises(InvalidValue, match=r"int3.*int8"):
            attn(command, *given, "--quantization", "int3", text="hello\n")


def test_a_chat_remembers_what_was_said(attn, client):
    done = attn("chat", "--max-new-tokens", "6", text="hello\nand again\n/new\nhello\n")
    turns: list[ChatMessage] = []
    expected = ""
    for line in ("hello", "and again"):
        turns.append(ChatMessage(role="user", content=line))
        turns.append(
            ChatMessage(
                role="assistant", content=client.complete("talker", turns, SamplingParams(max_new_tokens=6)).text
            )
        )
        expected += turns[-1].content + "\n"
    assert done.stdout == expected + turns[1].content + "\n"
    assert done.stderr == "attn: loading talker ...\n"


def test_a_chat_that_outgrows_the_context_forgets_its_oldest_turns(attn):
    done = attn("chat", "--max-new-tokens", "30", text="one\ntwo\nthree\nfour\n")
    assert "the oldest turn is forgotten" in done.stderr
    assert done.exit_code == 0


def test_a_turn_that_could_never_fit_is_refused(attn):
    with pytest.raises(ContextLengthExceeded):
        attn("chat", "--max-new-tokens", "30", text="word " * 50 + "\n")


def test_ctrl_c_ends_the_answer_and_not_the_chat(home):
    words = ["chat", "--max-new-tokens", "100", "--temperature", "1", "--seed", "1"]
    with subprocess.Popen(
        [sys.executable, "-c", SLOW + ATTN, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"ATTN_HOME": str(home)},
    ) as chat:
        chat.stdin.write("a\n")
        chat.stdin.flush()
        assert chat.stdout.read(1)
        chat.send_signal(signal.SIGINT)
        # Before it stands a line that says which kernels are missed, where none is installed.
        said = iter(lambda: chat.stderr.read(1), "")
        assert any(sign == "[" for sign in said)
        assert chat.stderr.read(len("stopped]")) == "stopped]"
        out, _ = chat.communicate("/bye\n", timeout=60)
    assert chat.returncode == 0
    assert len(out) < 90


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        (("generate", "only-one-word"), InvalidValue, "a server's model and a prompt"),
        (("generate", "--model", "writer", "a", "b"), InvalidValue, "only a prompt"),
        (("generate", "served", "a", "--quantization", "int8"), InvalidValue, "attn serve --quantization"),
        (
            ("generate", "served", "a", "--speculative-tree-width", "2"),
            InvalidValue,
            "attn serve --speculative-tree-width",
        ),
        (("generate", "--model", "writer", "a", "--speculative-tree-width", "9"), InvalidValue, "1 to 8"),
        (("generate", "--model", "writer", "a", "--seed", str(2**64)), InvalidValue, "18446744073709551615"),
        (("generate", "served", "a", "--seed", str(2**64)), InvalidValue, "18446744073709551615"),
        (("chat", "--seed", "-1"), InvalidValue, "18446744073709551615"),
        (("chat", "served", "--quantization", "int8"), InvalidValue, "attn serve --quantization"),
        (("chat", "served", "--model", "talker"), InvalidValue, "not both"),
        (("chat", "--model", "nobody"), UnknownName, "nobody"),
    ],
)
def test_misuse_is_explained(attn, words, error, said):
    with pytest.raises(error, match=said):
        attn(*words, text="hello\n")


def test_without_the_package_that_runs_models_the_reason_is_said():
    environment = os.environ | {"ATTN_PLUGINS": "attn-cli,attn-client"}
    command = [sys.executable, "-c", ATTN, "chat"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("attn: ")
    assert "attn-engine" in done.stderr


def test_a_draft_writes_the_same_text_and_must_have_the_same_tokens(attn, client, home, tmp_path):
    whole = client.complete("writer", "to be or ", SamplingParams(max_new_tokens=12)).text + "\n"
    for draft in ("writer", "talker", str(home / "models" / "talker")):
        assert (
            attn("generate", "--model", "writer", "to be or ", "--max-new-tokens", "12", "--draft-model", draft).stdout
            == whole
        )
    other = character_tokenizer("abcdefgh")
    config = DecoderConfig(vocab_size=other.vocab_size, max_seq_len=64, hidden_size=16, num_layers=1, num_heads=2)
    save_model(tmp_path / "other", Decoder(config), other)
    with pytest.raises(Incompatible, match="tokens"):
        attn("generate", "--model", "writer", "to be", "--draft-model", str(tmp_path / "other"))
    with pytest.raises(UnknownName):
        attn("generate", "--model", "writer", "to be", "--draft-model", "nobody")
    with pytest.raises(InvalidValue, match="only with a model here"):
        attn("generate", "writer", "to be", "--draft-model", "talker")


@pytest.mark.parametrize("name", ["generate", "embed", "map", "chat", "translate"])
def test_how_to_reach_a_server_is_refused_beside_a_model_here_and_its_environment_is_not(attn, name):
    prompt = () if name == "chat" else ("to be",)
    for option in (("--address", "10.0.0.1:50051"), ("--tls-ca", "ca.pem")):
        with pytest.raises(InvalidValue, match=f"{option[0]}.*only with a server's model"):
            attn(name, "--model", "writer", *prompt, *option)
    assert attn("generate", "--model", "writer", "to be", "--max-new-tokens", "1").exit_code == 0


def test_the_explorer_of_a_sentence_is_one_file(attn, tmp_path):
    file = tmp_path / "map.html"
    done = attn("map", "--model", "writer", "to be", "--html", str(file), "--compare", "talker")
    assert done.exit_code == 0, done.output
    views = json.loads(re.search(r"id='views'>(.*?)</script>", file.read_text("utf-8"))[1])["views"]
    assert [view["label"] for view in views] == ["writer", "talker"]
    assert [layer["layer"] for layer in views[0]["layers"]] == [0, 1]
    assert views[0]["layers"][0]["query_tokens"] == ["t", "o", " ", "b", "e"]
