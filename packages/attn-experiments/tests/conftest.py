from __future__ import annotations

from importlib import import_module

import pytest
import torch
import typer
from attn_experiments import attn_commands
from typer.testing import CliRunner


@pytest.fixture(autouse=True)
def one_thread():
    """Small matrices are not worth a second thread, and another test may need it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def attn():
    """What a command of this package prints, without attn-cli; raises what the command does."""
    app = typer.Typer()
    for command in attn_commands():
        module, _, name = command.target.partition(":")
        app.command(command.name)(getattr(import_module(module), name))

    def run(*words: str) -> str:
        return CliRunner().invoke(app, words, catch_exceptions=False).stdout

    return run
