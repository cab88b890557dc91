"""Ray is started when it is needed and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
from attn_core.errors import InvalidValue, MissingPackage, Unavailable
from attn_gateway import Cluster, ClusterSettings, ModelToLoad
from attn_gateway.command import at_its_path


def below() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


@pytest.mark.ray
@pytest.mark.slow
async def test_a_private_cluster_computes_and_then_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray  # before the token is there, as another package may have done

    monkeypatch.setenv("HOME", str(tmp_path))
    before = below()
    cluster = Cluster(ClusterSettings(cpus=1))
    try:
        await cluster.start()
        await cluster.start()
        from ray._raylet import AuthenticationMode, get_authentication_mode

        @ray.remote(num_cpus=0)
        def double(number: int) -> int:
            return 2 * number

        @ray.remote(num_cpus=0)
        def niceness() -> int:
            return os.nice(0)

        assert await double.remote(21) == 42
        assert await niceness.remote() == os.nice(0)
        assert ray.get_runtime_context().namespace == "attn"
        assert ray.cluster_resources()["CPU"] == 1
        folder = Path(ray._private.worker._global_node.get_session_dir_path()).parent
        assert folder.is_dir()
        assert get_authentication_mode() == AuthenticationMode.TOKEN
    finally:
        await cluster.stop()
    assert below() == before
    assert not folder.exists()
    assert not (tmp_path / ".ray").exists()
    assert not ray.is_initialized()


@pytest.mark.ray
@pytest.mark.cluster
@pytest.mark.slow
async def test_a_ray_that_starts_slowly_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scheduler gets no processor time for longer than Ray waits, in every attempt."""
    monkeypatch.setenv("HOME", str(tmp_path))
    ended = threading.Event()

    def hold_back() -> None:
        seen = set[int]()
        while not ended.wait(0.02):
            for process in psutil.Process().children():
                if process.pid not in seen and process.name() == "raylet":
                    seen.add(process.pid)
                    process.suspend()
                    threading.Timer(34.0, process.resume).start()

    thread = threading.Thread(target=hold_back)
    cluster = Cluster(ClusterSettings(cpus=1))
    thread.start()
    try:
        await cluster.start()
    finally:
        ended.set()
        thread.join()
        await cluster.stop()


async def test_a_cluster_that_nobody_needed_starts_nothing() -> None:
    before = below()
    cluster = Cluster(ClusterSettings())
    await cluster.stop()
    assert below() == before


class NoRay:
    """A finder of modules for which Ray is not installed."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if name == "ray":
            raise ModuleNotFoundError("No module named 'ray'", name="ray")


async def test_a_ray_that_cannot_be_imported_is_asked_for_once_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr(sys, "meta_path", [NoRay, *sys.meta_path])
    cluster = Cluster(ClusterSettings())
    with pytest.raises(MissingPackage):
        await cluster.start()
    assert capsys.readouterr() == ("", ""), "no attempt is logged"
    assert await asyncio.to_thread(os.listdir, tmp_path) == []
    await cluster.stop()


async def test_a_cluster_that_is_not_there_is_named() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    cluster = Cluster(ClusterSettings(address=address))
    try:
        with pytest.raises(Unavailable, match=address):
            await cluster.start()
    finally:
        await cluster.stop()


def test_a_model_option_is_a_name_a_path_or_a_name_and_a_path() -> None:
    assert ModelToLoad.parse("smollm2") == ModelToLoad(name="smollm2", source="smollm2")
    assert ModelToLoad.parse("mine=runs/a=b") == ModelToLoad(name="mine", source="runs/a=b")
    assert ModelToLoad.parse("runs/tiny/") == ModelToLoad(name="tiny", source="runs/tiny")
    assert ModelToLoad.parse("./runs/a=b") == ModelToLoad(name="a=b", source="runs/a=b")
    for bad in ("", "=path", "name="):
        with pytest.raises(InvalidValue, match="NAME=PATH"):
            ModelToLoad.parse(bad)


def test_home_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_HOME", str(tmp_path))
    assert ClusterSettings().home == tmp_path
    monkeypatch.delenv("ATTN_HOME")
    monkeypatch.setenv("HOME", "/somewhere")
    assert ClusterSettings().home == Path("/somewhere/.local/share/attn")


def test_a_model_option_may_be_a_file_which_is_called_as_it_is_without_its_ending(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "SmolLM2-Q4_K_M.gguf").touch()
    (tmp_path / "runs").mkdir()
    file = str(tmp_path / "SmolLM2-Q4_K_M.gguf")
    for text in ("SmolLM2-Q4_K_M.gguf", "./SmolLM2-Q4_K_M.gguf", file):
        assert at_its_path(ModelToLoad.parse(text)) == ModelToLoad(name="SmolLM2-Q4_K_M", source=file)
    assert at_its_path(ModelToLoad.parse(f"mine={file}")) == ModelToLoad(name="mine", source=file)
    # A folder has to be given as a path: a name is that of a model, whatever lies here.
    assert at_its_path(ModelToLoad.parse("mine=./runs")) == ModelToLoad(name="mine", source=str(tmp_path / "runs"))
    for text in ("runs", "owner/repository", "mine=none.gguf"):
        assert at_its_path(ModelToLoad.parse(text)) == ModelToLoad.parse(text)
