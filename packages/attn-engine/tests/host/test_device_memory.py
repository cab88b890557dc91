"""On a GPU the KV cache gets what the share asked for leaves after weights and a step; what does not fit is said."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from attn_core import Field, Slot
from attn_core.errors import Incompatible, InvalidValue, OutOfCapacity
from attn_core.states import StateSpec
from attn_engine.host.loading import use_kernel
from attn_engine.host.memory import explain_too_small, step_bytes, with_kv_cache_memory
from attn_schema import EngineConfig
from torch import nn

CUDA = torch.device("cuda", 0)
GIBI = 2**30
MIBI = 2**20
LOGITS = 3 * MIBI


class Probed(nn.Module):
    """Takes a byte of the imitated memory for each token of a step, and `LOGITS` for logits; notes what it computes."""

    max_seq_len = 512

    def __init__(self, memory: SimpleNamespace) -> None:
        super().__init__()
        self.memory = memory
        self.asked: list[tuple[int, ...]] = []
        self.states: dict[str, StateSpec] = {}

    def state_specs(self):
        return {"layer": self.states}

    def hidden(self, tokens):
        self.asked.append(tuple(tokens.shape))
        self.memory.peak = max(self.memory.peak, self.memory.held + tokens.numel() * MIBI)
        return torch.zeros(*tokens.shape, 4)

    def logits(self, rows):
        self.asked.append(tuple(rows.shape))
        self.memory.peak = max(self.memory.peak, self.memory.held + LOGITS)
        return rows


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU of 80 GiB, of which this process holds 10 and others 5."""
    state = SimpleNamespace(total=80 * GIBI, free=65 * GIBI, held=10 * GIBI, peak=0)

    def reset(*_: object) -> None:
        state.peak = state.held

    answers = {
        "mem_get_info": lambda *_: (state.free, state.total),
        "memory_allocated": lambda *_: state.held,
        "memory_reserved": lambda *_: state.held,
        "max_memory_allocated": lambda *_: state.peak,
        "reset_peak_memory_stats": reset,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device=None, **options: zeros(*sizes, **options))
    return state


def test_the_cache_gets_what_weights_others_and_a_step_leave(memory):
    model = Probed(memory)
    config = with_kv_cache_memory(EngineConfig(gpu_memory_utilization=0.5), model, CUDA, drafts=False)
    assert config.batch_sizes == (256, 2048)
    assert model.asked == [(4, 512), (256, 4)]
    assert config.kv_cache_memory_bytes == 40 * GIBI - 15 * GIBI - 2 * 2048 * MIBI
    drafted = with_kv_cache_memory(EngineConfig(gpu_memory_utilization=0.5), model, CUDA, drafts=True)
    assert drafted.kv_cache_memory_bytes == config.kv_cache_memory_bytes // 2


@pytest.mark.parametrize(
    ("given", "share"), [({"enforce_eager": True}, 0), ({"max_cudagraph_capture_size": 512}, 0.25)]
)
def test_steps_that_are_not_recorded_leave_the_cache_what_their_graphs_would_take(memory, given, share):
    given = EngineConfig(gpu_memory_utilization=0.5, **given)
    config = with_kv_cache_memory(given, Probed(memory), CUDA, drafts=False)
    assert config.kv_cache_memory_bytes == 40 * GIBI - 15 * GIBI - (1 + share) * 2048 * MIBI


def test_a_model_whose_prompts_cannot_be_recorded_leaves_the_cache_the_memory_of_graphs(memory):
    model = Probed(memory)
    model.states = {"sums": Slot({"s": Field((2,))})}
    config = with_kv_cache_memory(EngineConfig(gpu_memory_utilization=0.5), model, CUDA, drafts=False)
    assert config.kv_cache_memory_bytes == 40 * GIBI - 15 * GIBI - 2048 * MIBI


def test_a_smaller_step_leaves_more(memory):
    given = EngineConfig(max_num_batched_tokens=1, max_num_seqs=1)
    assert step_bytes(Probed(memory), given, CUDA) == LOGITS


def test_a_share_that_leaves_nothing_is_refused_with_the_numbers(memory):
    with pytest.raises(OutOfCapacity) as error:
        with_kv_cache_memory(EngineConfig(gpu_memory_utilization=0.2), Probed(memory), CUDA, drafts=False)
    for words in ("16.0 GiB", "15.0 GiB are in use", "4.0 GiB", "--gpu-memory-utilization", "--max-num-batched-tokens"):
        assert words in error.value.message
    assert error.value.metadata["free_bytes"] == str(65 * GIBI)


def test_a_cache_of_a_given_size_must_be_free(memory):
    given = EngineConfig(kv_cache_memory_bytes=65 * GIBI)
    assert with_kv_cache_memory(given, Probed(memory), CUDA, drafts=False).kv_cache_memory_bytes == 65 * GIBI
    for config, drafts in ((given, True), (given.replace(kv_cache_memory_bytes=66 * GIBI), False)):
        with pytest.raises(OutOfCapacity, match="--kv-cache-memory-bytes"):
            with_kv_cache_memory(config, Probed(memory), CUDA, drafts=drafts)


def test_a_step_without_memory_is_refused_when_the_model_is_loaded(memory):
    model = Probed(memory)

    def hidden(_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")

    model.hidden = hidden
    with pytest.raises(OutOfCapacity, match=r"a step of 2048 tokens .* Tried to allocate 9\.00 GiB"):
        with_kv_cache_memory(EngineConfig(), model, CUDA, drafts=False)


def test_a_cpu_has_the_sizes_of_a_cpu_and_no_share():
    config = with_kv_cache_memory(EngineConfig(), nn.Linear(1, 1), torch.device("cpu"), drafts=False)
    assert config.batch_sizes == (64, 256)
    assert config.kv_cache_memory_bytes is None


def test_a_cache_too_small_for_its_model_is_explained_by_the_option_that_sized_it():
    config = EngineConfig(kv_cache_memory_bytes=MIBI, gpu_memory_utilization=0.5)
    error = InvalidValue.of("kv_cache_memory_bytes", MIBI, "at least 9999")
    told = explain_too_small(error, config, CUDA)
    assert type(told) is OutOfCapacity
    assert "at least 9999" in told.message
    assert "gpu_memory_utilization 0.5 leaves 1 MiB" in told.message
    assert explain_too_small(error, config, torch.device("cpu")) is error
    other = InvalidValue.of("kv_cache", "x", "y")
    assert explain_too_small(other, config, CUDA) is other


LACKS = "The operator 'aten::_foo' is not currently implemented for the MPS device.\nSee"
NO_FLOAT64 = "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."


@pytest.mark.parametrize("error", [NotImplementedError(LACKS), TypeError(NO_FLOAT64)], ids=["operator", "float64"])
def test_an_operation_that_a_device_lacks_is_said_when_the_model_is_loaded(error):
    class Lacking(nn.Linear):
        def forward(self, *_: object) -> None:
            raise error

    said = str(error).partition("\n")[0]
    with pytest.raises(Incompatible, match=f"lacks an operation .* device cpu: {said}"):
        use_kernel(Lacking(1, 1), None)


def test_a_mistake_of_a_model_is_not_taken_for_one_of_the_device():
    class Mistaken(nn.Linear):
        def forward(self, *_: object) -> None:
            raise TypeError("forward() takes 2 positional arguments")

    with pytest.raises(TypeError, match="positional"):
        use_kernel(Mistaken(1, 1), None)
