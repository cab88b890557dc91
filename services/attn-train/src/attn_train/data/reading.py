"""How rows are read by shapes, and what is found in reading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attn_core.errors import InvalidValue
from attn_models.vision_language.prompts import TileTexts
from attn_schema.prepared import PrepareConfig, ShowConfig
from attn_schema.training import DataConfig

from attn_train.data.pictures import ALONE, with_images
from attn_train.data.preference_shapes import PREFERENCES
from attn_train.data.shapes import (
    CHATS,
    COLUMNS,
    LABELS,
    PAIRS,
    PICTURES,
    TEXTS,
    Chat,
    Shape,
    Values,
    is_given,
    needed,
    shape_of,
)


def names_in(shapes: Sequence[Shape]) -> set[str]:
    """Return the names of all columns that shapes read."""
    return {column for shape in shapes for name in (*shape.needs, *shape.may) for column in COLUMNS.get(name, (name,))}


SEEN = ("image", "images")
"""Columns of images."""
_TALKS = (*CHATS, *PREFERENCES)
NAMES = frozenset(names_in((*_TALKS, *TEXTS, *PAIRS, *LABELS))).union(SEEN)
"""The names of all columns of these shapes."""


def require_texts(values: Values, allowed: Sequence[str] = ()) -> list[str]:
    """Return the columns of a row that are no texts, which must be `allowed`; raises `InvalidValue` for others."""
    found = [name for name in PICTURES if is_given(values.get(name))]
    if refused := [name for name in found if name not in allowed]:
        what = "columns of text: sounds and videos are not trained on, images only in conversations and preferences"
        raise InvalidValue.of("columns", ", ".join(refused), what)
    return found


def require_images(values: Values) -> list[str]:
    """Return the column of a row that has images, if there is one; raises `InvalidValue` for several, and as
    `require_texts` does."""
    found = require_texts(values, SEEN)
    if len(found) > 1:
        raise InvalidValue.of("columns", " and ".join(found), "one of them")
    return found


@dataclass
class Reading:
    """How rows are read: `columns` with other names, by the names of the shapes, and whether those that cannot be read
    are left out; what encodes images, or why they are refused, and the `folder` of the file that is read; and what was
    found in reading: files of images, shapes, unused columns, and the number of rows by a remark."""

    columns: Mapping[str, str] = field(default_factory=dict)
    skip_broken: bool = False
    tiles: TileTexts | str = ALONE
    folder: Path = Path()
    pictures: set[Path] = field(default_factory=set)
    shapes: Counter[str] = field(default_factory=Counter)
    used: set[str] = field(default_factory=set)
    aside: set[str] = field(default_factory=set)
    dropped: Counter[str] = field(default_factory=Counter)
    first_broken: str = ""
    _keys: set[int] = field(default_factory=set)
    _cased: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, config: DataConfig | ShowConfig | PrepareConfig, tiles: TileTexts | str = ALONE) -> Reading:
        """Return the reading of a config; raises `InvalidValue` for a column that no shape has."""
        columns = dict(given.split("=", 1) for given in config.columns)
        if unknown := sorted(columns.keys() - NAMES):
            raise InvalidValue.of("config.data.columns", ", ".join(unknown), f"names among {', '.join(sorted(NAMES))}")
        return cls(columns, config.skip_broken, tiles)

    def renamed(self, values: Values) -> dict[str, Any]:
        """Return the columns of a row by the names of the shapes; raises `InvalidValue` for one that is missing."""
        if missing := sorted(set(self.columns.values()) - values.keys()):
            raise InvalidValue.of("columns", ", ".join(missing), f"the columns {', '.join(map(str, values))}")
        taken = {*self.columns, *self.columns.values()}
        others = {self._known(name, values): value for name, value in values.items() if name not in taken}
        return others | {name: values[column] for name, column in self.columns.items()}

    def _known(self, name: str, values: Values) -> str:
        """The name of a column in lower case if a shape has that."""
        low = name.lower()
        if name in NAMES or low not in NAMES or low in values:
            return name
        self._cased[low] = name
        return low

    def _written(self, name: str) -> str:
        return self.columns.get(name) or self._cased.get(name, name)

    def needed_of(self, columns: Sequence[str], shapes: Sequence[Shape]) -> list[str]:
        """Return those of a table's columns that shapes may read; raises `InvalidValue` if they have not what one
        needs."""
        names = self.renamed(dict.fromkeys(columns, True))
        known = [[COLUMNS.get(name, (name,)) for name in shape.needs] for shape in shapes]
        if not any(all(names.keys() & set(each) for each in needs) for needs in known):
            raise InvalidValue.of(
                "columns", ", ".join(columns), f"{needed(shapes)}; name others with --columns NAME=COLUMN"
            )
        read = names_in(shapes)
        self.aside |= names.keys() - read - set(PICTURES)
        return [self._written(name) for name in names if name in read or name in PICTURES]

    def read(self, values: Values, shapes: Sequence[Shape]) -> Any:
        """Return what the shape of a row reads of it; raises `InvalidValue` for a row of no shape."""
        renamed = self.renamed(values)
        shape, found = shape_of(renamed, shapes, self.columns)
        pictures = require_images(renamed) if shape in _TALKS else require_texts(renamed)
        self.shapes[shape.name] += 1
        used = {*found.values(), *pictures}
        self.used |= set(map(self._written, used))
        unread = [name for name, value in renamed.items() if value is not None and name not in used]
        self.aside |= set(map(self._written, unread))
        read = {name: renamed[column] for name, column in found.items()}
        self.note(*shape.remark(read))
        made = shape.read(read)
        column = renamed[pictures[0]] if pictures else None
        if isinstance(made, tuple):
            return tuple(self._seen(one, column) for one in made)
        return self._seen(made, column)

    def _seen(self, made: Any, column: Any) -> Any:
        """Return a conversation with its images, and anything else as it is."""
        if isinstance(made, Chat):
            made = with_images(made, column, self.folder)
            self.pictures.update(one for one in made.images if isinstance(one, Path))
        return made

    def note(self, remark: str, count: int) -> None:
        """Count rows with a remark."""
        if count:
            self.dropped[remark] += count

    def seen(self, remark: str, key: object) -> None:
        """Count a row with a remark if an earlier one had the same key."""
        self.note(remark, int(hash(key) in self._keys))
        self._keys.add(hash(key))

    def broken(self, error: InvalidValue) -> None:
        """Count a row that cannot be read, or raise the error."""
        if not self.skip_broken:
            raise error
        self.first_broken = self.first_broken or error.message
        self.dropped["left out, as they cannot be read"] += 1

    def __str__(self) -> str:
        columns = f", columns left aside: {', '.join(sorted(self.aside))}" if self.aside else ""
        broken = f", the first that cannot be read: {self.first_broken}" if self.first_broken else ""
        return "".join(f", {count} {reason}" for reason, count in self.dropped.items()) + broken + columns
