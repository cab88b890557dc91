"""`attn chat` keeps conversations and goes on with them; `attn run` fetches and chats; `attn models local` and `rm`."""

from __future__ import annotations

import json
import shutil
import stat

import pytest
from attn_cli.conversations import ConversationStore
from attn_cli.main import load
from attn_core import installed
from attn_core.errors import InvalidValue, StateInvalid, UnknownName, UserError
from attn_schema import ChatMessage, SamplingParams
from click.testing import CliRunner


@pytest.fixture
def own(home, tmp_path):
    """A home of its own with the same models."""
    shutil.copytree(home / "models", tmp_path / "models")
    return tmp_path


@pytest.fixture
def attn(own):
    def run(name, *words, text=""):
        environment = {"ATTN_HOME": str(own), "ATTN_ADDRESS": "127.0.0.1:1", "HF_ENDPOINT": "http://127.0.0.1:1"}
        command = load(installed().commands.get(name))
        return CliRunner().invoke(command, words, input=text, env=environment, catch_exceptions=False)

    return run


SHORT = ("--max-new-tokens", "6")


def turns_of(own, name):
    kept = json.loads((own / "conversations" / f"{name}.json").read_text())
    return [(turn["role"], turn["content"]) for turn in kept["messages"]]


def test_a_conversation_goes_on_where_it_stopped_as_if_it_had_not(attn, own, client):
    attn("chat", *SHORT, text="hello\n")
    (name,) = ConversationStore(own).ids()
    went_on = attn("chat", *SHORT, "--resume", "last", text="and again\n").stdout
    turns, said = [], ""
    for line in ("hello", "and again"):
        turns.append(ChatMessage(role="user", content=line))
        said = client.complete("talker", turns, SamplingParams(max_new_tokens=6)).text
        turns.append(ChatMessage(role="assistant", content=said))
    assert went_on == said + "\n"
    assert turns_of(own, name) == [(turn.role, turn.content) for turn in turns]
    assert ConversationStore(own).ids() == [name]


def test_a_conversation_keeps_its_model_and_its_system_message(attn, own):
    attn("chat", *SHORT, "--model", "talker", "--system", "be brief", text="hello\n")
    (name,) = ConversationStore(own).ids()
    attn("chat", *SHORT, "--resume", name, text="more\n")
    assert turns_of(own, name)[0] == ("system", "be brief")
    assert [role for role, _ in turns_of(own, name)] == ["system", "user", "assistant", "user", "assistant"]
    with pytest.raises(InvalidValue, match="--system"):
        attn("chat", "--resume", name, "--system", "be long")


def test_new_begins_another_conversation_and_no_save_keeps_none(attn, own):
    attn("chat", *SHORT, "--no-save", text="hello\n")
    assert not (own / "conversations").exists()
    attn("chat", *SHORT, text="one\n/new\ntwo\n")
    store = ConversationStore(own)
    assert sorted(found.begins for found in store.listed()) == ["one", "two"]
    listed = attn("chat", "--list")
    assert all(name in listed.stdout for name in store.ids())
    assert str(store.folder) in listed.stderr


def test_what_the_context_no_longer_holds_is_still_kept(attn, own):
    attn("chat", "--max-new-tokens", "30", text="one\ntwo\nthree\nfour\n")
    (name,) = ConversationStore(own).ids()
    assert [content for role, content in turns_of(own, name) if role == "user"] == ["one", "two", "three", "four"]


def test_only_their_owner_reads_conversations(attn, own):
    attn("chat", *SHORT, text="hello\n")
    (path,) = (own / "conversations").glob("*")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("../../etc/passwd", InvalidValue),
        ("x", InvalidValue),
        ("20260101-000000-abcd", UnknownName),
        ("last", UnknownName),
    ],
)
def test_what_is_no_kept_conversation_is_refused(attn, name, error):
    with pytest.raises(error):
        attn("chat", "--resume", name, text="hello\n")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        '{"format": 2, "model": "talker", "served": false, "started": "", "messages": []}',
        '{"format": 1, "model": "talker", "served": false, "started": "", "messages": [{"role": "user"}]}',
        '{"format": 1, "model": "talker", "served": false, "started": "", "messages": [], "code": "x"}',
    ],
)
def test_a_damaged_file_is_named_and_harms_no_list(attn, own, content):
    folder = own / "conversations"
    folder.mkdir()
    (folder / "20260101-000000-abcd.json").write_text(content)
    with pytest.raises(StateInvalid, match="20260101-000000-abcd"):
        attn("chat", "--resume", "last", text="hello\n")
    assert "20260101-000000-abcd" in attn("chat", "--list").stdout


def test_a_folder_that_cannot_be_written_ends_no_conversation(attn, own):
    (own / "conversations").write_text("a file in the way")
    done = attn("chat", *SHORT, text="hello\n")
    assert done.exit_code == 0
    assert len(done.stdout) > 1
    assert "the conversation is not kept" in done.stderr


def test_run_chats_with_what_is_here_and_says_what_cannot_be_fetched(attn, own):
    chatted = attn("chat", *SHORT, "--model", "talker", text="hello\n").stdout
    assert attn("run", "talker", *SHORT, text="hello\n").stdout == chatted
    assert [found.model for found in ConversationStore(own).listed()] == ["talker", "talker"]
    with pytest.raises(UnknownName, match="nobody"):
        attn("run", "nobody", text="hello\n")
    with pytest.raises(Exception, match=r"acme/model.*HF_") as raised:
        attn("run", "acme/model", text="hello\n")
    assert raised.value.reason == "UNAVAILABLE"


def test_models_of_this_machine_are_listed_and_removed(attn, own):
    rows = json.loads(attn("models", "local", "--json").stdout)
    assert [row["name"] for row in rows] == ["talker", "writer"]
    assert all(row["bytes"] > 1000 and row["family"] == "attn_decoder" for row in rows)
    assert "talker" in attn("models", "local").stdout
    with pytest.raises(UnknownName, match="nobody"):
        attn("models", "rm", "writer", "nobody")
    assert (own / "models" / "writer").is_dir()
    assert "writer is removed" in attn("models", "rm", "writer").stdout
    assert [path.name for path in (own / "models").iterdir()] == ["talker"]
    with pytest.raises(UserError):
        attn("generate", "--model", "writer", "a")
