"""Jobs that go on from a model: all its weights or an adapter, what they save, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import grpc.aio
import pytest
import torch
from attn.v1 import training_pb2 as pb
from attn_models.commands import app
from attn_models.decoder.decoder import Decoder
from attn_models.loading import load_model, save_model
from attn_models.lora import AdaptedModel, read_adapter
from attn_models.lora.adapter import require_fits
from attn_models.tokenizers import character_tokenizer
from attn_models.weights import read_manifest
from attn_schema.decoder import DecoderConfig
from attn_train.checkpoint import read_checkpoint
from safetensors.torch import load_file
from typer.testing import CliRunner

FIELDS = {
    "max_seq_len": 32,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "mechanism": "gqa",
    "norm": "rms",
    "feed_forward": "swiglu",
    "intermediate_size": 64,
    "positions": "rotary",
    "bias": False,
}


@pytest.fixture
def base(home: Path, words: str) -> Path:
    """A small model in llama's layout, in the home of the server."""
    torch.manual_seed(0)
    tokenizer = character_tokenizer(words)
    model = Decoder(DecoderConfig.from_plain(FIELDS | {"vocab_size": tokenizer.vocab_size}))
    return save_model(home / "models" / "small", model, tokenizer, layout="llama")


@pytest.fixture
def config(home: Path, base: Path) -> pb.TrainingConfig:
    return pb.TrainingConfig(
        model=pb.ModelConfig(base_model=base.name, max_seq_len=16),
        data=pb.DataConfig(dataset=str(home / "data" / "words.txt")),
        optimizer=pb.OptimizerConfig(steps=30, batch_size=4, learning_rate=5e-3),
        checkpoint=pb.CheckpointConfig(save_steps=10),
        evaluation=pb.EvaluationConfig(eval_steps=10, eval_batches=2, logging_steps=1),
        seed=5,
    )


async def finished(stub, config, submit, watch, name: str = "tuned") -> pb.TrainingJob:
    await submit(stub, config, name)
    await watch(stub, name)
    job = (await stub.GetTrainingJob(pb.GetTrainingJobRequest(id=name))).job
    assert job.state == pb.JOB_STATE_SUCCEEDED, job.error
    return job


async def losses(stub, watch, name: str) -> list[float]:
    events = [response.event for response in await watch(stub, name)]
    return [event.metrics.values["loss"] for event in events if "loss" in event.metrics.values]


async def test_all_weights_go_on_from_the_base_and_are_saved_in_its_layout(server, config, base, submit, watch):
    untouched = (base / "model.safetensors").read_bytes()
    async with server() as stub:
        job = await finished(stub, config, submit, watch)
        found = await losses(stub, watch, "tuned")
    assert (job.config.model.max_seq_len, job.config.data.tokenizer) == (16, "small")
    before, after = load_model(base), load_model(job.model_path)
    assert after.config == before.config
    assert after.tokenizer.files() == before.tokenizer.files()
    assert "llama" in (Path(job.model_path) / "config.json").read_text()
    changed = [not torch.equal(a, b) for a, b in zip(before.model.parameters(), after.model.parameters(), strict=True)]
    assert all(changed)
    assert found[-1] < found[0] - 0.3
    assert (base / "model.safetensors").read_bytes() == untouched


@pytest.mark.parametrize("stored", ["none", "int8", "int4"])
async def test_an_adapter_learns_on_a_frozen_base_and_is_saved_as_peft_has_it(
    server, config, base, submit, watch, stored
):
    config.lora.lora_rank, config.optimizer.learning_rate = 4, 2e-2
    config.lora.base_quantization = stored
    async with server() as stub:
        job = await finished(stub, config, submit, watch)
        found = await losses(stub, watch, "tuned")
    assert found[-1] < found[0] - 0.2
    folder = Path(job.model_path)
    assert set(read_manifest(folder)) == {"adapter_config.json", "adapter_model.safetensors"}
    model = load_model(base).model
    adapter = read_adapter(folder, model, base)
    require_fits(adapter, model)
    assert adapter.config.base_model == "small"
    weights = read_checkpoint(Path(job.latest_checkpoint.path))[1]["weights"]
    assert all(name.startswith("lora.") for name in weights), "checkpoints hold the adapter alone"


async def test_tables_and_ranks_of_single_layers_are_trained_and_merged(server, config, base, submit, watch, tmp_path):
    config.lora.lora_rank, config.optimizer.learning_rate = 2, 2e-2
    config.lora.rank_pattern.append("q_proj=3")
    config.lora.trainable_token_indices.extend([1, 2, 3])
    async with server() as stub:
        job = await finished(stub, config, submit, watch)
        found = await losses(stub, watch, "tuned")
    assert found[-1] < found[0] - 0.2
    loaded = load_model(base)
    adapter = read_adapter(Path(job.model_path), loaded.model, base)
    ranks = {name.rpartition(".")[2]: len(adapter.of(name).a) for name in adapter}
    assert (ranks.pop("query"), set(ranks.values())) == (3, {2})
    rows = adapter.table("embedding")
    assert rows.ids.tolist() == [1, 2, 3]
    assert not torch.isclose(rows.rows, loaded.model.embedding.weight[1:4]).all()
    done = CliRunner().invoke(app, ["merge", job.model_path, str(tmp_path / "whole"), "--base", str(base), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["path"] == str(tmp_path / "whole")
    tokens, adapted = torch.arange(12)[None], AdaptedModel(loaded.model)
    adapted.always(adapter)
    torch.testing.assert_close(load_model(tmp_path / "whole").model(tokens), loaded.model(tokens), rtol=1e-4, atol=1e-4)


async def test_an_adapter_that_is_interrupted_goes_on_with_the_same_numbers(server, config, submit, watch):
    config.lora.lora_rank, config.lora.lora_dropout = 2, 0.1
    async with server() as stub:
        first = await finished(stub, config, submit, watch, "whole")
        whole = load_file(Path(first.model_path) / "adapter_model.safetensors")
        await submit(stub, config, "cut")
        while (await stub.GetTrainingJob(pb.GetTrainingJobRequest(id="cut"))).job.step < 3:
            pass
        await stub.CancelTrainingJob(pb.CancelTrainingJobRequest(id="cut"))
        await watch(stub, "cut")
        await stub.ResumeTrainingJob(pb.ResumeTrainingJobRequest(id="cut"))
        await watch(stub, "cut")
        job = (await stub.GetTrainingJob(pb.GetTrainingJobRequest(id="cut"))).job
    resumed = load_file(Path(job.model_path) / "adapter_model.safetensors")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def set_fields(message, fields) -> None:
    for name, value in fields.items():
        if isinstance(value, tuple):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)


@pytest.mark.parametrize(
    ("part", "fields", "said"),
    [
        ("model", {"base_model": "smal"}, "unknown model 'smal'.*small"),
        ("model", {"base_model": "/nowhere/at/all"}, "/nowhere/at/all.*config.json"),
        ("model", {"mechanism": "mha"}, "mechanism.*gqa, the value of the base model small"),
        ("model", {"hidden_size": 64}, "hidden_size.*32, the value of the base model small"),
        ("model", {"family": "lstm"}, "family"),
        ("model", {"max_seq_len": 64}, "max_seq_len.*1 to 32, the context length of the base model"),
        ("data", {"dataset": "reverse"}, "the base model has a fixed one"),
        ("data", {"tokenizer": "other"}, "vocabulary of tokenizer other differs from that of the base model: token"),
        (
            "data",
            {"tokenizer": "fewer"},
            "vocabulary of tokenizer fewer differs from that of the base model: [0-9]+ tokens",
        ),
        ("lora", {"lora_alpha": 3.0}, "without lora_rank"),
        ("lora", {"base_quantization": "int8"}, "without lora_rank"),
        ("lora", {"lora_rank": 2, "lora_target_modules": ("c_attn",)}, "lora_target_modules.*c_attn.*q_proj"),
        ("lora", {"lora_rank": 0}, "lora_rank"),
    ],
)
async def test_what_is_not_of_the_base_is_refused_before_a_job_is_recorded(
    server, home, config, submit, words, part, fields, said
):
    vocabulary = sorted(set(words))
    for name, text in (("other", "".join(vocabulary[:-1]) + "Z"), ("fewer", "".join(vocabulary[:-1]))):
        tokenizer = character_tokenizer(text)
        plain = DecoderConfig.from_plain(FIELDS | {"vocab_size": tokenizer.vocab_size})
        save_model(home / "models" / name, Decoder(plain), tokenizer)
    set_fields(getattr(config, part), fields)
    async with server() as stub:
        with pytest.raises(grpc.aio.AioRpcError, match=said) as refused:
            await submit(stub, config, "bad")
        assert refused.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND,
                                        grpc.StatusCode.FAILED_PRECONDITION)  # fmt: skip
        assert "\n" not in refused.value.details()
        assert not (await stub.ListTrainingJobs(pb.ListTrainingJobsRequest())).jobs


async def test_a_rank_without_a_base_is_refused(server, wire_config, submit):
    wire_config.lora.lora_rank = 4
    async with server() as stub:
        with pytest.raises(grpc.aio.AioRpcError, match="none without a base model"):
            await submit(stub, wire_config, "bad")
