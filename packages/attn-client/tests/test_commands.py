"""The commands, run as a user runs them."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from attn_cli.commands.follow import BarView, describe
from attn_cli.recipe import read_recipe
from attn_client.plugin import attn_commands
from attn_core.errors import AttnError, UserError
from attn_schema import output
from attn_schema.training import JobEvent, JobState, Metrics, OptimizerConfig, StateChange
from rich.console import Console
from typer.testing import CliRunner

START = """
import sys
from attn_cli.commands.generate import generate_command
import typer
app = typer.Typer()
app.command()(generate_command)
app(sys.argv[1:])
"""


class Shell:
    """Runs `attn NAME ...` as the attn command does: finds it through the hook, and turns errors into exit codes."""

    def __init__(self, address: str, folder: Path) -> None:
        self.environment = {"ATTN_ADDRESS": address, "COLUMNS": "200"}
        self.folder = folder

    def app(self, name: str) -> typer.Typer:
        (command,) = [command for command in attn_commands() if command.name == name]
        module, _, attribute = command.target.partition(":")
        target = getattr(importlib.import_module(module), attribute)
        if isinstance(target, typer.Typer):
            return target
        app = typer.Typer()
        app.command()(target)
        return app

    def run(self, name: str, *words: str, text: str = "") -> tuple[int, str, str]:
        result = CliRunner().invoke(self.app(name), words, input=text, env=self.environment)
        if isinstance(result.exception, AttnError):
            code = 2 if isinstance(result.exception, UserError) else 1
            return code, result.stdout, f"attn: {result.exception.message}\n"
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def shell(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(server.address, tmp_path)


@pytest.mark.parametrize("command", attn_commands(), ids=lambda command: command.name)
def test_every_command_explains_itself(shell: Shell, command: Any) -> None:
    code, out, _ = shell.run(command.name, "--help")
    assert code == 0
    assert "Usage" in out


def test_generate_says_on_stderr_how_fast_it_was_if_asked(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "verbosity", lambda: output.Verbosity.VERBOSE)
    code, out, err = shell.run("generate", "words", "a b", "--max-new-tokens", "3")
    assert (code, out) == (0, "a b a \n")
    assert re.fullmatch(r"attn: 2 prompt tokens, 3 generated: the first after [\d.]+ s, then [\d.]+ tokens/s\n", err)


def test_generate_prints_the_text(shell: Shell) -> None:
    assert shell.run("generate", "words", "one two", "--max-new-tokens", "3") == (0, "one two one \n", "")


def test_chat_with_a_server_shows_it_the_conversation_so_far(shell: Shell, server: Any) -> None:
    code, out, _ = shell.run("chat", "words", "--max-new-tokens", "2", "--system", "terse", text="hello\n\nagain\n")
    assert (code, out) == (0, "system:terse user:hello \nsystem:terse user:hello \n")
    turns = [(turn.role, turn.content) for turn in server.words.requests[-1].prompt.chat]
    answer = "system:terse user:hello "
    assert turns == [("system", "terse"), ("user", "hello"), ("assistant", answer), ("user", "again")]


def test_images_go_with_the_message_that_they_are_shown_with(shell: Shell, server: Any) -> None:
    one, other = (shell.folder / name for name in ("one.png", "other.png"))
    one.write_bytes(b"one")
    other.write_bytes(b"other")
    look = ("generate", "words", "look", "--max-new-tokens", "2", "--image", str(one), "--image", str(other))
    assert shell.run(*look)[0] == 0
    (turn,) = server.words.requests[-1].prompt.chat
    assert (turn.role, turn.content, list(turn.images)) == ("user", "look", [b"one", b"other"])
    lines = f"hello\n/image {other}\n/image {shell.folder}/none\nagain\n"
    code, _, err = shell.run("chat", "words", "--max-new-tokens", "2", "--image", str(one), text=lines)
    assert code == 0
    assert "none" in err
    turns = [(turn.content, list(turn.images)) for turn in server.words.requests[-1].prompt.chat]
    assert turns[::2] == [("hello", [b"one"]), ("again", [b"other"])]
    code, _, err = shell.run("generate", "words", "look", "--image", str(shell.folder / "none"))
    assert code == 2
    assert "a file that can be read" in err


def test_generate_wants_a_model_and_a_prompt(shell: Shell) -> None:
    code, _, err = shell.run("generate", "words")
    assert code == 2
    assert "a server's model and a prompt, or --model" in err


def test_generate_reads_standard_input_and_prints_json(shell: Shell) -> None:
    code, out, _ = shell.run("generate", "words", "-", "--max-new-tokens", "2", "--json", text="from a pipe")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert "".join(line["text"] for line in lines) == "from a "
    assert lines[-1]["finish_reason"] == "length"


def test_generate_prints_each_of_several_completions_whole(shell: Shell, server: Any) -> None:
    code, out, _ = shell.run("generate", "words", "one two", "--max-new-tokens", "3", "--n", "2", "--typical-p", "0.5")
    assert (code, out) == (0, "--- 1\n1: one\n--- 0\none two one \n")
    sampling = server.words.requests[-1].sampling
    assert (sampling.n, sampling.typical_p) == (2, 0.5)


def test_generate_asks_for_a_beam_search(shell: Shell, server: Any) -> None:
    options = ["--num-beams", "5", "--length-penalty", "0.5", "--n", "2", "--num-speculative-tokens", "3"]
    assert shell.run("generate", "words", "hi", "--max-new-tokens", "1", *options)[0] == 0
    sampling = server.words.requests[-1].sampling
    assert (sampling.num_beams, sampling.length_penalty, sampling.n) == (5, 0.5, 2)
    assert sampling.num_speculative_tokens == 3


def test_generate_sends_every_option(shell: Shell, server: Any) -> None:
    options = ["--temperature", "0", "--top-k", "5", "--top-p", "0.5", "--min-p", "0.25", "--seed", "3"]
    more = [
        "--repetition-penalty",
        "1.5",
        "--stop",
        "a",
        "--stop",
        "b",
        "--ignore-eos",
        "--system",
        "short",
        "--min-new-tokens",
        "1",
    ]
    assert shell.run("generate", "words", "hi", "--max-new-tokens", "1", *options, *more)[0] == 0
    request = server.words.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed) == (0, 5, 0.5, 0.25, 3)
    assert (sampling.repetition_penalty, list(sampling.stop), sampling.ignore_eos) == (1.5, ["a", "b"], True)
    assert sampling.min_new_tokens == 1
    assert [turn.role for turn in request.prompt.chat] == ["system", "user"]


def test_score_ranks_texts_by_what_a_server_says(shell: Shell) -> None:
    code, out, _ = shell.run("score", "words", "a b c", "d", "e f", "--json")
    assert code == 0
    found = json.loads(out)
    assert [row["text"] for row in found] == ["d", "e f", "a b c"]
    assert [row["nats"] for row in found] == [0, -1, -3]
    assert [row["nats_a_token"] for row in found] == [0, -1, -1.5]
    assert shell.run("score", "words")[0] == 2


def test_embed_asks_a_server_and_shows_how_near_texts_are(shell: Shell) -> None:
    code, out, _ = shell.run("embed", "words", "a", "ab", "-", text="abc\n")
    assert (code, [line.split() for line in out.splitlines()]) == (
        0,
        [["1", "1.000", "a"], ["2", "0.600", "1.000", "ab"], ["3", "1.000", "0.600", "1.000", "abc"]],
    )
    code, out, _ = shell.run("embed", "words", "-", "--json", text="\ufeffa\u2028b\x85\r\nc\n")
    assert [line["text"] for line in json.loads(out)] == ["a\u2028b\x85", "c"]
    code, out, _ = shell.run("embed", "words", "a", "--json")
    assert json.loads(out) == [{"text": "a", "embedding": [1, 0]}]
    for words in (["words"], ["words", "-"]):
        code, _, err = shell.run("embed", *words)
        assert code == 2
        assert "a server's model, or --model, and at least one text" in err


def test_an_error_is_one_line_and_two(shell: Shell) -> None:
    assert shell.run("generate", "word", "hi") == (2, "", "attn: unknown model 'word'; did you mean 'words'?\n")


def test_a_server_that_is_not_there_is_one_line_and_one(shell: Shell) -> None:
    code, _, err = shell.run("generate", "words", "hi", "--address", "127.0.0.1:1")
    assert (code, err) == (1, "attn: no attn server answers at 127.0.0.1:1; start one with: attn serve\n")
    assert shell.run("models", "list", "--address", "nowhere")[0] == 2


def test_ctrl_c_cancels_on_the_server(shell: Shell, server: Any) -> None:
    command = [sys.executable, "-c", START, "words", "on and on"]
    process = subprocess.Popen(command, env=os.environ | shell.environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.read(2) == "on"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert server.words.freed.wait(timeout=60)


def test_train_submits_what_was_asked_and_follows(shell: Shell, server: Any) -> None:
    (shell.folder / "text.txt").write_text("to be")
    options = [
        "--mechanism",
        "gqa",
        "-o",
        "window=8",
        "-o",
        "name=x",
        "--num-kv-heads",
        "2",
        "--min-learning-rate",
        "0",
    ]
    code, out, _ = shell.run("train", "--dataset", "text.txt", "--steps", "12", *options)
    assert code == 0
    config = server.book.config
    assert config.data.dataset == str(shell.folder / "text.txt")
    assert (config.model.mechanism, config.model.options) == ("gqa", {"window": 8, "name": "x"})
    assert (config.model.num_kv_heads, config.optimizer.steps, config.optimizer.min_learning_rate) == (2, 12, 0)
    assert config.optimizer.weight_decay == OptimizerConfig().weight_decay
    assert out.splitlines()[0] == "job-1: succeeded, step 12/12"
    assert "step 4/12  loss 0.2500" in out
    assert "job-1 succeeded: loss 1.5000" in out


def test_options_of_training_change_a_recipe(shell: Shell, server: Any) -> None:
    given = ["--batch-size", "3", "--lr", "0.5", "--warmup-steps", "0", "--weight-decay", "0", "--eval-steps", "7"]
    code, *_ = shell.run("train", "--recipe", "bert", "--hidden-size", "64", "--detach", *given)
    assert code == 0
    config = server.book.config
    assert (config.optimizer.batch_size, config.optimizer.learning_rate, config.optimizer.steps) == (3, 0.5, 2000)
    assert (config.optimizer.warmup_steps, config.optimizer.weight_decay, config.evaluation.eval_steps) == (0, 0, 7)
    assert (config.model.family, config.model.hidden_size, config.model.num_layers) == ("masked_lm", 64, 4)


def test_options_of_a_mechanism_are_added_to_those_of_the_recipe(shell: Shell, server: Any) -> None:
    assert shell.run("train", "--recipe", "longformer", "-o", "window=4", "--detach")[0] == 0
    options = server.book.config.model.options
    assert options == read_recipe("longformer").model.options | {"window": 4}


def test_the_command_line_wins_over_the_file_and_the_file_over_the_recipe(shell: Shell, server: Any) -> None:
    (shell.folder / "mine.toml").write_text("seed = 3\n[optimizer]\nsteps = 9\nwarmup_steps = 1\nbatch_size = 5\n")
    line = ["--recipe", "bert", "--config", "mine.toml", "--batch-size", "6", "--detach"]
    assert shell.run("train", *line)[0] == 0
    config = server.book.config
    assert (config.seed, config.optimizer.steps, config.optimizer.batch_size) == (3, 9, 6)
    assert config.optimizer.learning_rate == read_recipe("bert").optimizer.learning_rate


@pytest.mark.parametrize(("option", "value"), [("--steps", "0"), ("--dropout", "1"), ("--norm", "batch")])
def test_a_value_out_of_its_range_is_refused_with_its_name(shell: Shell, option: str, value: str) -> None:
    code, out, said = shell.run("train", "--dataset", "shakespeare", option, value)
    assert (code, out) == (2, "")
    assert option.removeprefix("--") in said
    assert "allowed" in said


def test_train_passes_fields_by_name_on(shell: Shell, server: Any) -> None:
    further = ["num_nextn_predict_layers=1", 'pattern=["linear", "mha"]']
    given = ["--kv-sharing", "cla:2", "--attention-dropout", "0.25"]
    given += [part for pair in further for part in ("--model-options", pair)]
    assert shell.run("train", "--dataset", "shakespeare", "--detach", *given)[0] == 0
    model = server.book.config.model
    assert (model.kv_sharing, model.attention_dropout) == ("cla:2", 0.25)
    assert model.model_options == {"num_nextn_predict_layers": 1, "pattern": ["linear", "mha"]}


@pytest.mark.parametrize("option", ["--options", "--model-options"])
@pytest.mark.parametrize("pair", ["num_nextn_predict_layers", "=1", ""])
def test_a_malformed_pair_is_refused_under_the_option_it_was_given_to(shell: Shell, option: str, pair: str) -> None:
    status, out, said = shell.run("train", "--dataset", "shakespeare", option, pair)
    assert (status, out) == (2, "")
    assert f" {option}: " in f" {said}"
    assert "NAME=VALUE" in said


def test_train_detached_prints_the_job_and_takes_data_by_name(shell: Shell, server: Any) -> None:
    assert shell.run("train", "--dataset", "shakespeare", "--detach") == (0, "job-1\n", "")
    assert server.book.config.data.dataset == "shakespeare"


def test_a_failed_job_fails_the_command_with_its_reason(shell: Shell, server: Any) -> None:
    server.book.state = JobState.FAILED
    code, _, err = shell.run("jobs", "watch", "job-1")
    assert (code, err) == (1, "attn: the disk is full\n")


def test_jobs_can_be_read_by_programs(shell: Shell, server: Any) -> None:
    assert json.loads(shell.run("jobs", "list", "--json")[1])[0]["last_metrics"] == {
        "loss": 1.5,
        "validation_loss": 1.25,
    }
    listed = shell.run("jobs", "list")[1]
    assert "validation loss" in listed
    assert re.search(r"1\.5000\s+1\.2500", listed)
    assert json.loads(shell.run("jobs", "show", "job-1", "--json")[1])["state"] == "succeeded"
    shown = dict(line.split(maxsplit=1) for line in shell.run("jobs", "show", "job-1")[1].splitlines())
    assert shown["state"] == "succeeded"
    assert shown["config.optimizer.steps"] == str(server.book.config.optimizer.steps)
    events = [
        json.loads(line) for line in shell.run("jobs", "watch", "job-1", "--after", "10", "--json")[1].splitlines()
    ]
    assert [event["id"] for event in events] == ["job-1", 11, 12]
    assert shell.run("jobs", "cancel", "job-1")[1] == "job-1 is cancelled\n"
    assert "job-1" in shell.run("jobs", "list")[1]


def test_the_curve_of_a_job_is_drawn_beside_stored_ones_and_other_jobs(shell: Shell, server: Any) -> None:
    made = server.book.job
    server.book.job = lambda: msgspec.structs.replace(made(), last_event_id=12)
    (shell.folder / "other.csv").write_text("step,loss\n1,2\n12,0.5\n")
    beside = ["--beside", "other.csv", "--beside", "job-1"]
    lines = shell.run("jobs", "plot", "job-1", *beside)[1].splitlines()
    ours = "job-1: 0.08333 at step 12"
    assert [line[2:] for line in lines[-3:]] == [ours, "other.csv: 0.5000 at step 12", ours]
    found = json.loads(shell.run("jobs", "plot", "job-1", *beside[:2], "--json")[1])
    assert found[1] == {"name": "other.csv", "points": [[1, 2.0], [12, 0.5]]}
    assert found[0]["points"] == [[step, 1 / step] for step in range(1, 13)]
    code, out, said = shell.run("jobs", "plot", "job-1", "--metric", "accuracy")
    assert (code, out) == (2, "")
    assert "loss" in said


def test_into_a_pipe_every_row_of_a_table_is_one_line(shell: Shell) -> None:
    shell.environment["COLUMNS"] = "30"
    lines = [line for line in shell.run("models", "list")[1].splitlines() if line.strip()]
    assert len(lines) == 2 + 150
    assert [line.split()[0] for line in lines[2:5]] == ["m000", "m001", "m002"]


def test_models_are_listed_loaded_and_unloaded(shell: Shell, server: Any) -> None:
    assert len(json.loads(shell.run("models", "list", "--json")[1])) == 150
    (shell.folder / "run").mkdir()
    code, out, _ = shell.run("models", "load", "new", "run", "--dtype", "bfloat16")
    assert (code, out.startswith("new is serving")) == (0, True)
    assert server.shelf.models["new"].source == str(shell.folder / "run")
    assert server.shelf.models["new"].dtype == "bfloat16"
    assert shell.run("models", "unload", "new") == (0, "new is unloaded\n", "")


def test_a_map_is_a_picture(shell: Shell) -> None:
    from matplotlib import image

    code, out, err = shell.run("map", "words", "cost $5 or  $6", "--layer", "1", "-o", "map.png")
    assert code == 0, err
    assert out == f"3 heads of layer 1: {shell.folder / 'map.png'}\n"
    pixels = image.imread(shell.folder / "map.png")
    assert pixels.shape[2] == 4
    assert pixels.std() > 0.01
    assert shell.run("map", "words", "a b", "-o", "no/such/folder.png")[0] == 2


def test_a_map_for_programs_is_its_weights(shell: Shell) -> None:
    code, out, _ = shell.run("map", "words", "a b", "--head", "2", "--json")
    assert code == 0
    assert json.loads(out)["attention_weights"] == [[[1.0, 0.0], [0.5, 0.5]]]


def test_what_was_measured_at_the_end_is_shown():
    metrics = {"loss": 0.5, "accuracy": 0.914, "masked_accuracy": 0.2, "answer_accuracy": 1.0}
    shown = describe(metrics)
    for said in ("accuracy 91.4%", "masked accuracy 20.0%", "answer accuracy 100.0%"):
        assert said in shown


@pytest.mark.parametrize("loss", [12.34567, 0.6931472, 0.04321987, 1.234567e-5, -2.34567e-9])
def test_losses_near_to_0_keep_their_digits(loss):
    assert float(describe({"loss": loss}).split()[1]) == pytest.approx(loss, rel=1e-3)


@pytest.mark.parametrize("width", [50, 70, 200])
def test_bar_steps_and_remaining_time_stay_in_a_narrow_terminal(width: int) -> None:
    console = Console(width=width, file=io.StringIO())
    view = BarView(console)
    view.show(JobEvent(state_change=StateChange(current=JobState.RUNNING)))
    values = {"loss": 4.4184, "validation_loss": 4.1571, "learning_rate": 5e-3, "tokens_per_second": 1025.0}
    view._progress.update(view._task, total=5000)
    view.show(JobEvent(metrics=Metrics(step=1234, values=values)))
    console.print(view._progress.get_renderable())
    (line,) = console.file.getvalue().splitlines()[-1:]
    assert len(line) <= width
    assert line.startswith("running ")
    assert "1234/5000" in line
    assert "-:--:--" in line
    assert "loss 4.4184" in line
    assert ("tokens/s" in line) == (width == 200)
