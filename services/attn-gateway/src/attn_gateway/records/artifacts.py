"""Artefacts: named folders of files at any URL, stored through obstore. Files are addressed by their content.

A folder is published atomically: first its files, under their SHA-256, then the manifest that names them. Readers find
the old folder or the new one, whatever fails in between, and check every byte against the manifest.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import obstore
from attn_core.errors import CheckpointInvalid, InvalidValue, Unavailable, UnknownName, UserError
from obstore.exceptions import BaseError
from obstore.store import ObjectStore, from_url

ARTIFACTS = "ATTN_ARTIFACTS"
"""The environment variable with the URL of the artefacts."""
ALLOWED = "file:///FOLDER or s3://BUCKET/PREFIX"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
LATEST = "latest.json"
CHUNK = 8 << 20
PATIENCE: dict[str, Any] = {
    "max_retries": 60,
    "retry_timeout": timedelta(minutes=2),
    "backoff": {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=5), "base": 2},
}
"""The retries for a store that fails for a while. The ten retries of obstore may be over after five seconds."""
REACH_SECONDS = 5
"""How long a store may take to answer before a server reports that it cannot be reached."""
CLIENT_OPTIONS = ("allow_http", "allow_invalid_certificates", "proxy_ca_certificate", "proxy_excludes", "proxy_url")
LARGEST_MANIFEST = 16 << 20


class StoredFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of an artefact: its path in the folder, its size in bytes and the SHA-256 of its content."""

    path: str
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An artefact: its name, the tenant that owns it (empty if it is shared by all) and its files, sorted by path."""

    name: str
    owner: str
    files: tuple[StoredFile, ...]

    @property
    def digest(self) -> str:
        """The SHA-256 of the list of files, the same for artefacts with equal files."""
        return hashlib.sha256(msgspec.json.encode(self.files)).hexdigest()

    @property
    def size(self) -> int:
        """The size of all files in bytes."""
        return sum(file.size for file in self.files)


class ArtifactStore:
    """The artefacts at `url`, with a cache in the folder `cache`; safe to share between threads and processes.

    Raises `InvalidValue` for a URL that is neither `file://` nor `s3://`. Calls raise `Unavailable` if the store cannot
    be reached for two minutes.
    """

    def __init__(self, url: str, cache: Path, **options: Any) -> None:
        if not url.startswith(("file://", "s3://")):
            raise InvalidValue.of(ARTIFACTS, url, ALLOWED)
        if url.startswith("file://"):
            Path(url.removeprefix("file://")).mkdir(parents=True, exist_ok=True)
        else:
            options = {"retry_config": PATIENCE} | options
        try:
            self._store: ObjectStore = from_url(url, **options)
        except (BaseError, ValueError) as error:
            raise InvalidValue(f"{ARTIFACTS}: {url}: {_error_text(error)}", field=ARTIFACTS) from error
        self.url = url
        self._cache = cache
        self._options = options

    @classmethod
    def from_environment(cls, home: Path, environ: Mapping[str, str] = os.environ) -> ArtifactStore | None:
        """The store at `ATTN_ARTIFACTS`, with its cache in the home folder; None if it is not set."""
        url = environ.get(ARTIFACTS)
        return cls(url, home / "artifacts") if url else None

    def require_reachable(self) -> None:
        """Raise `Unavailable` unless the store answers now, in about `REACH_SECONDS` seconds at most."""
        options = self._options
        if not self.url.startswith("file://"):
            soon = timedelta(seconds=REACH_SECONDS)
            # obstore reads no client options from the environment if any are given, so they are read here.
            given = options.get("client_options") or _client_of_environment()
            client = {**given, "timeout": soon, "connect_timeout": soon}
            options = options | {"client_options": client, "retry_config": {"max_retries": 1, "retry_timeout": soon}}
        try:
            store: ObjectStore = from_url(self.url, **options)
            next(iter(obstore.list(store, "artifacts/")), None)
        except (BaseError, OSError) as error:
            raise self._unavailable(error) from error

    def publish(self, name: str, folder: Path, owner: str = "") -> Manifest:
        """Publish the files below `folder` as `name`, replacing what was there; stored files are not sent again."""
        _require_name(name)
        manifest = Manifest(name, owner, tuple(_described(folder)))
        for file in manifest.files:
            self._send(folder / file.path, file.sha256)
        data = msgspec.json.encode(manifest)
        self._require(obstore.put, f"artifacts/{name}/{manifest.digest}.json", data)
        self._require(obstore.put, f"artifacts/{name}/{LATEST}", data)
        return manifest

    def manifest(self, name: str) -> Manifest:
        """The manifest of an artefact; raises `UnknownName` with near names, `CheckpointInvalid` if it is damaged."""
        _require_name(name)
        try:
            data = self._read(f"artifacts/{name}/{LATEST}")
        except FileNotFoundError:
            raise UnknownName.of("artefact", name, self.names()) from None
        return _checked(name, data)

    def names(self) -> list[str]:
        """The names of all artefacts, sorted."""
        paths = map(PurePosixPath, self._paths("artifacts/"))
        return sorted(path.parent.name for path in paths if path.name == LATEST)

    def fetch(self, name: str) -> Path:
        """Fetch an artefact; returns a folder with its files, which must not be changed: other processes use it, too.

        Raises the errors of `manifest`, and `CheckpointInvalid` for a file whose content does not match the manifest.
        """
        manifest = self.manifest(name)
        target = self._cache / "folders" / name / manifest.digest
        if target.is_dir():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".half-", dir=target.parent))
        try:
            for file in manifest.files:
                path = partial / file.path
                path.parent.mkdir(parents=True, exist_ok=True)
                _link(self._cached(file), path)
            partial.chmod(0o755)
            try:
                partial.rename(target)
            except OSError:
                if not target.is_dir():  # another process may have been faster
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return target

    def remove(self, name: str) -> None:
        """Remove an artefact; the contents of its files are kept, because other artefacts may share them."""
        _require_name(name)
        for path in self._paths(f"artifacts/{name}/"):
            self._require(obstore.delete, path)

    def _cached(self, file: StoredFile) -> Path:
        """The path of a file in the cache; it is fetched and checked if it is not there."""
        place = self._cache / "blobs" / file.sha256
        if place.is_file() and place.stat().st_size == file.size:
            return place
        place.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".half-", dir=place.parent)
        partial = Path(name)
        try:
            with os.fdopen(handle, "wb") as written:
                digest = self._receive(file, written)
                written.flush()
                os.fsync(written.fileno())
            if digest != file.sha256:
                raise CheckpointInvalid.of(f"{self.url}: {file.path}", "its size or digest does not match the manifest")
            partial.replace(place)
        finally:
            partial.unlink(missing_ok=True)
        return place

    def _receive(self, file: StoredFile, written: Any) -> str:
        digest, size = hashlib.sha256(), 0
        try:
            for chunk in obstore.get(self._store, _blob(file.sha256)).stream(min_chunk_size=CHUNK):
                size += len(chunk)
                if size > file.size:
                    break
                digest.update(chunk)
                written.write(chunk)
        except FileNotFoundError:
            raise CheckpointInvalid.of(f"{self.url}: {file.path}", "is missing in the artefact store") from None
        except BaseError as error:
            raise self._unavailable(error) from error
        return digest.hexdigest() if size == file.size else ""

    def _send(self, path: Path, sha256: str) -> None:
        try:
            self._call(obstore.head, _blob(sha256))
        except FileNotFoundError:
            self._require(obstore.put, _blob(sha256), path)

    def _read(self, path: str) -> bytes:
        found = self._call(obstore.get, path)
        if found.meta["size"] > LARGEST_MANIFEST:
            raise CheckpointInvalid.of(f"{self.url}: {path}", f"more than {LARGEST_MANIFEST} bytes")
        return bytes(found.bytes())

    def _paths(self, prefix: str) -> list[str]:
        """The paths of everything that is stored below a prefix."""

        def listed(store: ObjectStore) -> list[str]:
            # Pages are fetched while they are iterated over.
            return [entry["path"] for page in obstore.list(store, prefix) for entry in page]

        found: list[str] = self._require(listed)
        return found

    def _require(self, function: Any, *arguments: Any) -> Any:
        """Like `_call`, for calls that find something missing only if the bucket is; raises `Unavailable` then."""
        try:
            return self._call(function, *arguments)
        except FileNotFoundError as error:
            raise self._unavailable(error) from error

    def _call(self, function: Any, *arguments: Any) -> Any:
        try:
            return function(self._store, *arguments)
        except FileNotFoundError:
            raise
        except (BaseError, OSError) as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: Exception) -> Unavailable:
        return Unavailable(f"the artefact store {self.url} cannot be used: {_error_text(error)}", store=self.url)


def _client_of_environment() -> dict[str, str]:
    """The options of the HTTP client that are set by environment variables, such as `AWS_ALLOW_HTTP`."""
    return {name: os.environ[key] for name in CLIENT_OPTIONS if (key := f"AWS_{name.upper()}") in os.environ}


def _require_name(name: str) -> None:
    if not NAME.fullmatch(name):
        allowed = "letters, digits, '-', '_' and '.', beginning with a letter or digit, at most 128 characters"
        raise InvalidValue.of("name", name, allowed)


def _described(folder: Path) -> list[StoredFile]:
    """The files below a folder; raises `UserError` for links that leave it, and for a folder without files."""
    found = []
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        if not path.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{path}: links to a file outside of {folder}, which is not published")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        found.append(StoredFile(path.relative_to(folder).as_posix(), path.stat().st_size, digest))
    if not found:
        raise UserError(f"{folder}: contains no files to publish")
    return found


def _checked(name: str, data: bytes) -> Manifest:
    """Parse a manifest; raises `CheckpointInvalid` for paths outside of the artefact's folder: write access to the
    store must not become write access to this machine."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise CheckpointInvalid.of(f"manifest of {name}", f"is damaged: {error}") from error
    for file in manifest.files:
        path = PurePosixPath(file.path)
        if path.is_absolute() or ".." in path.parts or not path.parts or not re.fullmatch("[0-9a-f]{64}", file.sha256):
            raise CheckpointInvalid.of(f"manifest of {name}", f"names a file outside of its folder: {file.path!r}")
    return manifest


def _blob(sha256: str) -> str:
    return f"blobs/sha256/{sha256[:2]}/{sha256}"


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _error_text(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
