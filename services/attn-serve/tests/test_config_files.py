"""The models of a config file: what is new is loaded, what is gone is unloaded, what cannot be changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from attn_core.errors import Incompatible, InvalidValue, UnknownName
from attn_engine.client import EngineClient
from attn_gateway import ModelToLoad
from attn_gateway.command import models_of
from attn_schema import ClusterConfig, DeploymentConfig, EngineConfig
from attn_serve.fleet import Fleet, WantedModel, rescaled
from attn_serve.in_process import InProcess
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
async def fleet(home: Path) -> Fleet:
    def make(name: str, folder: Path, config: EngineConfig, deployment: DeploymentConfig) -> EngineClient:
        del name, deployment
        return InProcess(folder, config)

    made = Fleet(ModelSources(home), make)
    yield made
    await made.stop(0)


def wanted(source: str, config: EngineConfig = ONE_THREAD, **deployment: int) -> WantedModel:
    return WantedModel(source, config, DeploymentConfig(**deployment))


def names(fleet: Fleet) -> list[str]:
    return [model.name for model in fleet.models()]


async def test_what_is_new_is_loaded_and_what_is_gone_is_unloaded(fleet: Fleet) -> None:
    await fleet.load("by-hand", "tiny", ONE_THREAD)
    await fleet.apply({"tiny": wanted("tiny"), "other": wanted("tiny-linear")}, ())
    assert names(fleet) == ["by-hand", "other", "tiny"]
    kept = fleet.serving("tiny").engine
    await fleet.apply({"tiny": wanted("tiny"), "third": wanted("tiny-linear")}, {"tiny", "other"})
    assert names(fleet) == ["by-hand", "third", "tiny"]
    assert fleet.serving("tiny").engine is kept


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
    fleet: Fleet, bad: dict[str, WantedModel], error: type[Exception]
) -> None:
    await fleet.apply({"tiny": wanted("tiny"), "other": wanted("tiny-linear")}, ())
    kept = fleet.serving("tiny").engine
    with pytest.raises(error):
        await fleet.apply({"third": wanted("tiny")} | bad, {"tiny", "other"})
    assert names(fleet) == ["other", "tiny"]
    assert fleet.serving("tiny").engine is kept


async def test_prefill_replicas_stay_where_a_new_scale_names_none_and_are_not_switched_under_requests(
    fleet: Fleet,
) -> None:
    served, mixed = DeploymentConfig(replicas=2, prefill_replicas=1), DeploymentConfig(replicas=2)
    assert rescaled(served, DeploymentConfig(replicas=3)) == DeploymentConfig(replicas=3, prefill_replicas=1)
    assert rescaled(served, served.replace(prefill_replicas=2)).prefill_replicas == 2
    assert rescaled(DeploymentConfig(), served) == served
    assert rescaled(mixed, DeploymentConfig(replicas=1)) == DeploymentConfig(replicas=1)
    with pytest.raises(InvalidValue, match="prefill_replicas"):
        rescaled(mixed, served)
    for before, after in (
        ({"replicas": 2, "prefill_replicas": 1}, {"replicas": 2}),
        ({"replicas": 2}, {"replicas": 2, "prefill_replicas": 1}),
    ):
        await fleet.apply({"tiny": wanted("tiny", **before)}, ())
        with pytest.raises(InvalidValue, match="prefill_replicas"):
            await fleet.apply({"tiny": wanted("tiny", **after)}, {"tiny"})
        await fleet.unload("tiny", 0)


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
