"""Jobs of models with a source: admitted, trained, measured, and served from the folder they leave."""

from __future__ import annotations

from itertools import product

import grpc
import numpy as np
import pytest
from attn.v1 import training_pb2 as pb
from attn_cli.recipe import read_recipe, recipe_names
from attn_models.loading import load_model
from attn_schema.codec import to_message
from attn_train.tasks.seq2seq import translate


def set_fields(model: pb.ModelConfig, values: dict) -> None:
    """Set fields of a family's config."""
    for name, value in values.items():
        if name == "options":
            model.options.update(value)
        elif name in model.DESCRIPTOR.fields_by_name:
            setattr(model, name, value)
        else:
            model.model_options.update({name: value})


@pytest.fixture
def recipe():
    config = to_message(read_recipe("rnnsearch"))
    set_fields(config.model, {"hidden_size": 8, "embedding": 8, "maxout": 8, "max_seq_len": 24, "max_encoder_len": 24})
    config.data.max_pairs = 200
    config.optimizer.steps, config.optimizer.warmup_steps, config.evaluation.bleu_sentences = 6, 2, 3
    return config


async def test_a_recipe_becomes_a_model_that_translates(server, recipe, submit, watch):
    async with server() as stub:
        job = await submit(stub, recipe, "search")
        assert job.config.model.family == "rnnsearch"
        assert (await submit(stub, recipe, "search")).id == "search"
        await watch(stub, "search")
        done = (await stub.GetTrainingJob(pb.GetTrainingJobRequest(id="search"))).job
    assert done.state == pb.JOB_STATE_SUCCEEDED, done.error
    assert {"bleu", "validation_loss", "tokens_per_second"} <= set(done.last_metrics)
    loaded = load_model(done.model_path)
    assert (loaded.family, loaded.mechanisms) == ("rnnsearch", ("alignment",))
    first, again = (translate(loaded.model, loaded.tokenizer, ["s1 s2", "s3"]) for _ in range(2))
    assert first == again


@pytest.mark.parametrize("name", recipe_names())
async def test_every_recipe_is_admitted(server, home, name):
    folder = home / "data"
    config = to_message(read_recipe(name))
    if "/" in config.data.dataset:
        arrays = {"x": np.zeros((10, 784), np.uint8), "y": np.arange(10)}
        np.savez(folder / "mnist.npz", **arrays)
        (folder / "x-train.conllu").write_text("1\ta\t_\tX\t_\t_\t0\t_\t_\t_\n")
        for part, language in product(("train", "val"), config.data.languages.split("-")):
            (folder / f"{part}.{language}").write_text("a dog runs\n" * 3)
        config.data.dataset = str(folder / "mnist.npz" if config.data.dataset.endswith(".npz") else folder)
    async with server() as stub:
        request = pb.SubmitTrainingJobRequest(config=config, validate_only=True)
        admitted = (await stub.SubmitTrainingJob(request)).job.config.data
    assert admitted.dataset == config.data.dataset


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda config: setattr(config.model, "family", "rnnsaerch"), "rnnsearch"),
        (lambda config: set_fields(config.model, {"vocab_size": 9}), "vocab_size"),
        (lambda config: set_fields(config.model, {"mechanism": "gla"}), "cross"),
        (lambda config: set_fields(config.model, {"hiden_size": 3}), "hidden_size"),
        (lambda config: set_fields(config.model, {"hidden_size": -3}), "hidden_size"),
        (lambda config: config.model.ClearField("max_seq_len"), "max_seq_len"),
        (lambda config: setattr(config.data, "dataset", "shakespeare"), "unknown set of pairs"),
        (lambda config: setattr(config.data, "dataset", "relative/pairs.tsv"), "absolute"),
        (lambda config: setattr(config.data, "tokenizer", "byte_pairs:x"), "byte_pairs:N"),
        (lambda config: setattr(config.data, "max_pairs", -1), "max_pairs"),
        (lambda config: setattr(config.optimizer, "label_smoothing", 1.0), "label_smoothing"),
        (lambda config: setattr(config.evaluation, "bleu_sentences", -1), "bleu_sentences"),
    ],
)
async def test_what_does_not_fit_is_refused_before_a_job_is_recorded(server, recipe, submit, change, said):
    change(recipe)
    async with server() as stub:
        with pytest.raises(grpc.aio.AioRpcError, match=said):
            await submit(stub, recipe, "bad")
        assert not (await stub.ListTrainingJobs(pb.ListTrainingJobsRequest())).jobs


async def test_a_decoder_takes_nothing_of_a_source(server, wire_config, submit):
    for change in (
        lambda config: setattr(config.evaluation, "bleu_sentences", 3),
        lambda config: config.model.model_options.update({"hidden_size": 8}),
    ):
        config = pb.TrainingConfig.FromString(wire_config.SerializeToString())
        change(config)
        async with server() as stub:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await submit(stub, config)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
