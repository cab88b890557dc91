"""Which stored objects a caller may name in a training configuration."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from attn_core.errors import InvalidValue, UnknownName
from attn_gateway.records import ModelRecords, Owners
from attn_gateway.records.artifacts import ARTIFACTS
from attn_gateway.records.owners import reached
from attn_schema.home import model_names, models_folder
from attn_schema.prepared import prepared_sources
from attn_schema.schema import DATASET, PREPARED, TOKENIZER, Reference, references_of
from attn_schema.training import TrainingConfig

from attn_train.data.load import model_folder
from attn_train.settings import DATA_ROOTS, Layout, TrainSettings
from attn_train.tasks.language_modeling import CHARACTER
from attn_train.tasks.seq2seq import is_learned_tokenizer


@dataclass(frozen=True)
class Place:
    """A path that a reference leads to. `named` says that the reference is a model's name and not a path."""

    path: Path
    named: bool


def places_of(reference: Reference, home: Path) -> list[Place]:
    """Resolve a reference; names of datasets, and words for tokenizers that are learned, lead to no place."""
    text = reference.text
    if reference.kind == DATASET:
        return [Place(Path(text), named=False)] if "/" in text else []
    if reference.kind == PREPARED:
        return [Place(Path(source.path), named=False) for source in prepared_sources(text)]
    if reference.kind == TOKENIZER and (text == CHARACTER or is_learned_tokenizer(text)):
        return []
    folder = model_folder(text, home)
    if folder is not None:
        return [Place(folder, named=True)]
    if "/" in text:
        return [Place(Path(text), named=False)]
    return [Place(models_folder(home) / text, named=True)]


class Access:
    """The rules for one caller: the `tenant` whose objects it may use, or None for an admin.

    A path must be below the folders of `ATTN_TRAIN_DATA` if these are set. If they are not set, it must be below the
    folder `data` of the home, or `models` for a model or tokenizer, unless the caller is an admin that is `trusted`: on
    this machine, or with a token. A tenant may name only what `Owners` lets it use.
    """

    def __init__(
        self, home: Path, settings: TrainSettings, records: ModelRecords, tenant: str | None, *, trusted: bool
    ) -> None:
        self._home, self._settings, self._tenant = home, settings, tenant
        self._anywhere = trusted and tenant is None and settings.data_roots is None
        url = os.environ.get(ARTIFACTS, "")
        private = [Path(url.removeprefix("file://"))] if url.startswith("file://") else []
        self._owners = Owners(home, records, private)

    def require(self, config: TrainingConfig) -> None:
        """Check everything that the configuration names.

        Raises `UnknownName` for the name, and `InvalidValue` for the path, of what the caller may not use, and for what
        the server cannot read. A tenant gets the same errors for what does not exist.
        """
        for reference in references_of(config):
            for place in places_of(reference, self._home):
                if place.named:
                    self._require_name(reference.text, place.path)
                elif not self._anywhere:
                    self._require_path(reference, place.path)
                _require_readable(reference, place.path)

    def _require_name(self, name: str, folder: Path) -> None:
        if self._tenant is not None and not self._owners.may_use(folder, self._tenant):
            known = model_names(self._home)
            places = {each: model_folder(each, self._home) for each in known}
            mine = [each for each, at in places.items() if at is not None and self._owners.may_use(at, self._tenant)]
            raise UnknownName.of("model", name, mine)

    def _require_path(self, reference: Reference, path: Path) -> None:
        roots = self._settings.data_roots
        allowed = (Layout(self._home).data,) if roots is None else roots
        if reference.kind not in {DATASET, PREPARED}:
            allowed = (*allowed, models_folder(self._home))
        inside = all(any(real.is_relative_to(root.resolve()) for root in allowed) for real in reached(path))
        if inside and self._owners.may_use(path, self._tenant):
            return
        below = " or ".join(str(root) for root in allowed) or "no folder, as paths are disabled"
        rule = f"a path below {below}; to allow other folders, set {DATA_ROOTS} on the server"
        if self._tenant is not None:
            rule += f"; of {Layout(self._home).data} a token may use the files, 'shared' and {self._tenant!r}"
        raise InvalidValue.of(f"config.{reference.field}", str(path), rule)


def _require_readable(reference: Reference, path: Path) -> None:
    """Raise `InvalidValue` for what exists, or may exist, but cannot be read by this process."""
    try:
        folder = path.is_dir()
        hidden = path.exists() and not os.access(path, os.R_OK | (os.X_OK if folder else 0), effective_ids=True)
    except PermissionError:
        hidden = True
    if hidden:
        raise InvalidValue.of(f"config.{reference.field}", str(path), "a path that the server can read")
