"""The failures of the `tokenizers` library as errors of ours."""

from __future__ import annotations

from collections.abc import Callable

from attn_core.errors import AttnError

_PANIC = "PanicException"
"""The library's Rust panics, by class name (the class has no importable home). It derives from
BaseException and so would pass every `except Exception` and end a server."""


class LibraryErrors:
    """Turns whatever the library raises inside into `translate(its message)`; it only has bare Exceptions and panics.

    Entered for every token that is decoded, hence no generator.
    """

    def __init__(self, translate: Callable[[str], AttnError]) -> None:
        self._translate = translate

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None or isinstance(error, AttnError):
            return
        if isinstance(error, Exception) or type(error).__name__ == _PANIC:
            raise self._translate(str(error)) from error
