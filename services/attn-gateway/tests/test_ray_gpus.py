"""An actor sees the GPU that it asked for and no other; what Ray cannot give is refused and not waited for."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attn_core.errors import InvalidValue, OutOfCapacity
from attn_gateway import ray_gpus
from attn_gateway.ray_gpus import VISIBLE, GpuRequest, free_gpus, gpu_request, known_gpus, require_free

SHARE = 0.4


def test_without_gpus_auto_is_what_the_actor_finds_and_cuda_is_refused() -> None:
    for device in ("auto", "cpu", "mps"):
        assert gpu_request(device, SHARE, 0.0) == GpuRequest(device=device, env_vars={VISIBLE: ""})
    for device in ("cuda", "cuda:0"):
        with pytest.raises(InvalidValue, match="Ray finds no GPU") as error:
            gpu_request(device, SHARE, 0.0)
        assert error.value.metadata["field"] == "device"


def test_with_gpus_auto_is_a_gpu_and_the_cpu_takes_none() -> None:
    assert gpu_request("auto", SHARE, 2.0) == gpu_request("cuda", SHARE, 2.0)
    assert gpu_request("cuda", SHARE, 2.0) == GpuRequest(device="cuda", num_gpus=SHARE)
    assert gpu_request("cpu", SHARE, 2.0).num_gpus == 0
    pinned = gpu_request("cuda:1", SHARE, 2.0)
    assert (pinned.device, pinned.num_gpus) == ("cuda:1", SHARE)


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Ray that counts two GPUs; it need not find any to count them."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    folder = tmp_path_factory.mktemp("ray", numbered=True)
    ray.init(
        num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=_short(folder), address="local"
    )
    yield ray
    ray.shutdown()


def _short(folder: Path) -> str:
    """A link to a folder, as the paths of sockets are short."""
    link = Path(f"/tmp/r{os.getpid()}")
    link.unlink(missing_ok=True)
    link.symlink_to(folder)
    return str(link)


def started(ray: Any, device: str, share: float = SHARE) -> Any:
    """An actor as the services start theirs."""

    class Actor:
        def sees(self) -> str | None:
            return os.environ.get("CUDA_VISIBLE_DEVICES")

    asked = gpu_request(device, share, known_gpus())
    options = {"num_cpus": 0, "num_gpus": asked.num_gpus, "runtime_env": {"env_vars": dict(asked.env_vars)}}
    return ray.remote(Actor).options(**options).remote()


def wait_until_free(gpus: float) -> None:
    """On a busy machine Ray tells only later what an actor that runs has taken."""
    while abs(free_gpus() - gpus) > ray_gpus.ROUNDING:
        time.sleep(0.05)


@pytest.mark.ray
@pytest.mark.cluster
@pytest.mark.slow
async def test_actors_see_what_they_asked_for(two_gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = two_gpus
    actors = {device: started(ray, device) for device in ("cpu", "cuda", "cuda:1")}
    seen = {device: ray.get(actor.sees.remote()) for device, actor in actors.items()}
    assert seen["cpu"] == ""
    assert seen["cuda"] in ("0", "1")
    assert seen["cuda:1"] == os.environ.get("CUDA_VISIBLE_DEVICES")
    whole = started(ray, "auto", 1.0)
    assert ray.get(whole.sees.remote()) in ("0", "1")
    require_free(gpu_request("cuda", 0.2, known_gpus()), "")
    await asyncio.to_thread(wait_until_free, 0.2)
    monkeypatch.setattr(ray_gpus, "FREED_SECONDS", 0.5)
    with pytest.raises(OutOfCapacity, match=r"0\.9 of a GPU from Ray; 0\.2 of 2 are free: another option") as error:
        require_free(gpu_request("cuda", 0.9, known_gpus()), "another option")
    assert error.value.metadata["needed_gpus"] == "0.9"
    ray.kill(whole)
    monkeypatch.setattr(ray_gpus, "FREED_SECONDS", 20.0)
    require_free(gpu_request("cuda", 0.9, known_gpus()), "what was just freed is waited for")
