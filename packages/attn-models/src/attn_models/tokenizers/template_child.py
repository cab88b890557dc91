"""The process that renders chat templates, run as a script: it imports nothing from this project.

It reads lines of JSON {"template", "values"}, and answers each with a line {"text"} or {"error"}. The operating system
kills it by the signal SIGPROF if a template takes more than TIME_LIMIT seconds of processor time, however long the
machine makes it wait: the sandbox prevents access to attributes but not endless loops. It ends when its standard input
closes, so it cannot outlive its parent process.
"""

from __future__ import annotations

import json
import signal
import sys
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

TIME_LIMIT = 1.0
MEMORY_LIMIT = 1 << 30
TEXT_LIMIT = 8 << 20


class Generation(Extension):
    """The block `{% generation %}`, which marks what the assistant says for training; it is rendered as any text,
    between the values `generation_begins` and `generation_ends` if they are given."""

    tags = {"generation"}  # noqa: RUF012 -- as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        """The block as a scope of its own."""
        line = next(parser.stream).lineno
        inside = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.Name(f"generation_{name}", "load")]) for name in ("begins", "ends"))
        return nodes.Scope([begin, *inside, end], lineno=line)


def environment() -> ImmutableSandboxedEnvironment:
    """The Jinja sandbox with the few helpers that chat templates on the Hugging Face hub use."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = _strftime_now
    return sandbox


def answer(request: dict[str, Any]) -> dict[str, str]:
    """The reply to a request: the rendered text, or the error."""
    try:
        text = _compiled(request["template"]).render(**request["values"])
    except TemplateError as error:
        return {"error": f"{type(error).__name__}: {error.message}"}
    except Exception as error:  # noqa: BLE001 - a template can raise anything, and whatever it is is the answer
        return {"error": f"{type(error).__name__}: {error}"}
    return {"text": text} if len(text) <= TEXT_LIMIT else {"error": f"more than {TEXT_LIMIT} characters of text"}


def limit_memory() -> None:
    """Limit this process to MEMORY_LIMIT where the system can: Linux; macOS refuses to, and Windows has no limits."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    except (ModuleNotFoundError, ValueError, OSError):
        return


def main() -> None:
    """Answer requests from standard input until it ends."""
    limit_memory()
    # Ctrl-C in a terminal signals the whole process group; this process ends when its parent does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    timed = hasattr(signal, "SIGPROF")  # without it, as on Windows, the parent's patience is the limit
    if timed:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for line in sys.stdin:
        if timed:
            signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT)
        reply = json.dumps(answer(json.loads(line)))
        if timed:
            signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(reply + "\n")
        sys.stdout.flush()


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    return _SANDBOX.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 -- the order and defaults of transformers
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now(UTC).astimezone().strftime(layout)


_SANDBOX = environment()

if __name__ == "__main__":
    main()
