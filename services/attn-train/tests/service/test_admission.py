"""What cannot work is refused before it is recorded, with the field and what is allowed."""

from __future__ import annotations

import subprocess
import sys

import grpc
import pytest
import torch
from attn.v1 import training_pb2 as pb
from attn_core.errors import InvalidValue
from attn_schema.training import DataConfig, ModelConfig
from attn_train.data_checks import check_labels, check_pairs, check_tags, check_text
from attn_train.model import count_parameters
from google.rpc import error_details_pb2
from grpc_status import rpc_status

NOT_FOUND = grpc.StatusCode.NOT_FOUND
INVALID = grpc.StatusCode.INVALID_ARGUMENT
NAN = float("nan")


def violated(error: grpc.aio.AioRpcError) -> str:
    """The field that the error's details name."""
    for detail in rpc_status.from_call(error).details:
        request = error_details_pb2.BadRequest()
        if detail.Unpack(request):
            return request.field_violations[0].field
    return ""


def set_field(config: pb.TrainingConfig, path: str, value: object) -> None:
    *parents, leaf = path.split(".")
    for parent in parents:
        config = getattr(config, parent)
    setattr(config, leaf, value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.hidden_size", 0),
        ("model.hidden_size", -8),
        ("model.num_layers", 0),
        ("model.num_heads", 3),
        ("model.num_kv_heads", -1),
        ("model.max_seq_len", 0),
        ("model.norm", "batchnorm"),
        ("model.norm_place", "middle"),
        ("model.feed_forward", "tanh"),
        ("model.positions", "absolute"),
        ("model.dropout", 1.0),
        ("model.dropout", NAN),
        ("model.intermediate_size", -1),
        ("model.num_experts", -1),
        ("model.num_experts_per_tok", -1),
        ("model.routing", "hash"),
        ("model.router_aux_loss_coef", -0.1),
        ("model.router_aux_loss_coef", NAN),
        ("data.dataset", "./relative.txt"),
        ("data.dataset", "/no/such/file.txt"),
        ("data.tokenizer", "nobody/has-this"),
        ("data.validation_fraction", 1.0),
        ("optimizer.steps", 0),
        ("optimizer.batch_size", -1),
        ("optimizer.learning_rate", 0.0),
        ("optimizer.learning_rate", NAN),
        ("optimizer.learning_rate", float("inf")),
        ("optimizer.min_learning_rate", 1.0),
        ("optimizer.warmup_steps", 21),
        ("optimizer.weight_decay", -0.1),
        ("optimizer.beta1", 1.0),
        ("optimizer.beta2", -0.1),
        ("optimizer.max_grad_norm", NAN),
        ("optimizer.max_grad_norm_ratio", 0.5),
        ("optimizer.ema_decay", 0.0),
        ("device", "gpu"),
        ("device", "cuda:99"),
        ("checkpoint.save_steps", -1),
        ("checkpoint.save_total_limit", -1),
        ("evaluation.eval_batches", -1),
        ("max_failures", -1),
        ("workers", 5000),
        ("precision", "float16"),
        ("precision", "BFLOAT16"),
    ],
)
async def test_a_bad_value_is_refused_with_its_field_and_nothing_is_recorded(server, wire_config, submit, path, value):
    set_field(wire_config, path, value)
    async with server() as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await submit(stub, wire_config, "bad")
        assert caught.value.code() is INVALID
        assert violated(caught.value) == f"config.{path}"
        assert "allowed" in caught.value.details()
        assert not (await stub.ListTrainingJobs(pb.ListTrainingJobsRequest())).jobs


async def test_an_unknown_mechanism_is_not_found_with_near_names(server, wire_config, submit):
    wire_config.model.mechanism = "gpa"
    async with server() as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await submit(stub, wire_config)
    assert caught.value.code() is NOT_FOUND
    assert "'gqa'" in caught.value.details()


async def test_an_unknown_option_of_a_mechanism_is_not_found(server, wire_config, submit):
    wire_config.model.options["no_such_option"] = 3
    async with server() as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await submit(stub, wire_config)
    assert caught.value.code() is NOT_FOUND
    assert "no_such_option" in caught.value.details()


async def test_a_mechanism_that_cannot_be_causal_is_refused_with_those_that_can(server, wire_config, submit):
    from attn_core import Capability, installed

    blind = [m.name for m in installed().mechanisms if not m.can(Capability.CAUSAL)]
    if not blind:
        pytest.skip("every installed mechanism can be causal")
    wire_config.model.mechanism = blind[0]
    async with server() as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await submit(stub, wire_config)
    assert caught.value.code() is INVALID
    assert violated(caught.value) == "config.model.mechanism"
    assert "causal" in caught.value.details()
    assert "mha" in caught.value.details()


async def test_an_unknown_data_set_is_not_found_with_near_names(server, wire_config, submit):
    wire_config.data.dataset = "shakespear"
    async with server() as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await submit(stub, wire_config)
    assert caught.value.code() is NOT_FOUND
    assert "'shakespeare'" in caught.value.details()


async def test_a_configuration_without_data_is_refused(server, wire_config, submit):
    wire_config.ClearField("data")
    async with server() as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await submit(stub, wire_config)
    assert violated(caught.value) == "config.data.dataset"


@pytest.mark.parametrize(
    ("check", "name", "lines", "given"),
    [
        (check_text, "a.txt", "one\ntwo\ncafé\n", {}),
        (check_text, "a.csv", "text\none\ncafé\n", {}),
        (check_pairs, "a.tsv", "a\tb\nc\td\ncafé\te\n", {"tokenizer": "word"}),
        (check_pairs, "a.jsonl", '{"source": 1}\n\n{"target": "café"}\n', {"tokenizer": "word"}),
        (check_labels, "a.tsv", "a\tb\nc\td\nx\tcafé\n", {"tokenizer": "word"}),
        (check_tags, "a.conllu", "# one\n# two\n# café\n", {"tokenizer": "word"}),
    ],
)
def test_text_in_another_encoding_is_refused_at_submission_with_its_line(tmp_path, check, name, lines, given):
    path = tmp_path / name
    data = DataConfig(dataset=str(path), **given)
    path.write_text(lines, "utf-8")
    check(data, home=tmp_path)
    path.write_text(lines, "latin-1")
    with pytest.raises(InvalidValue, match=rf"{name}, line 3, byte {lines.index('é')}.*UTF-8"):
        check(data, home=tmp_path)


async def test_numbers_of_options_are_finite(server, wire_config, submit):
    wire_config.model.options["window"] = NAN
    async with server() as stub:
        with pytest.raises(grpc.aio.AioRpcError, match="finite"):
            await submit(stub, wire_config)


async def test_a_model_larger_than_the_memory_is_refused_at_once(server, wire_config, submit):
    wire_config.model.hidden_size = 1 << 20
    wire_config.model.num_layers = 8
    async with server() as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await submit(stub, wire_config)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_files_outside_the_allowed_folders_are_refused_whether_they_exist_or_not(
    shared, by, wire_config, tmp_path, home
):
    (tmp_path / "secret.txt").write_text("secret " * 100)
    (home / "data" / "link.txt").symlink_to(tmp_path / "secret.txt")
    messages = set()
    async with shared() as stub:

        def submit(token):
            return stub.SubmitTrainingJob(pb.SubmitTrainingJobRequest(config=wire_config), **by(token))

        for path in (
            "/etc/passwd",
            "/no/such/file",
            tmp_path / "secret.txt",
            home / "data" / ".." / ".." / "secret.txt",
        ):
            wire_config.data.dataset = str(path)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await submit("one")
            assert violated(caught.value) == "config.data.dataset"
            messages.add(caught.value.details().replace(str(path), "PATH"))
        wire_config.data.dataset = str(home / "data" / "link.txt")
        with pytest.raises(grpc.aio.AioRpcError):
            await submit("one")
        assert len(messages) == 1
        wire_config.data.dataset = str(home / "data" / "words.txt")
        assert (await submit("one")).job.id
        wire_config.data.dataset = str(tmp_path / "secret.txt")
        assert (await submit("op")).job.id


async def test_on_a_server_for_this_machine_alone_any_readable_file_is_right_unless_folders_are_set(
    server, insecure, wire_config, submit, tmp_path, words
):
    (tmp_path / "mine.txt").write_text(words)
    wire_config.data.dataset = str(tmp_path / "mine.txt")
    async with server() as stub:
        assert (await submit(stub, wire_config)).id
    for limited in (server(data_roots=(tmp_path / "home",)), insecure()):
        async with limited as stub:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await submit(stub, wire_config)
        assert violated(caught.value) == "config.data.dataset"


async def test_validation_alone_records_nothing_and_fills_in_the_defaults(server, wire_config):
    async with server() as stub:
        request = pb.SubmitTrainingJobRequest(config=wire_config, validate_only=True)
        job = (await stub.SubmitTrainingJob(request)).job
        assert job.id == ""
        assert job.config.model.mechanism == "mha"
        assert job.config.optimizer.min_learning_rate == pytest.approx(1e-3)
        assert job.config.model.positions == "rotary"
        assert not (await stub.ListTrainingJobs(pb.ListTrainingJobsRequest())).jobs


async def test_positions_are_learned_where_the_mechanism_or_the_head_size_takes_no_rotation(server, wire_config):
    wire_config.model.head_dim = 7
    async with server() as stub:
        request = pb.SubmitTrainingJobRequest(config=wire_config, validate_only=True)
        job = (await stub.SubmitTrainingJob(request)).job
    assert job.config.model.positions == "learned"


@pytest.mark.parametrize("job_id", ["a b", "../up", "x" * 65, "naïve"])
async def test_an_id_that_is_no_plain_word_is_refused(server, wire_config, submit, job_id):
    async with server() as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await submit(stub, wire_config, job_id)
    assert violated(caught.value) == "job_id"


async def test_a_job_does_not_take_the_name_of_a_model_that_is_there(server, wire_config, submit, home):
    (home / "models" / "smollm2").mkdir(parents=True)
    async with server() as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await submit(stub, wire_config, "smollm2")
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS


async def test_a_folder_of_models_that_cannot_be_written_is_said_before_the_first_step(
    server, wire_config, submit, home
):
    (home / "models").write_text("no folder")
    async with server() as stub:
        with pytest.raises(grpc.aio.AioRpcError, match=r"cannot write to .*models") as refused:
            await submit(stub, wire_config)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(("size", "token"), [(-1, ""), (1001, ""), (0, "x"), (0, "-3"), (0, "9" * 30)])
async def test_a_bad_page_is_refused(server, size, token):
    async with server() as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListTrainingJobs(pb.ListTrainingJobsRequest(page_size=size, page_token=token))
    assert caught.value.code() is INVALID


def test_parameters_are_counted_exactly_without_drawing_one_number():
    model = ModelConfig(
        hidden_size=16, num_layers=2, num_heads=2, max_seq_len=8, mechanism="gqa", feed_forward="swiglu", norm="rms"
    )
    before = torch.get_rng_state()
    counted = count_parameters(model, DataConfig())
    assert torch.equal(before, torch.get_rng_state())
    width, hidden, vocabulary, context = 16, 48, 128, 8
    attention = 2 * width * width + 2 * width * (width // 2)
    layer = attention + 3 * width * hidden + 2 * width
    assert counted == 2 * layer + (vocabulary + context) * width + width


def test_shapes_cost_neither_memory_nor_the_import_of_torchs_compiler():
    program = (
        "import sys; from torch import nn; from attn_train.model import shapes_only\n"
        "with shapes_only(): made = nn.Sequential(nn.Embedding(1 << 40, 64), nn.Linear(1 << 20, 1 << 20))\n"
        "nn.init.xavier_uniform_(nn.Linear(3, 3).weight)\n"
        "print(made[0].weight.shape[0] == 1 << 40, 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


@pytest.mark.parametrize(
    ("changes", "field", "told"),
    [
        ({"workers": 4, "tp": 3}, "config.workers", "a multiple of dp_shard x tp x cp = 1 x 3 x 1 = 3"),
        ({"workers": 2, "min_workers": 3}, "config.min_workers", "at most workers, 2"),
        ({"workers": 3}, "config.optimizer.batch_size", "a multiple of 3, the number of data-parallel workers"),
        ({"workers": 4, "tp": 4}, "config.tp", "a divisor of the 2 query heads of mechanism 'mha'"),
        ({"workers": 3, "cp": 3}, "config.cp", "a divisor of the 8 tokens of a sequence"),
    ],
)
async def test_workers_that_do_not_divide_what_they_share_are_refused(
    server, wire_config, submit, changes, field, told
):
    for name, value in changes.items():
        setattr(wire_config, name, value)
    async with server() as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await submit(stub, wire_config)
    assert caught.value.code() is INVALID
    assert violated(caught.value) == field
    assert told in caught.value.details()


@pytest.mark.parametrize(
    ("mechanism", "layout", "told"),
    [
        ("lightning", "tp", "mechanism 'lightning' cannot be split over 2 ranks"),
        ("linear", "cp", "mechanism 'linear' cannot be split by tokens"),
        ("entmax", "cp", "mechanism 'entmax' cannot be split by tokens"),
    ],
)
async def test_a_mechanism_that_cannot_be_split_is_refused_by_name(
    server, wire_config, submit, mechanism, layout, told
):
    wire_config.model.mechanism, wire_config.workers = mechanism, 2
    setattr(wire_config, layout, 2)
    async with server() as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await submit(stub, wire_config)
    assert violated(caught.value) == f"config.{layout}"
    assert told in caught.value.details()
