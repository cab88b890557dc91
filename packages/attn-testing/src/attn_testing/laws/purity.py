"""The laws of what a call leaves alone, and of what devices it assumes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from attn_core import Capability, LayerState, RaggedBatch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from attn_testing.law import LawBroken, MechanismLaw, require, require_same
from attn_testing.laws.decoding import silent_where_nothing_decodes
from attn_testing.memory import DictionaryStore
from attn_testing.serving import LAYER, Serving, ragged
from attn_testing.subject import Case, in_mode

CUDA, META = 1, 14
"""The numbers of these device types in torch (`c10::DeviceType`)."""
BATCH, TOKENS = 3, 9
BUILT = 8
"""The number of layers that are built from one seed."""


def state_after_a_draw() -> Tensor:
    """The state of torch's generator after a draw, which a seed alone never leaves."""
    torch.rand(1)
    return torch.get_rng_state()


class Purity(MechanismLaw):
    """A call changes nothing but the states it is given, and depends on nothing but its inputs, weights and states.

    Neither on earlier calls of this or of another layer, nor on the layout of its inputs in memory, on whether
    gradients are recorded, or on a generator other than torch's; and evaluation draws nothing.
    """

    cases_at_most = 2

    def test_a_call_leaves_inputs_layer_and_generator_as_they_are(self, case: Case) -> None:
        layer, query, source = case.build(), case.rows(BATCH, TOKENS), case.source(BATCH, TOKENS)
        given = [query] if source is None else [query, source]
        kept, weights, drawn = [x.clone() for x in given], snapshot(layer), state_after_a_draw()
        with torch.no_grad():
            out = case.attend(query, source, None, layer)
        for now, before in zip(given, kept, strict=True):
            require(torch.equal(now, before), "a call changes its input in place")
        require(torch.equal(torch.get_rng_state(), drawn), "evaluation changes the state of torch's generator")
        for name, before in weights.items():
            require(torch.equal(layer.state_dict()[name], before), f"a call in evaluation changes {name} of the layer")
        memory = out.untyped_storage().data_ptr()
        owned = {x.untyped_storage().data_ptr() for x in [*given, *layer.parameters(), *layer.buffers()]}
        require(memory not in owned, "the output is the memory of an input, a parameter or a buffer")

    def test_a_call_gives_the_same_whatever_was_called_before(self, case: Case) -> None:
        layer, query, source = case.build(), case.rows(BATCH, TOKENS), case.source(BATCH, TOKENS)
        longest = case.config.max_seq_len or case.tokens
        with torch.no_grad():
            out = case.attend(query, source, None, layer)
            kept = out.clone()
            case.attend(case.rows(BATCH, TOKENS, seed=9), case.source(BATCH, TOKENS, seed=8), None, layer)
            case.attend(case.rows(1, longest), case.source(1, longest), None, case.build(seed=1))
            require(torch.equal(out, kept), "a later call changes the outputs of an earlier one in place")
            again = case.attend(query, source, None, layer)
        require_same(again, kept, "outputs after other calls and before them", 1e-12)

    def test_memory_layout_and_recording_gradients_change_nothing(self, case: Case) -> None:
        query, source = case.rows(BATCH, TOKENS), case.source(BATCH, TOKENS)
        scattered = query.transpose(0, 1).contiguous().transpose(0, 1)
        with torch.no_grad():
            plain = case.attend(query, source)
            strided = case.attend(scattered, source)
        require_same(strided, plain, "outputs of rows that are not contiguous in memory and that are", 1e-10)
        recorded = case.attend(query.clone().requires_grad_(), source)
        require_same(recorded, plain, "outputs with gradients recorded and without", 1e-10)

    def test_one_seed_of_torch_determines_layers_and_training(self, case: Case) -> None:
        query, source = case.rows(BATCH, TOKENS), case.source(BATCH, TOKENS)
        with torch.no_grad():
            first, *others = (case.attend(query, source, None, case.build(seed=5)) for _ in range(BUILT))
            for other in others:
                require_same(other, first, "outputs of two layers built from one seed", 1e-12)
            once, again = (in_mode(case, query, source, training=True) for _ in range(2))
        require_same(again, once, "outputs of two training passes with one seed of torch", 1e-12)

    def test_a_step_leaves_rows_and_layer_as_they_are(self, case: Case) -> None:
        if silent_where_nothing_decodes(case) or not case.mechanism.can(Capability.INCREMENTAL):
            return
        layer = case.build()
        serving, rows, weights = Watched(case, layer=layer), case.rows(TOKENS), snapshot(layer)
        serving.open(0, case.source(TOKENS))
        drawn = state_after_a_draw()
        for start, stop in ((0, 5), (5, 6), (6, TOKENS)):
            serving.step({0: rows[start:stop]})
        require(torch.equal(torch.get_rng_state(), drawn), "a step changes the state of torch's generator")
        for name, before in weights.items():
            require(torch.equal(layer.state_dict()[name], before), f"a step changes {name} of the layer")


class Watched(Serving):
    """Serving that notices when a step changes its inputs."""

    def _compute(self, rows: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        kept, places = rows.clone(), batch.positions.clone()
        out = super()._compute(rows, batch, state)
        require(torch.equal(rows, kept), "a step changes its rows in place")
        require(torch.equal(batch.positions, places), "a step changes the positions of its batch in place")
        return out


def snapshot(layer: Any) -> dict[str, Tensor]:
    """Copies of the parameters and buffers in a layer's state dict."""
    return {name: value.clone() for name, value in layer.state_dict().items() if isinstance(value, Tensor)}


GPU = "cuda:0"


class Devices(MechanismLaw):
    """A layer that is moved to a device computes there: no tensor is created or left elsewhere.

    Checked without such a device, by tensors that have shapes and devices but no values; a computation that needs
    values, such as one with sizes that depend on them, is not checked.
    """

    cases_at_most = 2

    def test_whole_sequences_stay_on_their_device(self, case: Case) -> None:
        mode, source = FakeTensorMode(), case.source(2, TOKENS)
        layer, query = moved(case, mode), fake(mode, case.rows(2, TOKENS))
        memory = None if source is None else fake(mode, source)
        with absent_gpu(), mode, torch.no_grad():
            stays(lambda: case.attend(query, memory, None, layer))

    def test_steps_stay_on_their_device(self, case: Case) -> None:
        if silent_where_nothing_decodes(case) or not case.mechanism.can(Capability.INCREMENTAL):
            return
        mode, source = FakeTensorMode(), case.source(TOKENS)
        layer, rows = moved(case, mode), fake(mode, case.rows(TOKENS))
        memory = None if source is None else fake(mode, source)
        store = DictionaryStore({LAYER: case.specs}, "float32", GPU)

        def steps() -> Tensor:
            out = rows
            for request in range(2):
                store.admit(request)
                if memory is not None:
                    store.write_source(request, {LAYER: layer.encode(memory)})
            for lengths, contexts in (([2, 1], [0, 0]), ([1, 1], [2, 1])):
                batch = ragged(lengths, contexts, GPU)
                out = layer.step(rows[: sum(lengths)], batch, store.view(batch, [0, 1])[LAYER])
            return out

        with absent_gpu(), mode, torch.no_grad():
            stays(steps)


def moved(case: Case, mode: FakeTensorMode) -> Any:
    """A float32 layer of which all parameters and buffers are on a GPU, without values."""
    layer = case.build(dtype=torch.float32)
    if hasattr(layer, "use_kernel"):
        layer.use_kernel("plain")
    for module in layer.modules():
        for name, weight in list(module._parameters.items()):  # noqa: SLF001  # as Module.to does
            if weight is not None:
                module._parameters[name] = torch.nn.Parameter(fake(mode, weight), requires_grad=False)  # noqa: SLF001
        for name, buffer in list(module._buffers.items()):  # noqa: SLF001
            if buffer is not None:
                module._buffers[name] = fake(mode, buffer)  # noqa: SLF001
    return layer


def fake(mode: FakeTensorMode, given: Tensor) -> Tensor:
    """A tensor without values on a GPU, of the shape of `given`; float32 where that is float64."""
    with mode:
        dtype = torch.float32 if given.dtype == torch.float64 else given.dtype
        return torch.empty(given.shape, dtype=dtype, device=GPU)


def absent_gpu() -> AbstractContextManager[None]:
    """Context manager in which torch without CUDA accepts fake tensors on a GPU."""
    return nullcontext() if torch.cuda.is_available() else device_guard()


def stays(call: Callable[[], Tensor]) -> None:
    """Raise `LawBroken` if a call on fake tensors meets or returns a tensor on another device; silent if it needs
    values."""
    try:
        found = call()
    except (DataDependentOutputException, DynamicOutputShapeException):
        return
    except (RuntimeError, AssertionError) as error:
        raise LawBroken(f"moved to another device, it raises {type(error).__name__}: {error}") from error
    require(str(found.device) == GPU, f"the output is on {found.device}, the input on {GPU}")


@contextmanager
def device_guard() -> Iterator[None]:
    """Register the device guard of "meta" tensors for "cuda", for builds of torch without CUDA, which have none."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before = guards[CUDA]
    guards[CUDA] = before or guards[META]
    yield
    guards[CUDA] = before
