"""Chat templates run outside, sandboxed, for a second of processor time at most, and harm nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jinja2
import pytest
import tokenizers
from attn_core.errors import Unavailable, UserError
from attn_models.tokenizers import Tokenizer, chat
from attn_models.tokenizers.chat import TemplateWorker
from attn_models.tokenizers.settings import SPECIAL_TOKENS, TokenizerSettings


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


WRITTEN = [
    "{% if tools is not none %}tools{% endif %}{% if not documents %}none{% endif %}",
    "{% if tools is defined and tools %}{{ tools | tojson }}{% else %}plain{% endif %}",
    "{{ {'b': 'é', 'a': [1, 2]} | tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}",
    "{{ {'b': 1, 'a': 2} | tojson(indent=2) }}",
    "{% for m in messages %}{% generation %}{% set x = m.content %}{{ x }}{% endgeneration %}{{ x }}{% endfor %}",
]
"""What published templates write, each in a way in which renderers have differed."""


@pytest.mark.parametrize("template", WRITTEN)
def test_a_template_writes_what_it_does_in_transformers(template: str) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    messages = [{"role": "user", "content": "é<"}, {"role": "assistant", "content": "b"}]
    ours = Tokenizer(backend, TokenizerSettings(chat_template=template)).render_chat(messages)
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    theirs, _ = transformers.render_jinja_template([messages], tools=None, documents=None, chat_template=template)
    assert ours == theirs[0]


NAMED = [
    "{% if bos_token is defined %}{{ bos_token }}{% else %}none{% endif %}",
    "{% if eos_token is not defined %}none{% endif %}{{ eos_token }}",
    "{{ bos_token + 'a' }}",
    "{{ sep_token }}{{ cls_token }}{{ mask_token }}{{ pad_token }}{{ unk_token }}",
]
"""What published templates do with special tokens."""


@pytest.mark.parametrize("tokens", [{}, {"eos_token": "</s>"}, dict.fromkeys(SPECIAL_TOKENS, "a")], ids=len)
@pytest.mark.parametrize("template", NAMED)
def test_a_special_token_that_a_model_lacks_is_undefined_as_in_transformers(template: str, tokens: dict) -> None:
    transformers = pytest.importorskip("transformers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    peer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **tokens)
    ours = Tokenizer(backend, TokenizerSettings(chat_template=template, **tokens))
    messages = [{"role": "user", "content": "a"}]
    try:
        wanted = peer.apply_chat_template(messages, tokenize=False)
    except jinja2.UndefinedError:
        with pytest.raises(UserError):
            ours.render_chat(messages)
    else:
        assert ours.render_chat(messages) == wanted


LONG = "{% for i in range(50) %}{% for j in range(10000) %}{% set x = i * j %}{% endfor %}{% endfor %}x"
"""Takes a few tenths of a second of processor time."""


def processor_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


def test_a_machine_that_stops_in_the_middle_of_a_template_does_not_end_it(worker: TemplateWorker) -> None:
    worker.render("a", {})
    pid = worker._child.pid
    before = processor_ticks(pid)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(worker.render, LONG, {})
        while processor_ticks(pid) <= before + 1 and not waiting.done():
            time.sleep(0.002)
        os.kill(pid, signal.SIGSTOP)
        midway = not waiting.done()
        time.sleep(1.5)
        os.kill(pid, signal.SIGCONT)
        assert waiting.result(timeout=30) == "x"
    assert midway


def test_a_machine_that_does_not_run_templates_is_unavailable(worker: TemplateWorker, monkeypatch) -> None:
    monkeypatch.setattr(chat, "PATIENCE", 0.3)
    worker.render("a", {})
    os.kill(worker._child.pid, signal.SIGSTOP)
    with pytest.raises(Unavailable):
        worker.render("b", {})
    monkeypatch.undo()
    assert worker.render("b", {}) == "b"


def test_a_process_that_cannot_be_started_is_unavailable_with_the_cause(worker: TemplateWorker, monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(Unavailable, match=r"chat templates.*/no/such/python"):
        worker.render("a", {})
    monkeypatch.undo()
    assert worker.render("a", {}) == "a"


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
