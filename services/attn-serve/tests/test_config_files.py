"""The models of a config file: what is new is loaded, what is gone is unloaded, what cannot be changes nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from asking_inference import until
from attn_core.errors import Incompatible, InvalidValue, Unavailable, UnknownName
from attn_engine.client import EngineClient, TextTask
from attn_engine.in_process import InProcess
from attn_gateway import ModelToLoad
from attn_gateway.command import models_of
from attn_schema import ClusterConfig, DeploymentConfig, EngineConfig, ModelState, Prompt, SamplingParams
from attn_serve.served_models import ServedModels, WantedModel, rescaled
from attn_serve.sources import ModelSources

ONE_THREAD = EngineConfig(num_threads=1)
FILE = """
server: {port: 0}
engine: {num_threads: 1}
models:
  tiny: {deployment: {replicas: 2}}
  other:
    source: tiny-linear
    engine: {num_threads: 1, max_num_seqs: 4}
"""


@pytest.fixture
async def served(home: Path) -> ServedModels:
    def make(name: str, folder: Path, config: EngineConfig, deployment: DeploymentConfig) -> EngineClient:
        del name, deployment
        return InProcess(folder, config)

    made = ServedModels(ModelSources(home), make)
    yield made
    await made.stop(0)


def wanted(source: str, config: EngineConfig = ONE_THREAD, **deployment: int) -> WantedModel:
    return WantedModel(source, config, DeploymentConfig(**deployment))


def names(served: ServedModels) -> list[str]:
    return [model.name for model in served.models()]


async def test_what_is_new_is_loaded_and_what_is_gone_is_unloaded(served: ServedModels) -> None:
    await served.load("by-hand", "tiny", ONE_THREAD)
    await served.apply({"tiny": wanted("tiny"), "other": wanted("tiny-linear")}, ())
    assert names(served) == ["by-hand", "other", "tiny"]
    kept = served.serving("tiny").engine
    await served.apply({"tiny": wanted("tiny"), "third": wanted("tiny-linear")}, {"tiny", "other"})
    assert names(served) == ["by-hand", "third", "tiny"]
    assert served.serving("tiny").engine is kept


async def test_a_model_that_is_being_unloaded_is_loaded_again_only_afterwards(served: ServedModels) -> None:
    engine = (await served.load("tiny", "tiny", ONE_THREAD)).engine
    params = SamplingParams(max_new_tokens=200, ignore_eos=True)
    stream = engine.generate(TextTask(prompt=Prompt(text="To be"), params=params))
    await anext(stream)
    ending = asyncio.create_task(served.unload("tiny", 60))
    await until(lambda: served.find("tiny").info.state is ModelState.DRAINING)
    with pytest.raises(Unavailable, match="draining"):
        await served.load("tiny", "tiny", ONE_THREAD)
    assert [delta async for delta in stream]
    await ending
    assert (await served.load("tiny", "tiny", ONE_THREAD)).info.state is ModelState.SERVING


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"new": wanted("nowhere")}, UnknownName),
        ({"a b": wanted("tiny")}, InvalidValue),
        ({"tiny@2": wanted("tiny")}, InvalidValue),
        ({"tiny": wanted("tiny-linear")}, InvalidValue),
        ({"tiny": wanted("tiny", EngineConfig(num_threads=1, max_num_seqs=2))}, InvalidValue),
        ({"bert": wanted("tiny-bert", replicas=1, prefill_replicas=1)}, Incompatible),
    ],
)
async def test_one_that_cannot_be_changes_nothing(
    served: ServedModels, bad: dict[str, WantedModel], error: type[Exception]
) -> None:
    await served.apply({"tiny": wanted("tiny"), "other": wanted("tiny-linear")}, ())
    kept = served.serving("tiny").engine
    with pytest.raises(error):
        await served.apply({"third": wanted("tiny")} | bad, {"tiny", "other"})
    assert names(served) == ["other", "tiny"]
    assert served.serving("tiny").engine is kept


async def test_prefill_replicas_stay_where_a_new_scale_names_none_and_are_not_switched_under_requests(
    served: ServedModels,
) -> None:
    split, mixed = DeploymentConfig(replicas=2, prefill_replicas=1), DeploymentConfig(replicas=2)
    assert rescaled(split, DeploymentConfig(replicas=3)) == DeploymentConfig(replicas=3, prefill_replicas=1)
    assert rescaled(split, split.replace(prefill_replicas=2)).prefill_replicas == 2
    assert rescaled(DeploymentConfig(), split) == split
    assert rescaled(mixed, DeploymentConfig(replicas=1)) == DeploymentConfig(replicas=1)
    with pytest.raises(InvalidValue, match="prefill_replicas"):
        rescaled(mixed, split)
    for before, after in (
        ({"replicas": 2, "prefill_replicas": 1}, {"replicas": 2}),
        ({"replicas": 2}, {"replicas": 2, "prefill_replicas": 1}),
    ):
        await served.apply({"tiny": wanted("tiny", **before)}, ())
        with pytest.raises(InvalidValue, match="prefill_replicas"):
            await served.apply({"tiny": wanted("tiny", **after)}, {"tiny"})
        await served.unload("tiny", 0)


def test_a_file_says_models_with_engines_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE)
    tiny, other = models_of(path)
    assert tiny == ModelToLoad(name="tiny", source="tiny", deployment=DeploymentConfig(replicas=2))
    assert (other.source, other.deployment) == ("tiny-linear", None)
    assert other.engine == EngineConfig(num_threads=1, max_num_seqs=4)
    assert models_of(None) == ()
    assert ModelToLoad.of(ClusterConfig()) == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("modells: {}", "modells"),
        ("models: {tiny: {replicas: 2}}", "replicas"),
        ("models: {tiny: {deployment: {replica: 2}}}", "did you mean"),
        ("models: {tiny: {deployment: {replicas: 0}}}", "replicas"),
        ("models: {tiny: {deployment: {prefill_replicas: 1}}}", "prefill_replicas"),
        ("models: {tiny: {traffic: 0.1}}", "traffic"),
        ("models: [tiny]", "a mapping"),
        ("engine: {kv_cash: int8}", "kv_cache"),
        ("models: {tiny: {engine: {max_num_seqs: x}}}", "max_num_seqs"),
    ],
)
def test_keys_that_are_not_known_are_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises((InvalidValue, UnknownName), match=said):
        models_of(path)
