"""The failures of the `tokenizers` library as errors of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attn_core.errors import AttnError

_PANIC = "PanicException"
"""The library's Rust panics, by class name (the class has no importable home). It derives from
BaseException and so would pass every `except Exception` and end a server."""


@contextmanager
def library_errors(translate: Callable[[str], AttnError]) -> Iterator[None]:
    """Turn whatever the library raises inside into `translate(its message)`; it only has bare Exceptions and panics."""
    try:
        yield
    except AttnError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == _PANIC:
            raise translate(str(error)) from error
        raise
