"""Jobs of recurrent language models: admitted, trained on text, and served from the folder they leave."""

from __future__ import annotations

import grpc
import pytest
from attn.v1 import training_pb2 as pb
from attn_client.recipe import read_recipe
from attn_engine import Request, SamplingParams, build_engine
from attn_models.loading import load_model

SMALL = {
    "key-value": {"hidden_size": 16, "embedding": 8, "max_seq_len": 8},
    "lstmn": {"hidden_size": 16, "max_seq_len": 8},
    "gpt3": {"hidden_size": 16, "num_layers": 2, "max_seq_len": 8},
    "sparse-transformer": {"hidden_size": 16, "num_layers": 2, "max_seq_len": 8},
    "retnet": {"hidden_size": 16, "num_layers": 2, "max_seq_len": 8},
}


def small(recipe, home):
    spec = read_recipe(recipe)
    spec.model.family_options.update(SMALL[recipe])
    spec.data.path = str(home / "data" / "words.txt")
    spec.optimizer.steps, spec.optimizer.warmup_steps, spec.optimizer.batch_size = 12, 2, 8
    spec.checkpoint.evaluation_interval_steps, spec.checkpoint.evaluation_batches = 6, 2
    return spec


@pytest.mark.parametrize("recipe", SMALL)
async def test_a_recipe_becomes_a_model_that_goes_on_with_a_text(server, recipe, home, submit, watch):
    async with server() as stub:
        job = await submit(stub, small(recipe, home), "lm")
        assert job.spec.model.family == small(recipe, home).model.family
        assert (await submit(stub, small(recipe, home), "lm")).id == "lm"
        await watch(stub, "lm")
        done = (await stub.GetTrainingJob(pb.GetTrainingJobRequest(id="lm"))).job
    assert done.state == pb.JOB_STATE_SUCCEEDED, done.error
    assert {"validation_loss", "tokens_per_second"} <= set(done.last_metrics)
    loaded = load_model(done.model_path)
    assert loaded.family in (job.spec.model.family, "decoder")  # as which decoders of papers are kept
    engine = build_engine(loaded.model, loaded.tokenizer)
    prompt = tuple(loaded.tokenizer.encode("key "))
    engine.submit(Request(id="r", token_ids=prompt, params=SamplingParams(temperature=0.0, max_new_tokens=4)))
    events = []
    while not engine.idle:
        events += engine.step()
    assert len("".join(event.delta.text for event in events)) == 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda spec: setattr(spec.model, "family", "lstnm_lm"), "lstmn_lm"),
        (lambda spec: spec.model.family_options.update({"mechanism": "alignment"}), "is not causal"),
        (lambda spec: spec.model.family_options.update({"max_encoder_len": 9}), "set of pairs"),
        (lambda spec: spec.model.family_options.fields.pop("max_seq_len"), "max_seq_len"),
        (lambda spec: setattr(spec.checkpoint, "bleu_sentences", 3), "no source"),
        (lambda spec: setattr(spec.optimizer, "label_smoothing", 0.1), "no source"),
        (lambda spec: setattr(spec.model, "family", "rnnsearch"), "max_encoder_len"),
        (lambda spec: setattr(spec.data, "name", "copyy"), "copy"),
        (lambda spec: setattr(spec.data, "max_pairs", 3), "max_pairs"),
    ],
)
async def test_what_does_not_fit_is_refused_before_a_job_is_recorded(server, submit, change, said):
    spec = read_recipe("lstmn")
    change(spec)
    async with server() as stub:
        with pytest.raises(grpc.aio.AioRpcError, match=said):
            await submit(stub, spec, "bad")
        assert not (await stub.ListTrainingJobs(pb.ListTrainingJobsRequest())).jobs


async def test_a_machine_learns_from_a_task_and_answers_in_words(server, home, submit, watch):
    spec = read_recipe("turing-machine")
    spec.model.family_options.update({"hidden_size": 16, "head_dim": 6, "options": {"slots": 6}})
    spec.data.most_pairs, spec.optimizer.steps, spec.optimizer.warmup_steps = 40, 3, 1
    async with server() as stub:
        await submit(stub, spec, "machine")
        await watch(stub, "machine")
        done = (await stub.GetTrainingJob(pb.GetTrainingJobRequest(id="machine"))).job
    assert done.state == pb.JOB_STATE_SUCCEEDED, done.error
    assert 0 <= done.last_metrics["answer_accuracy"] <= 1
    assert done.last_metrics["validation_loss"] > 0
    loaded = load_model(done.model_path)
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("s1 s2 =")).split() == ["s1", "s2", "="]


async def test_a_rule_takes_no_other_tokens_than_its_words(server, submit):
    spec = read_recipe("turing-machine")
    spec.data.tokenizer = "byte_pairs"
    async with server() as stub:
        with pytest.raises(grpc.aio.AioRpcError, match="a rule makes words"):
            await submit(stub, spec, "bad")


async def test_a_decoder_learns_from_a_task_too(server, wire_spec, submit, watch):
    wire_spec.data.name, wire_spec.data.max_pairs, wire_spec.model.context_length = "reverse", 60, 24
    wire_spec.optimizer.steps = 4
    async with server() as stub:
        await submit(stub, wire_spec, "decoder")
        await watch(stub, "decoder")
        done = (await stub.GetTrainingJob(pb.GetTrainingJobRequest(id="decoder"))).job
    assert done.state == pb.JOB_STATE_SUCCEEDED, done.error
    assert 0 <= done.last_metrics["answer_accuracy"] <= 1
    assert load_model(done.model_path).family == "decoder"
