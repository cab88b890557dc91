"""Checkpoints in an object store, such as s3://BUCKET/PREFIX, from which any machine can resume.

Each worker uploads its files under a prefix that is used only once. The checkpoint is complete when the leading worker
has uploaded the manifest, which lists all files. Downloaded files are verified by their size and SHA-256.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import obstore
import torch.distributed as dist
from attn_core.errors import AttnError, CheckpointInvalid, CheckpointWriteFailed, Unavailable
from attn_gateway.records.artifacts import CHUNK, LARGEST_MANIFEST, StoredFile
from attn_schema.locks import exclusive
from obstore.exceptions import BaseError
from obstore.store import ObjectStore, from_url

from attn_train.checkpoint import CheckpointFolder, Checkpoints, Progress, require_parts, step_name, write_progress
from attn_train.collectives import all_gather_texts, leads, require_no_write_failure
from attn_train.settings import Layout
from attn_train.sharded_checkpoint import Parts, write_shards

FOLDER = "checkpoints"
"""The folder of checkpoints below the URL of the artefact store."""
MANIFEST = re.compile(r"step-(\d{9})\.json")
FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
PATIENCE: dict[str, Any] = {
    "max_retries": 10,
    "retry_timeout": timedelta(seconds=10),
    "backoff": {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=2), "base": 2},
}
"""How long failed requests are retried before an error is raised; the job then waits for as long as necessary."""
FILE_URL = "file://"

log = logging.getLogger(__name__)


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A complete checkpoint: its step, the prefix of its objects, its files, and the time at which it was written, in
    seconds since 1970."""

    step: int
    prefix: str
    files: tuple[StoredFile, ...]
    written: float


@dataclass(frozen=True, kw_only=True)
class StoredCheckpoint:
    """A complete checkpoint in an object store; see `Saved`."""

    step: int
    where: str
    size: int
    written: datetime


def checkpoints_of(job_id: str, home: Path, artifacts: str | None) -> Checkpoints:
    """Return the checkpoints of a job: at the URL of the artefact store if there is one, else in the job's folder."""
    if artifacts is None:
        return CheckpointFolder(Layout(home).checkpoints(job_id))
    if artifacts.startswith(FILE_URL):
        return CheckpointFolder(Path(artifacts.removeprefix(FILE_URL)) / FOLDER / job_id)
    return ObjectCheckpoints(f"{artifacts.rstrip('/')}/{FOLDER}/{job_id}", Layout(home).staged(job_id))


class ObjectCheckpoints:
    """The checkpoints of one run below `url`; see `Checkpoints`. `scratch` is a local folder for files in transfer.
    Methods raise `Unavailable` if the store cannot be reached."""

    def __init__(self, url: str, scratch: Path, **options: Any) -> None:
        self.url = url
        self._scratch = scratch
        self._options = {"retry_config": PATIENCE} | options

    def newest(self) -> StoredCheckpoint | None:
        """See `Checkpoints.newest`."""
        steps = self._steps()
        return self._described(self._manifest(steps[-1])) if steps else None

    def newest_whole(self, damaged: Callable[[StoredCheckpoint, CheckpointInvalid], None]) -> StoredCheckpoint | None:
        """See `Checkpoints.newest_whole`; the files of the checkpoint that is returned have been downloaded."""
        for step in reversed(self._steps()):
            try:
                manifest = self._manifest(step)
                self._fetched(manifest)
            except CheckpointInvalid as error:
                self._call(obstore.delete, _manifest_name(step))
                damaged(self._described(Manifest(step, "", (), time.time())), error)
            else:
                return self._described(manifest)
        return None

    @contextmanager
    def opened(self, step: int) -> Iterator[Path]:
        """See `Checkpoints.opened`; workers on the same machine share the folder."""
        yield self._fetched(self._manifest(step))

    def write(self, progress: Progress, parts: Parts, group: dist.ProcessGroup | None = None) -> StoredCheckpoint:
        """See `Checkpoints.write`."""
        target = self._where(progress.step)
        stage = self._scratch / f"stage-{0 if group is None else dist.get_rank(group)}"
        try:
            _in_all_workers(lambda: self._new_stage(stage), target, group)
            token = all_gather_texts(secrets.token_hex(8), group)[0]
            prefix = f"{step_name(progress.step)}-{token}"

            def send() -> list[StoredFile]:
                if leads(group):
                    write_progress(stage, progress)
                return [self._sent(file, prefix) for file in sorted(stage.iterdir())]

            _in_all_workers(lambda: write_shards(stage, parts, group), target, group)
            sent = msgspec.json.encode(_in_all_workers(send, target, group)).decode()
            listings = all_gather_texts(sent, group)
            files = tuple(file for text in listings for file in msgspec.json.decode(text, type=list[StoredFile]))
            manifest = Manifest(progress.step, prefix, files, time.time())

            def write_manifest() -> None:
                if leads(group):
                    self._call(obstore.put, _manifest_name(progress.step), msgspec.json.encode(manifest))

            _in_all_workers(write_manifest, target, group)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
        return self._described(manifest)

    def prune(self, keep: int) -> None:
        """See `Checkpoints.prune`; if the store cannot be reached, the next call removes them."""
        try:
            steps = self._steps()
            for step in steps[:-keep]:
                # Without a manifest it is not a checkpoint, even if its files cannot be removed.
                self._call(obstore.delete, _manifest_name(step))
            self._remove_others(steps[-keep:])
        except Unavailable as error:
            log.warning("old checkpoints could not be removed and are kept for now: %s", error.message)

    def sweep(self) -> None:
        """See `Checkpoints.sweep`; if the store cannot be reached, the next `prune` does it."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        try:
            self._remove_others(self._steps())
        except Unavailable as error:
            log.warning("files of incomplete checkpoints could not be removed and are kept for now: %s", error.message)

    def remove(self) -> None:
        """See `Checkpoints.remove`."""
        for step in self._steps():
            self._call(obstore.delete, _manifest_name(step))
        self._remove_others([])
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _remove_others(self, steps: list[int]) -> None:
        """Remove all objects except the checkpoints of these steps; nothing if one of their manifests is damaged."""
        kept = {_manifest_name(step) for step in steps}
        prefixes: set[str] = set()
        for step in steps:
            try:
                prefixes.add(self._manifest(step).prefix)
            except CheckpointInvalid:
                log.warning("the manifest of step %d is damaged; no files are removed", step)
                return
        for path in self._paths():
            if path not in kept and path.partition("/")[0] not in prefixes:
                self._call(obstore.delete, path)

    def _new_stage(self, stage: Path) -> None:
        # The checkpoint that the run resumed from is no longer needed: all workers have read it before they write one.
        shutil.rmtree(self._scratch / "fetched", ignore_errors=True)
        shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir(parents=True)

    def _sent(self, file: Path, prefix: str) -> StoredFile:
        with file.open("rb") as data:
            digest = hashlib.file_digest(data, "sha256").hexdigest()
        self._call(obstore.put, f"{prefix}/{file.name}", file)
        return StoredFile(file.name, file.stat().st_size, digest)

    def _steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in ascending order."""
        found = self._call(obstore.list_with_delimiter)
        names = (MANIFEST.fullmatch(entry["path"]) for entry in found["objects"])
        return sorted(int(name[1]) for name in names if name)

    def _paths(self) -> list[str]:
        def listed(store: ObjectStore) -> list[str]:
            # Pages are fetched lazily, while they are iterated over.
            return [entry["path"] for page in obstore.list(store) for entry in page]

        found: list[str] = self._call(listed)
        return found

    def _manifest(self, step: int) -> Manifest:
        """Read a manifest; raises `CheckpointInvalid` if it is missing, damaged, or names files outside its prefix."""
        where = self._where(step)
        try:
            found = obstore.get(self._store, _manifest_name(step))
            if found.meta["size"] > LARGEST_MANIFEST:
                raise CheckpointInvalid.of(where, f"its manifest has more than {LARGEST_MANIFEST} bytes")
            manifest = msgspec.json.decode(bytes(found.bytes()), type=Manifest)
        except FileNotFoundError:
            raise CheckpointInvalid.of(where, "has no manifest") from None
        except BaseError as error:
            raise self._unavailable(error) from error
        except msgspec.MsgspecError as error:
            raise CheckpointInvalid.of(where, f"its manifest is damaged: {error}") from error
        names = [manifest.prefix, *(file.path for file in manifest.files)]
        if manifest.step != step or not all(FILE.fullmatch(name) for name in names):
            raise CheckpointInvalid.of(where, "its manifest is damaged: it has another step or invalid file names")
        require_parts(where, {file.path: file for file in manifest.files})
        return manifest

    def _fetched(self, manifest: Manifest) -> Path:
        """Download the files of a checkpoint, unless they are here already, and return their local folder.

        Raises `CheckpointInvalid` for a file that is missing or does not match the manifest.
        """
        place = self._scratch / "fetched" / manifest.prefix
        try:
            with exclusive(self._scratch / "fetched.lock", None):
                if not place.is_dir():
                    place.parent.mkdir(parents=True, exist_ok=True)
                    with tempfile.TemporaryDirectory(prefix="half-", dir=self._scratch) as half:
                        for file in manifest.files:
                            self._receive(manifest, file, Path(half) / file.path)
                        Path(half).rename(place)
                        # `TemporaryDirectory` removes a folder of this name when it exits.
                        Path(half).mkdir()
        except OSError as error:
            raise CheckpointWriteFailed.of(place, error) from error
        return place

    def _receive(self, manifest: Manifest, file: StoredFile, target: Path) -> None:
        digest, size = hashlib.sha256(), 0
        try:
            with target.open("wb") as written:
                for chunk in obstore.get(self._store, f"{manifest.prefix}/{file.path}").stream(min_chunk_size=CHUNK):
                    size += len(chunk)
                    digest.update(chunk)
                    written.write(chunk)
                    if size > file.size:
                        break
        except FileNotFoundError:
            raise CheckpointInvalid.of(self._where(manifest.step), f"{file.path} is missing") from None
        except BaseError as error:
            raise self._unavailable(error) from error
        if size != file.size or digest.hexdigest() != file.sha256:
            problem = f"{file.path} differs from its manifest in size ({size} bytes of {file.size}) or SHA-256"
            raise CheckpointInvalid.of(self._where(manifest.step), problem)

    def _described(self, manifest: Manifest) -> StoredCheckpoint:
        size = sum(file.size for file in manifest.files)
        written = datetime.fromtimestamp(manifest.written, UTC)
        return StoredCheckpoint(step=manifest.step, where=self._where(manifest.step), size=size, written=written)

    def _where(self, step: int) -> str:
        return f"{self.url}/{step_name(step)}"

    @cached_property
    def _store(self) -> ObjectStore:
        try:
            return from_url(self.url, **self._options)
        except (BaseError, ValueError) as error:
            raise self._unavailable(error) from error

    def _call(self, function: Any, *arguments: Any) -> Any:
        try:
            return function(self._store, *arguments)
        except (BaseError, OSError) as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: Exception) -> Unavailable:
        reason = " ".join(str(error).split())[:200]
        return Unavailable(f"the artefact store {self.url} cannot be used: {reason}", store=self.url)


def _manifest_name(step: int) -> str:
    return f"{step_name(step)}.json"


def _in_all_workers(work: Callable[[], Any], target: str, group: dist.ProcessGroup | None) -> Any:
    """Run `work` in every worker of a group, and return this worker's result.

    Raises `CheckpointWriteFailed` in all workers if one of them failed.
    """
    failure: AttnError | None = None
    found: Any = None
    try:
        found = work()
    except OSError as error:
        failure = CheckpointWriteFailed.of(target, error)
    except Unavailable as error:
        failure = CheckpointWriteFailed.of(target, error.message)
    require_no_write_failure(failure, target, group)
    return found
