"""Every option that names a device takes every name of one, and refuses any other with the names that there are."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator
from typing import Any

import attn_schema
import click
import pytest
import typer
from attn_core import installed
from attn_core.errors import AttnError, InvalidValue
from attn_schema import DataConfig, DeviceConfig, ModelConfig
from attn_schema.codec import from_message, to_message
from attn_schema.device import DEVICES
from attn_schema.schema import Checked, fields_of

NAMES = ("auto", "cpu", "cuda", "cuda:0", "cuda:7", "mps")
OTHER = ("gpu", "cuda:", "cuda:x", "cuda:01", "CPU", "cpu:0", "mps:0", " cuda", "")
NOWHERE = ("--address", "127.0.0.1:1")
CALLS: dict[str, tuple[str, ...]] = {
    "chat": ("--model", "/nowhere/at/all"),
    "compare-training": ("--train", "mha", "--budget", "tokens=1", "--dataset", "/nowhere/at/all"),
    "embed": ("--model", "/nowhere/at/all", "text"),
    "evaluate": ("/nowhere/at/all", "--dataset", "none"),
    "explain": ("mha",),
    "generate": ("--model", "/nowhere/at/all", "text"),
    "map": ("--model", "/nowhere/at/all", "text"),
    "models load": ("name", *NOWHERE),
    "run": ("/nowhere/at/all",),
    "score": ("--model", "/nowhere/at/all", "text", "another"),
    "serve": ("--host", "192.0.2.1"),
    "train": (*NOWHERE,),
    "transcribe": ("--model", "/nowhere/at/all", "talk.wav"),
    "translate": ("--model", "/nowhere/at/all", "text"),
}
"""What each command is given beside a device, so that it comes to no more than an error."""


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command and subcommand, by name."""
    for _, command in installed().offers("attn_commands"):
        module, _, attribute = command.target.partition(":")
        target: Any = getattr(importlib.import_module(module), attribute)
        if isinstance(target, typer.Typer):
            group = typer.main.get_command(target)
            inner = getattr(group, "commands", {})
            yield from ((f"{command.name} {name}", found) for name, found in inner.items())
        else:
            app = typer.Typer()
            app.command()(target)
            yield command.name, typer.main.get_command(app)


WITH_DEVICE = {
    name: command
    for name, command in commands()
    if any("--device" in getattr(parameter, "opts", ()) for parameter in command.params)
}
NOUNS = [
    noun
    for name in attn_schema.__all__
    if isinstance(noun := getattr(attn_schema, name), type)
    and issubclass(noun, Checked)
    and any(info.name == "device" for info in fields_of(noun))
]


def outcome(name: str, device: str) -> AttnError | None:
    """The error of a command with this device."""
    try:
        WITH_DEVICE[name].main([*CALLS[name], "--device", device], standalone_mode=False, prog_name=name)
    except AttnError as error:
        return error
    return None


def test_the_commands_that_run_a_model_are_those_that_take_a_device() -> None:
    assert sorted(WITH_DEVICE) == sorted(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_a_command_takes_every_device_and_refuses_other_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for device in NAMES:
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        error = outcome(name, device)
        assert error is None or DEVICES not in error.message, error
        if name != "explain":
            assert error is not None, "it should not have come this far"
    for device in OTHER:
        error = outcome(name, device)
        assert type(error) is InvalidValue
        assert error.metadata["field"] == "device"
        assert DEVICES in error.message


@pytest.mark.parametrize("noun", NOUNS, ids=lambda noun: noun.__name__)
def test_a_config_takes_every_device_and_keeps_it_on_the_wire(noun: type[Any]) -> None:
    for device in NAMES:
        made = noun.from_mapping({"device": device})
        assert made.device == device
        if noun is not DeviceConfig:
            assert from_message(noun, to_message(made)) == made
    for device in OTHER:
        with pytest.raises(InvalidValue, match="auto, cpu, cuda") as error:
            noun.from_mapping({"device": device})
        assert error.value.metadata["field"] == "device"
    assert noun().device == "auto"


def test_configs_with_a_device_are_those_of_engines_and_of_training() -> None:
    assert sorted(noun.__name__ for noun in NOUNS) == ["DeviceConfig", "EngineConfig", "TrainingConfig"]
    assert not {"device"} & {info.name for noun in (ModelConfig, DataConfig) for info in fields_of(noun)}
