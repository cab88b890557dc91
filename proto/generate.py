"""Generate the Python stubs in src/attn/v1 from attn/v1/*.proto, or check that they are up to date.

Run it in an environment with the dependency group `generate`: the generator's version decides which protobuf and grpcio
releases can import the stubs, so it is pinned there.

    python generate.py           lint, format and generate
    python generate.py --check   lint, and fail if formatting or generating would change anything
"""

from __future__ import annotations

import argparse
import filecmp
import importlib.resources
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGE = Path("attn/v1")
STUBS = HERE / "src" / PACKAGE
SCRIPTS = sysconfig.get_path("scripts")


def run(*command: str | Path, cwd: Path) -> None:
    """Run a command of this environment; raises SystemExit with its exit code if it fails."""
    environment = {**os.environ, "PATH": f"{SCRIPTS}{os.pathsep}{os.environ.get('PATH', '')}"}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


def include_path() -> Path:
    """The folder that holds google/rpc/status.proto."""
    return Path(str(importlib.resources.files("google.rpc") / "status.proto")).parents[2]


def lint(workspace: Path, *, check: bool) -> None:
    """Lint and format the .proto files; with `check`, a file that is not formatted is an error.

    buf resolves imports only inside its workspace, so the one foreign file is copied beside ours there.
    """
    foreign = Path("google/rpc/status.proto")
    (workspace / foreign).parent.mkdir(parents=True)
    shutil.copy(include_path() / foreign, workspace / foreign)
    shutil.copytree(HERE / "attn", workspace / "attn")
    shutil.copy(HERE / "buf.yaml", workspace)
    run("buf", "lint", "--path", "attn", cwd=workspace)
    if check:
        run("buf", "format", "--path", "attn", "--diff", "--exit-code", cwd=workspace)
    else:
        run("buf", "format", "--path", "attn", "--write", cwd=workspace)
        shutil.copytree(workspace / "attn", HERE / "attn", dirs_exist_ok=True)


def generate(target: Path) -> None:
    """Write the message, stub and type modules of every .proto file below `target`."""
    sources = sorted(path.relative_to(HERE) for path in (HERE / PACKAGE).glob("*.proto"))
    outputs = [f"--{kind}_out={target}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    run(sys.executable, "-m", "grpc_tools.protoc", f"-I{HERE}", f"-I{include_path()}", *outputs, *sources, cwd=HERE)


def differences(fresh: Path) -> list[str]:
    """The generated files in which `fresh` and the checked-in stubs differ, by name."""
    names = {path.name for folder in (fresh, STUBS) for path in folder.glob("*_pb2*.py*")}
    _, different, missing = filecmp.cmpfiles(fresh, STUBS, sorted(names), shallow=False)
    return sorted(different + missing)


def install(fresh: Path) -> None:
    """Replace the checked-in stubs by those in `fresh`."""
    for old in STUBS.glob("*_pb2*.py*"):
        old.unlink()
    for new in fresh.iterdir():
        shutil.copy(new, STUBS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail on any difference")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        workspace, target = Path(folder, "lint"), Path(folder, "stubs")
        workspace.mkdir()
        target.mkdir()
        lint(workspace, check=check)
        generate(target)
        fresh = target / PACKAGE
        if not check:
            install(fresh)
        elif stale := differences(fresh):
            raise SystemExit(f"not up to date, run proto/generate.py: {', '.join(stale)}")


if __name__ == "__main__":
    main()
