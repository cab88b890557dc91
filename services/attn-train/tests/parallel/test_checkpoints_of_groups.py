"""A checkpoint is read by any number of workers in any layout: the run goes on as if nothing had happened."""

import pytest
from groups import LOSSES, job, run_group, write_data

MODEL = {
    "mechanism": "gqa",
    "num_kv_heads": 2,
    "norm": "rms",
    "feed_forward": "swiglu",
    "model_options": {"bias": True},
}
STEPS = 8
BOUND = LOSSES["float64"]
LAYOUTS = {"copies": {}, "shards": {"dp_shard": 2}, "heads": {"tp": 2}, "tokens": {"cp": 2}}


def run_of(folder, name, checkpoints, *, steps, **layout):
    """A run of so many steps of eight, which writes a checkpoint at its last."""
    config = job(folder, MODEL, optimizer={"lr_scheduler_type": "constant"}, steps=steps, **layout)
    config["optimizer"]["steps"] = steps
    return {"name": name, "config": config, "dtype": "float64", "checkpoints": str(folder / checkpoints)}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    write_data(folder)
    two = {"workers": 2}
    runs = [run_of(folder, "whole", "whole", steps=STEPS)]
    for name, layout in LAYOUTS.items():
        runs.append(run_of(folder, f"{name}-first", name, steps=4, **two, **layout))
    runs.append(run_of(folder, "copies-then-one", "copies", steps=STEPS))
    runs.append(run_of(folder, "shards-then-heads", "shards", steps=STEPS, **two, tp=2))
    runs.append(run_of(folder, "heads-then-shards", "heads", steps=STEPS, **two, dp_shard=2))
    runs.append(run_of(folder, "tokens-then-tokens", "tokens", steps=STEPS, **two, cp=2))
    return run_group(folder, 2, runs)


@pytest.mark.parametrize("name", ["copies-then-one", "shards-then-heads", "heads-then-shards", "tokens-then-tokens"])
def test_a_run_goes_on_with_another_layout(found, name):
    assert set(found[name]["metrics"]) == {"5", "6", "7", "8"}
    for step, metrics in found[name]["metrics"].items():
        assert metrics["loss"] == pytest.approx(found["whole"]["metrics"][step]["loss"], abs=BOUND), step
    assert found[name]["weights"] == pytest.approx(found["whole"]["weights"], rel=BOUND)
