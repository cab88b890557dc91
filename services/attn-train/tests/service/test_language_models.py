"""Jobs of recurrent language models: admitted, trained on text, and served from the folder they leave."""

from __future__ import annotations

import grpc
import pytest
from attn.v1 import training_pb2 as pb
from attn_cli.recipe import read_recipe
from attn_engine import Request, SamplingParams, build_engine
from attn_models.loading import load_model
from attn_schema.codec import to_message

SMALL = {
    "key-value": {"hidden_size": 16, "embedding": 8, "max_seq_len": 8},
    "lstmn": {"hidden_size": 16, "max_seq_len": 8},
    "gpt3": {"hidden_size": 16, "num_layers": 2, "max_seq_len": 8},
    "sparse-transformer": {"hidden_size": 16, "num_layers": 2, "max_seq_len": 8},
    "retnet": {"hidden_size": 16, "num_layers": 2, "max_seq_len": 8},
}


def set_fields(model: pb.ModelConfig, values: dict) -> None:
    """Set fields of a family's config."""
    for name, value in values.items():
        if name == "options":
            model.options.update(value)
        elif name in model.DESCRIPTOR.fields_by_name:
            setattr(model, name, value)
        else:
            model.model_options.update({name: value})


def small(recipe, home):
    config = to_message(read_recipe(recipe))
    set_fields(config.model, SMALL[recipe])
    config.data.dataset = str(home / "data" / "words.txt")
    config.optimizer.steps, config.optimizer.warmup_steps, config.optimizer.batch_size = 12, 2, 8
    config.evaluation.eval_steps, config.evaluation.eval_batches = 6, 2
    return config


@pytest.mark.parametrize("recipe", SMALL)
async def test_a_recipe_becomes_a_model_that_goes_on_with_a_text(server, recipe, home, submit, watch):
    async with server() as stub:
        job = await submit(stub, small(recipe, home), "lm")
        assert job.config.model.family == small(recipe, home).model.family
        assert (await submit(stub, small(recipe, home), "lm")).id == "lm"
        await watch(stub, "lm")
        done = (await stub.GetTrainingJob(pb.GetTrainingJobRequest(id="lm"))).job
    assert done.state == pb.JOB_STATE_SUCCEEDED, done.error
    assert {"validation_loss", "tokens_per_second"} <= set(done.last_metrics)
    loaded = load_model(done.model_path)
    assert loaded.family in (job.config.model.family, "decoder")  # as which decoders of papers are kept
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
        (lambda config: setattr(config.model, "family", "lstnm_lm"), "lstmn_lm"),
        (lambda config: set_fields(config.model, {"mechanism": "alignment"}), "is not causal"),
        (lambda config: set_fields(config.model, {"max_encoder_len": 9}), "set of pairs"),
        (lambda config: config.model.ClearField("max_seq_len"), "max_seq_len"),
        (lambda config: setattr(config.evaluation, "bleu_sentences", 3), "0 unless the model is an encoder-decoder"),
        (lambda config: setattr(config.optimizer, "rho", 0.5), "adadelta"),
        (lambda config: setattr(config.model, "family", "rnnsearch"), "num_layers"),
        (lambda config: setattr(config.data, "dataset", "copyy"), "copy"),
        (lambda config: setattr(config.data, "max_pairs", 3), "max_pairs"),
    ],
)
async def test_what_does_not_fit_is_refused_before_a_job_is_recorded(server, submit, change, said):
    config = to_message(read_recipe("lstmn"))
    change(config)
    async with server() as stub:
        with pytest.raises(grpc.aio.AioRpcError, match=said):
            await submit(stub, config, "bad")
        assert not (await stub.ListTrainingJobs(pb.ListTrainingJobsRequest())).jobs


async def test_a_machine_learns_from_a_task_and_answers_in_words(server, home, submit, watch):
    config = to_message(read_recipe("turing-machine"))
    set_fields(config.model, {"hidden_size": 16, "head_dim": 6, "options": {"slots": 6}})
    config.data.max_pairs, config.optimizer.steps, config.optimizer.warmup_steps = 40, 3, 1
    async with server() as stub:
        await submit(stub, config, "machine")
        await watch(stub, "machine")
        done = (await stub.GetTrainingJob(pb.GetTrainingJobRequest(id="machine"))).job
    assert done.state == pb.JOB_STATE_SUCCEEDED, done.error
    assert 0 <= done.last_metrics["answer_accuracy"] <= 1
    assert done.last_metrics["validation_loss"] > 0
    loaded = load_model(done.model_path)
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("s1 s2 =")).split() == ["s1", "s2", "="]


async def test_a_rule_takes_no_other_tokens_than_its_words(server, submit):
    config = to_message(read_recipe("turing-machine"))
    config.data.tokenizer = "byte_pairs"
    async with server() as stub:
        with pytest.raises(grpc.aio.AioRpcError, match="synthetic tasks consist of words"):
            await submit(stub, config, "bad")


async def test_a_decoder_learns_from_a_task_too(server, wire_config, submit, watch):
    wire_config.data.dataset, wire_config.data.max_pairs, wire_config.model.max_seq_len = "reverse", 60, 24
    wire_config.optimizer.steps = 4
    async with server() as stub:
        await submit(stub, wire_config, "decoder")
        await watch(stub, "decoder")
        done = (await stub.GetTrainingJob(pb.GetTrainingJobRequest(id="decoder"))).job
    assert done.state == pb.JOB_STATE_SUCCEEDED, done.error
    assert 0 <= done.last_metrics["answer_accuracy"] <= 1
    assert load_model(done.model_path).family == "decoder"
