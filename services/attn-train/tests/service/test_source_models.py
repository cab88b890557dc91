"""Jobs of models with a source: admitted, trained, measured, and served from the folder they leave."""

from __future__ import annotations

from itertools import product

import grpc
import numpy as np
import pytest
from attn.v1 import training_pb2 as pb
from attn_client.recipe import read_recipe, recipe_names
from attn_models.loading import load_model
from attn_train.tasks.seq2seq import translate


@pytest.fixture
def recipe():
    spec = read_recipe("rnnsearch")
    spec.model.family_options.update(
        {"hidden_size": 8, "embedding": 8, "maxout": 8, "max_seq_len": 24, "max_encoder_len": 24}
    )
    spec.data.most_pairs = 200
    spec.optimizer.steps, spec.optimizer.warmup_steps, spec.checkpoint.bleu_sentences = 6, 2, 3
    return spec


async def test_a_recipe_becomes_a_model_that_translates(server, recipe, submit, watch):
    async with server() as stub:
        job = await submit(stub, recipe, "search")
        assert job.spec.model.family == "rnnsearch"
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
async def test_every_recipe_is_admitted(server, name, tmp_path):
    spec = read_recipe(name)
    if spec.data.path:
        arrays = {"x": np.zeros((10, 784), np.uint8), "y": np.arange(10)}
        np.savez(tmp_path / "mnist.npz", **arrays)
        (tmp_path / "x-train.conllu").write_text("1\ta\t_\tX\t_\t_\t0\t_\t_\t_\n")
        for part, language in product(("train", "val"), spec.data.languages.split("-")):
            (tmp_path / f"{part}.{language}").write_text("a dog runs\n" * 3)
        spec.data.path = str(tmp_path / spec.data.path if spec.data.path == "mnist.npz" else tmp_path)
    async with server() as stub:
        request = pb.SubmitTrainingJobRequest(spec=spec, validate_only=True)
        admitted = (await stub.SubmitTrainingJob(request)).job.spec.data
    assert (admitted.name, admitted.path) == (spec.data.name, spec.data.path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda spec: setattr(spec.model, "family", "rnnsaerch"), "rnnsearch"),
        (lambda spec: setattr(spec.model, "hidden_size", 8), "hidden_size"),
        (lambda spec: spec.model.family_options.update({"vocab_size": 9}), "the data decide"),
        (lambda spec: spec.model.family_options.update({"mechanism": "mha"}), "is not cross"),
        (lambda spec: spec.model.family_options.update({"wdith": 3}), "hidden_size"),
        (lambda spec: spec.model.family_options.update({"hidden_size": -3}), "hidden_size"),
        (lambda spec: spec.model.family_options.fields.pop("max_seq_len"), "max_seq_len"),
        (lambda spec: setattr(spec.data, "name", "shakespeare"), "unknown set of pairs"),
        (lambda spec: setattr(spec.data, "path", "relative/pairs.tsv"), "absolute"),
        (lambda spec: setattr(spec.data, "tokenizer", "byte_pairs:x"), "byte_pairs:N"),
        (lambda spec: setattr(spec.data, "max_pairs", -1), "max_pairs"),
        (lambda spec: setattr(spec.optimizer, "label_smoothing", 1.0), "label_smoothing"),
        (lambda spec: setattr(spec.checkpoint, "bleu_sentences", -1), "bleu_sentences"),
    ],
)
async def test_what_does_not_fit_is_refused_before_a_job_is_recorded(server, recipe, submit, change, said):
    change(recipe)
    async with server() as stub:
        with pytest.raises(grpc.aio.AioRpcError, match=said):
            await submit(stub, recipe, "bad")
        assert not (await stub.ListTrainingJobs(pb.ListTrainingJobsRequest())).jobs


async def test_a_decoder_takes_nothing_of_a_source(server, wire_spec, submit):
    for change in (
        lambda spec: setattr(spec.optimizer, "label_smoothing", 0.1),
        lambda spec: setattr(spec.checkpoint, "bleu_sentences", 3),
        lambda spec: spec.model.family_options.update({"hidden_size": 8}),
    ):
        spec = pb.TrainingSpec.FromString(wire_spec.SerializeToString())
        change(spec)
        async with server() as stub:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await submit(stub, spec)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
