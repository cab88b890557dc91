"""The options of a command follow from the fields of its nouns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from attn_core.errors import InvalidValue, UnknownName
from attn_schema import EngineConfig, SamplingParams
from attn_schema.flags import with_flags
from typer.testing import CliRunner

Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def ask() -> Ask:
    app, seen = typer.Typer(), {}

    @app.command()
    @with_flags
    def generate(
        *,
        model: Annotated[str, typer.Argument()],
        sampling: SamplingParams,
        engine: EngineConfig,
        json: Annotated[bool, typer.Option("--json")] = False,
    ) -> None:
        """Generate."""
        seen.update(model=model, sampling=sampling, engine=engine, json=json)

    def run(*arguments: str) -> dict[str, Any]:
        result = CliRunner().invoke(app, list(arguments))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return {**seen, "output": result.output}

    return run


def test_flags_make_the_nouns(ask: Ask) -> None:
    line = ["m", "--temperature", "0.5", "--stop", "a", "--stop", "b", "--ignore-eos", "--logit-bias", "3=-1", "--json"]
    seen = ask(*line, "--kv-cache", "int8", "--num-speculative-tokens", "2")
    assert seen["sampling"] == SamplingParams(
        temperature=0.5, stop=("a", "b"), ignore_eos=True, logit_bias={3: -1.0}, num_speculative_tokens=2
    )
    assert seen["engine"] == EngineConfig(kv_cache="int8", num_speculative_tokens=2)
    assert (seen["model"], seen["json"]) == ("m", True)


def test_a_flag_may_name_a_file(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    output = ask("m", "--json-schema", str(tmp_path / "schema.json"))["sampling"].structured_output
    assert output.json_schema == '{"type": "object"}'
    with pytest.raises(InvalidValue, match="json_schema"):
        ask("m", "--json-schema", str(tmp_path / "none"))


def test_a_value_that_is_not_allowed_is_refused(ask: Ask) -> None:
    with pytest.raises(InvalidValue, match=r"top_p: 2.0 is not allowed"):
        ask("m", "--top-p", "2")
    with pytest.raises(InvalidValue, match="quantization"):
        ask("m", "--quantization", "int3")


def test_help_says_meaning_bounds_and_default(ask: Ask) -> None:
    help_text = " ".join(ask("--help")["output"].replace("│", " ").split())
    assert "--num-beams" in help_text
    assert "(1 to 64)" in help_text
    assert "--tenant-weights" not in help_text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.toml", "[sampling]\ntop_k = 3\ntemperature = 1.0\n"),
        ("c.yaml", "sampling:\n  top_k: 3\n  temperature: 1.0\n"),
    ],
)
def test_a_file_gives_what_the_line_does_not(ask: Ask, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    seen = ask("m", "--config", str(tmp_path / name), "--temperature", "0.5")
    assert seen["sampling"] == SamplingParams(top_k=3, temperature=0.5)


def test_unknown_keys_of_a_file_are_refused_by_name(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[sampling]\ntop_q = 3\n")
    with pytest.raises(UnknownName, match="'top_q'"):
        ask("m", "--config", str(tmp_path / "c.toml"))
    (tmp_path / "d.toml").write_text("[smapling]\ntop_k = 3\n")
    with pytest.raises(UnknownName, match="did you mean 'sampling'"):
        ask("m", "--config", str(tmp_path / "d.toml"))
    (tmp_path / "e.json").write_text("{}")
    with pytest.raises(InvalidValue, match=r"\.toml"):
        ask("m", "--config", str(tmp_path / "e.json"))


def test_a_noun_may_have_the_top_level_of_the_file_and_defaults_below_it(tmp_path: Path) -> None:
    app, seen = typer.Typer(), {}

    @app.command()
    @with_flags(top="sampling", defaults=lambda given: {"temperature": 0.25, "top_k": int(given["base"])})
    def generate(*, sampling: SamplingParams, base: Annotated[str, typer.Option()] = "1") -> None:
        """Generate."""
        seen.update(sampling=sampling, base=base)

    file = tmp_path / "mine.toml"
    file.write_text("top_k = 5\n")
    line = ["--base", "4", "--config", str(file), "--logit-bias", "7=2"]
    result = CliRunner().invoke(app, line)
    assert result.exception is None
    assert seen["sampling"] == SamplingParams(temperature=0.25, top_k=5, logit_bias={7: 2.0})
    assert CliRunner().invoke(app, ["--base", "4"]).exception is None
    assert seen["sampling"] == SamplingParams(temperature=0.25, top_k=4)
    file.write_text("[engine]\nkv_cache = 'int8'\n")
    with pytest.raises(UnknownName, match=r"mine\.toml 'engine'"):
        CliRunner().invoke(app, line, catch_exceptions=False)
