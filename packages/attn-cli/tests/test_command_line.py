"""What a person typing `attn` sees; the real command in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from attn_core.errors import how_to_install

ATTN = Path(sys.executable).with_name("attn")


def attn(*words: str, plugins: str | None = None, home: str | None = None) -> subprocess.CompletedProcess[str]:
    environ = dict(os.environ, COLUMNS="200") | ({} if plugins is None else {"ATTN_PLUGINS": plugins})
    environ |= {} if home is None else {"ATTN_HOME": home}
    return subprocess.run([ATTN, *words], capture_output=True, text=True, env=environ, check=False, timeout=60)


def test_every_subcommand_of_this_package_teaches_itself() -> None:
    for name in ("list", "show", "cost", "explain", "check", "plugins", "doctor"):
        answer = attn(name, "--help", plugins="attn-cli")
        assert answer.returncode == 0, answer.stderr
        assert "Usage: attn" in answer.stdout
        assert len(answer.stdout.splitlines()) > 8, f"attn {name} --help says too little"


def test_only_selected_plugins_are_loaded_and_the_others_say_so() -> None:
    answer = attn("plugins", "--json", plugins="attn-cli")
    rows = {row["plugin"]: row for row in json.loads(answer.stdout)}
    assert rows["attn-cli/cli"]["status"] == "ok"
    others = [row for name, row in rows.items() if name != "attn-cli/cli"]
    assert all(row["status"] == "not selected" and "ATTN_PLUGINS" in row["reason"] for row in others)


def test_an_unknown_mechanism_is_one_line_on_stderr_and_exit_code_2() -> None:
    answer = attn("show", "no-such-thing", plugins="attn-cli")
    assert answer.returncode == 2
    assert answer.stderr.splitlines() == ["attn: unknown mechanism 'no-such-thing'; no mechanism is installed"]
    assert answer.stdout == ""


def test_a_mistyped_subcommand_is_answered_with_the_nearest_one() -> None:
    answer = attn("lst", plugins="attn-cli")
    assert answer.returncode == 2
    assert "'list'" in answer.stderr


def test_listing_nothing_says_that_nothing_is_installed() -> None:
    answer = attn("list", "mechanisms", plugins="attn-cli")
    assert answer.stdout.strip() == "no mechanisms are installed"


def test_a_mistyped_option_value_names_what_is_allowed() -> None:
    answer = attn("list", "mechanism", plugins="attn-cli")
    assert answer.returncode == 2
    assert "mechanisms" in answer.stderr


def test_the_flag_for_programs_may_stand_before_or_after_what_is_listed() -> None:
    for words in (("--json",), ("--json", "mechanisms"), ("mechanisms", "--json")):
        assert json.loads(attn("list", *words, plugins="attn-cli").stdout) == []


def test_listing_into_a_pipe_prints_a_line_for_each_row() -> None:
    lines = attn("list", "plugins", plugins="attn-cli").stdout.splitlines()
    rows = json.loads(attn("list", "plugins", "--json", plugins="attn-cli").stdout)
    assert len(lines) == 2 + len(rows)


def test_the_doctor_reports_python_and_every_plugin() -> None:
    findings = json.loads(attn("doctor", "--json", plugins="attn-cli").stdout)
    subjects = {finding["subject"]: finding for finding in findings}
    assert subjects["python"]["ok"]
    assert subjects["attn-cli/cli"]["ok"]
    assert subjects["home"]["ok"]


def test_the_doctor_says_where_a_home_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answer = attn("doctor", "--json", plugins="attn-cli", home=str(tmp_path / "file" / "home"))
    (home,) = [finding for finding in json.loads(answer.stdout) if finding["subject"] == "home"]
    assert not home["ok"]
    assert "ATTN_HOME" in home["detail"]
    assert answer.returncode == 1


def test_what_is_shown_of_a_mechanism_are_the_options_that_are_given() -> None:
    pytest.importorskip("attn_variants")
    shown = json.loads(attn("show", "sliding_window", "--option", "window=4", "--json").stdout)
    assert shown["options"]["window"] == 4


def test_explain_says_who_computes_an_operation_on_rows_and_refuses_forms_that_it_has_not() -> None:
    answer = attn("explain", "gate", "--hidden-size", "64", "--json")
    rows = json.loads(answer.stdout)
    assert [row["verdict"] for row in rows if row["name"] == "torch"] == ["runs"]
    answer = attn("explain", "gate", "--form", "relu")
    assert answer.returncode != 0
    assert "silu, gelu, gelu_tanh" in answer.stderr


def test_a_price_without_known_models_says_which_package_has_them() -> None:
    answer = attn("cost", "gpt2", plugins="attn-cli")
    assert answer.stderr.splitlines() == [
        f"attn: the price of a known model needs attn-models: {how_to_install('attn-models')}"
    ]


def test_explain_linear_refuses_formats_that_do_not_exist_and_outputs_of_anything_else() -> None:
    answer = attn("explain", "linear", "--form", "q9")
    assert answer.returncode == 2
    assert "--form: 'q9' is not allowed; allowed: float32, bfloat16, int8, int4, fp8, q8_0" in answer.stderr
    answer = attn("explain", "gate", "--outputs", "3")
    assert answer.returncode == 2
    assert "--outputs: 3 is not allowed; allowed: only with linear" in answer.stderr
