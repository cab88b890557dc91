"""Lays packages for another version of Python in out/gpu-kit: `nox -s gpu-kit` says which.

python benchmarks/gpu/kit.py 3.12 PACKAGE ...
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

TARGET = Path(__file__).resolve().parents[2] / "out" / "gpu-kit"
PLATFORMS = [f"--platform=manylinux{kind}_x86_64" for kind in ("2014", "_2_17", "_2_28")]


def main(version: str, *packages: str) -> None:
    """Download and unpack the wheels."""
    shutil.rmtree(TARGET, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        download = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:", *PLATFORMS]
        subprocess.run([*download, f"--python-version={version}", f"--dest={folder}", *packages], check=True)
        for wheel in Path(folder).glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(TARGET)


if __name__ == "__main__":
    main(*sys.argv[1:])
