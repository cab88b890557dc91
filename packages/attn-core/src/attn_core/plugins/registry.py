"""Registries of named items and the distributions that own them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, Generic, Protocol, TypeVar

from attn_core.errors import AmbiguousName, InvalidValue, UnknownName


class Named(Protocol):
    """Anything with a name."""

    @property
    def name(self) -> str:
        """The short name."""
        ...


Item = TypeVar("Item", bound=Named)


class Registry(Generic[Item]):
    """Items by full name `distribution/name`; a short name works as long as one distribution owns it.

    A short name that one of the distributions `built_in` owns is always its own; items of others have full names there.
    `installed_since` returns the plugins that were installed after the items were found, which errors for unknown names
    mention. No other distribution can register a name of the distribution `guarded`, which registers first. `same`, a
    function that can be pickled, returns this registry, or its like in another process; copies of objects that refer to
    the registry then refer to what it returns, and hold no items of their own.
    """

    def __init__(
        self,
        kind: str,
        installed_since: Callable[[], list[str]] = list,
        guarded: str | None = None,
        same: Callable[[], Registry[Item]] | None = None,
        built_in: Collection[str] = (),
    ) -> None:
        self.kind = kind
        self._installed_since = installed_since
        self._guarded = guarded
        self._same = same
        self._built_in = built_in
        self._items: dict[str, Item] = {}

    def register(self, item: Item, owner: str) -> None:
        """Add an item of the distribution `owner`; raises `InvalidValue` for a bad, repeated or guarded name."""
        given: object = item.name
        if not isinstance(given, str) or not given or "/" in given:
            raise InvalidValue.of(f"name of a {self.kind} of {owner}", given, "a non-empty string without '/'")
        full = f"{owner}/{item.name}"
        if full in self._items:
            raise InvalidValue(f"{owner} registers the {self.kind} {item.name!r} twice", name=full)
        if f"{self._guarded}/{given}" in self._items:
            raise InvalidValue.of(f"{self.kind} of {owner}", given, f"a name that {self._guarded} does not register")
        self._items[full] = item

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items.values())

    def __len__(self) -> int:
        return len(self._items)

    def full_name(self, name: str) -> str:
        """`distribution/name` for a short or full name; raises `UnknownName` or `AmbiguousName`."""
        if name in self._items:
            return name
        owners = self._owners(name)
        if len(owners) == 1:
            return owners[0]
        if owners:
            raise AmbiguousName.of(self.kind, name, owners)
        unknown = UnknownName.of(self.kind, name, self.names(), self.speaking_of(name))
        since = ", ".join(self._installed_since())
        if since:
            hint = f"installed since this process started: {since}; restart it and `attn serve` to load them"
            raise UnknownName(f"{unknown.message}; {hint}", **unknown.metadata | {"installed_since": since})
        raise unknown

    def _owners(self, name: str) -> list[str]:
        """The full names that a short name may mean."""
        owners = [full for full, item in self._items.items() if item.name == name]
        own = [full for full in owners if full.rpartition("/")[0] in self._built_in]
        return own or owners

    @property
    def overruled(self) -> dict[str, str]:
        """The full names of items whose short name means an item that is built in, with the full name of that item."""
        meant = {full: self._owners(item.name) for full, item in self._items.items()}
        return {full: owners[0] for full, owners in meant.items() if full not in owners}

    def __reduce__(self) -> Any:
        return super().__reduce__() if self._same is None else (self._same, ())

    def name_of(self, item: Item) -> str:
        """`distribution/name` of an item or of a copy of it; its short name if it is not registered."""
        alike = [full for full, own in self._items.items() if type(own) is type(item) and own.name == item.name]
        return next((full for full in alike if self._items[full] is item), (alike or [item.name])[0])

    def get(self, name: str) -> Item:
        """The item of a short or full name; raises `UnknownName` or `AmbiguousName`."""
        return self._items[self.full_name(name)]

    def speaking_of(self, word: str) -> list[str]:
        """At most three names of items with the word in name, summary or paper: "Reformer" is in the paper of `lsh`."""
        whole = re.compile(rf"(?<!\w){re.escape(word)}(?!\w)", re.IGNORECASE)
        if not word.strip():
            return []
        found = [name for name in self.names() if whole.search(f"{name} {words_about(self.get(name))}")]
        return sorted(found, key=lambda name: name.lower() != word.lower())[:3]

    def names(self) -> list[str]:
        """The names of all items, sorted: the short name, or the full one where several distributions own it."""
        return sorted(item.name if self._owners(item.name) == [full] else full for full, item in self._items.items())

    def owner(self, name: str) -> str:
        """The distribution that owns the item of this name."""
        return self.full_name(name).rpartition("/")[0]


def words_about(item: Named) -> str:
    """The summary of an item and the title and authors of its paper, if it has these, in one text."""
    paper = getattr(item, "paper", None)
    parts = (getattr(item, "summary", ""), getattr(paper, "title", ""), getattr(paper, "authors", ""))
    return " ".join(parts)
