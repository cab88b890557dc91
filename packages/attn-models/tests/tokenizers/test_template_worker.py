"""Chat templates run outside, sandboxed, for a second at most, and harm nobody."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from attn_core.errors import UserError
from attn_models.tokenizers.chat import TemplateWorker


@pytest.fixture
def worker():
    worker = TemplateWorker()
    yield worker
    worker.close()


NESTED = "{% for n in range(99999) %}" * 3 + "{% endfor %}" * 3


@pytest.mark.parametrize(
    "template",
    [
        NESTED,
        "{{ 'a' * 10**10 }}",
        "{{ range(10**9) | list }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% include '/etc/passwd' %}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ 1 / 0 }}",
        "{% for",
        "{{ 'x' * 9000000 }}",
    ],
)
def test_a_hostile_template_is_an_error_and_the_next_one_works(worker: TemplateWorker, template: str) -> None:
    with pytest.raises(UserError, match="chat template"):
        worker.render(template, {"messages": []})
    assert worker.render("{{ name }}!", {"name": "é\n你"}) == "é\n你!"


def test_what_a_template_refuses_is_told(worker: TemplateWorker) -> None:
    with pytest.raises(UserError, match="roles must alternate"):
        worker.render("{{ raise_exception('roles must alternate') }}", {})


def test_helpers_of_published_templates_exist(worker: TemplateWorker) -> None:
    assert worker.render("{{ {'b': 'é<'} | tojson }}", {}) == '{"b": "é<"}'
    assert worker.render("{% for n in [1, 2, 3] %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}", {}) == "1"
    assert worker.render("{{ strftime_now('%Y') }}", {}).isdigit()
    assert worker.render("{% if true %}\n  x\n{% endif %}\n", {}) == "  x\n"


def test_the_process_is_kept_between_renders(worker: TemplateWorker) -> None:
    worker.render("a", {})
    first = worker._child.pid
    worker.render("b", {})
    assert worker._child.pid == first


def test_many_threads_each_get_their_own_answer(worker: TemplateWorker) -> None:
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda n: worker.render("{{ n }}", {"n": n}), range(200)))
    assert texts == [str(n) for n in range(200)]


def test_the_process_ends_with_its_owner() -> None:
    code = """
import os
from attn_models.tokenizers.chat import TemplateWorker
worker = TemplateWorker()
worker.render("a", {})
print(worker._child.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    owner = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pid = int(owner.stdout)
    for _ in range(100):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return
        except (ProcessLookupError, FileNotFoundError):
            return
        time.sleep(0.1)
    pytest.fail(f"process {pid} outlived its owner by ten seconds")
