"""Weights are read onto the device that is asked for, with every buffer, and computed there; what is missing is said.

A CUDA device is imitated: torch makes tensors of it without memory (`FakeTensorMode`) and refuses to mix them with
tensors of the CPU, as a real one does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attn_core import installed
from attn_core.errors import CheckpointInvalid, InvalidValue, KernelRefused, OutOfCapacity
from attn_models import device as devices
from attn_models.device import in_words, require_memory, resolve_device, resolve_dtype
from attn_models.loading import load_model, save_model
from attn_models.loading.encoders import load_image_classifier, load_masked, save_encoder, save_masked
from attn_models.loading.models import load_draft
from attn_models.loading.sentences import load_sentence_encoder
from attn_models.tokenizers import character_tokenizer
from attn_models.weights import read_folder, safetensors_files
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

ALPHABET = "abcdefghij klmnop"
CUDA = torch.device("cuda", 0)
GIBI = 2**30
SIZES = {"vocab_size": len(ALPHABET), "max_seq_len": 32, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
DECODERS: dict[str, dict[str, Any]] = {
    "rotary": {"positions": "rotary", "mechanism": "gqa", "num_kv_heads": 2},
    "learned": {"positions": "learned"},
    "sinusoidal": {"positions": "sinusoidal"},
    "experts": {"num_experts": 4, "num_experts_per_tok": 2},
    "shared": {"kv_sharing": "cla:2"},
    "latent": {"mechanism": "mla"},
    "retention": {"mechanism": "retnet"},
    "window": {"mechanism": "sliding_window"},
}
OTHERS: dict[str, dict[str, Any]] = {
    "transformer": {"max_encoder_len": 16, "intermediate_size": 64},
    "rnnsearch": {"max_encoder_len": 16, "embedding": 16, "maxout": 16},
}


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This torch says that it has a CUDA device of 8 GiB, 6 of them free, that computes in bfloat16."""
    answers = {
        "is_available": True,
        "device_count": 1,
        "get_device_capability": (9, 0),
        "get_arch_list": ["sm_80", "sm_90"],
        "get_device_name": "Imitation",
        "mem_get_info": (6 * GIBI, 8 * GIBI),
        "memory_reserved": 0,
        "memory_allocated": 0,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    return monkeypatch


@pytest.fixture
def fake(a_gpu: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    """Tensors of that device have shapes and no numbers; those of files are read as they are, then moved."""
    torch._C._ensureCUDADeviceGuardSet()
    opened, mode = safetensors_files._opened, FakeTensorMode(allow_non_fake_inputs=True)

    class Handle:
        def __init__(self, path: Path) -> None:
            self._handle = opened(path)

        def get_tensor(self, name: str) -> Any:
            with unset_fake_temporarily():
                return mode.from_tensor(self._handle.get_tensor(name))

    a_gpu.setattr(safetensors_files, "_opened", Handle)
    a_gpu.setattr(safetensors_files, "is_finite", lambda _: True)  # there are no numbers
    with mode:
        yield mode


def saved(folder: Path, family: str, **fields: Any) -> Path:
    """A model of a family with random weights, in a folder."""
    with unset_fake_temporarily():
        torch.manual_seed(0)
        found = installed().models.get(family)
        return save_model(folder / family, found.build(found.configure(fields)), character_tokenizer(ALPHABET))


def elsewhere(model: torch.nn.Module) -> list[str]:
    """Names of parameters and buffers that are not on the GPU."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, tensor in named if tensor.device != CUDA or not isinstance(tensor, FakeTensor)]


def tokens(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int64, device="meta")


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_is_wholly_on_the_gpu_in_bfloat16(name, fake, tmp_path):
    folder = saved(tmp_path, "decoder", **SIZES, **DECODERS[name])
    loaded = load_model(folder, device="cuda")
    assert loaded.device == CUDA
    assert elsewhere(loaded.model) == []
    assert next(loaded.model.parameters()).dtype is torch.bfloat16
    same = load_model(folder, "float32", device="cuda:0", quantization="auto")
    assert elsewhere(same.model) == []
    assert next(same.model.parameters()).dtype is torch.float32
    draft = load_draft(folder, loaded)
    assert elsewhere(draft) == []


@pytest.mark.parametrize("name", OTHERS)
def test_models_with_an_encoder_are_too(name, fake, tmp_path):
    sizes = (
        SIZES if name == "transformer" else {key: SIZES[key] for key in ("vocab_size", "max_seq_len", "hidden_size")}
    )
    loaded = load_model(saved(tmp_path, name, **sizes, **OTHERS[name]), device="cuda")
    assert elsewhere(loaded.model) == []


@pytest.mark.parametrize("name", [name for name in DECODERS if name not in ("experts", "retention")])
def test_a_decoder_makes_no_tensor_elsewhere_than_its_inputs_are(name):
    """On the device `meta`, which no more than a GPU computes with tensors of the CPU.

    It has no numbers to choose experts by, and no autocast, for which retention asks.
    """
    family = installed().models.get("decoder")
    model = family.build(family.configure(SIZES | DECODERS[name])).eval().to("meta")
    with torch.inference_mode():
        assert model(tokens(2, 7)).is_meta
        assert all(weights.is_meta for weights in model.attention_maps(tokens(7), [0, 1]).values())


def test_nor_does_a_model_with_an_encoder():
    family = installed().models.get("transformer")
    model = family.build(family.configure(SIZES | OTHERS["transformer"])).eval().to("meta")
    with torch.inference_mode():
        assert model(tokens(1, 7), tokens(1, 9)).is_meta
        states = model.encode(tokens(9))
    assert all(rows.is_meta for layer in states.values() for fields in layer.values() for rows in fields.values())


def test_encoders_of_sentences_of_masked_words_and_of_images_are_too(fake, tmp_path):
    from attn_models.encoder.config import EncoderConfig
    from attn_models.encoder.encoder import Encoder, MaskedLanguageModel
    from attn_models.loading.encoders import ImageClassifier

    config = EncoderConfig(**SIZES, intermediate_size=64)
    with unset_fake_temporarily():
        letters = character_tokenizer(ALPHABET)
        save_encoder(tmp_path / "encoder", Encoder(config), letters)
        save_masked(tmp_path / "masked", MaskedLanguageModel(Encoder(config)), letters)
        family = installed().models.get("vit")
        pixels = {"image": 8, "patch": 4, "channels": 1, "classes": 2, "hidden_size": 16, "num_layers": 1}
        pixels |= {"num_heads": 2, "intermediate_size": 16}
        vit = family.build(family.configure(pixels))
        ImageClassifier(vit, ["a", "b"]).save(tmp_path / "vit")
    encoder = load_sentence_encoder(tmp_path / "encoder", device="cuda")
    assert elsewhere(encoder.model) == []
    assert encoder.device == CUDA
    masked, _ = load_masked(tmp_path / "masked", device="cuda")
    assert elsewhere(masked) == []
    assert elsewhere(load_image_classifier(tmp_path / "vit", device="cuda").model) == []


def test_tensors_are_checked_as_they_lie_in_the_file_and_moved_one_by_one(tmp_path):
    folder = saved(tmp_path, "decoder", **SIZES)
    tensors = read_folder(folder, device="meta").tensors
    there = tensors["embedding.weight"]
    assert there.is_meta
    assert there.shape == tensors.entries["embedding.weight"].shape
    (folder / "manifest.json").unlink(missing_ok=True)
    content = load_file(folder / "model.safetensors")
    content["embedding.weight"][0, 0] = torch.nan
    save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointInvalid, match="NaN"):
        _ = read_folder(folder, device="meta", verify="sizes").tensors["embedding.weight"]


FEW_BITS = ["int8", "int4"]


@pytest.mark.parametrize("form", FEW_BITS)
def test_what_no_kernel_of_a_gpu_packs_is_refused_and_not_computed_on_the_cpu(form, fake, a_gpu, tmp_path):
    a_gpu.setattr("attn_core.kernels.devices.has_gpu", lambda: False)
    folder = saved(tmp_path, "decoder", **SIZES)
    with pytest.raises(KernelRefused, match="device: must be 'cpu', not 'cuda'"):
        load_model(folder, device="cuda", quantization=form)
    packed = load_model(folder, device="cuda", quantization="bfloat16")
    assert elsewhere(packed.model) == []


@pytest.mark.parametrize("form", FEW_BITS)
def test_weights_of_few_bits_are_packed_on_the_gpu_that_multiplies_them(form, fake, a_gpu, tmp_path):
    pytest.importorskip("attn_kernels_triton")
    pytest.importorskip("triton")
    a_gpu.setattr("attn_core.kernels.devices.has_gpu", lambda: True)
    packed = load_model(saved(tmp_path, "decoder", **SIZES), device="cuda", quantization=form).model
    assert elsewhere(packed) == []
    layers = [module for module in packed.modules() if type(module).__name__ == "CodedLinear"]
    assert len(layers) == 4 * SIZES["num_layers"] + 1
    assert {layer.data.dtype for layer in layers} <= {torch.int8, torch.uint8}
    assert {weight.dtype for weight in packed.parameters()} == {torch.bfloat16}


def test_a_model_that_does_not_fit_says_what_is_needed_and_free_and_what_needs_less(fake, tmp_path):
    folder = saved(tmp_path, "decoder", **SIZES)
    parameters = load_model(folder, device="cuda").parameters
    fake_free = 4 * parameters - 1
    torch.cuda.mem_get_info = lambda *_: (fake_free, 8 * GIBI)  # undone with the fixture
    assert load_model(folder, "bfloat16", device="cuda").parameters == parameters
    with pytest.raises(OutOfCapacity) as error:
        load_model(folder, "float32", device="cuda")
    assert error.value.metadata["needed_bytes"] == str(4 * parameters)
    assert error.value.metadata["free_bytes"] == str(fake_free)
    assert "--dtype bfloat16" in error.value.message
    assert "--device" in error.value.message


def test_devices_are_found_by_name(a_gpu):
    assert resolve_device("auto") == resolve_device("cuda") == resolve_device("cuda:0") == CUDA
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_dtype("auto", CUDA) == "bfloat16"
    assert resolve_dtype("auto", torch.device("cpu")) == "float32"
    assert resolve_dtype("auto", torch.device("mps")) == "float32"
    with pytest.raises(InvalidValue, match="MPS has no float64"):
        resolve_dtype("float64", torch.device("mps"))
    with pytest.raises(InvalidValue, match="allowed: cpu, cuda:0"):
        resolve_device("cuda:1")
    for name in ("gpu", "cuda:x", "CPU", "cuda:-1", ""):
        with pytest.raises(InvalidValue, match="auto, cpu, cuda, cuda:INDEX or mps"):
            resolve_device(name)


def test_a_chip_without_bfloat16_computes_in_float32(a_gpu):
    a_gpu.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert resolve_dtype("auto", CUDA) == "float32"
    with pytest.raises(InvalidValue, match="Imitation has no instructions for bfloat16"):
        resolve_dtype("bfloat16", CUDA)


@pytest.mark.parametrize(
    ("built", "runs"),
    [
        (["sm_80", "sm_90"], True),
        (["sm_90a"], True),
        (["sm_75", "compute_75"], True),
        (["sm_75"], False),
        (["sm_100", "compute_100"], False),
    ],
)
def test_a_chip_that_torch_has_no_code_for_is_refused(built, runs, a_gpu, caplog):
    a_gpu.setattr(torch.cuda, "get_arch_list", lambda: built)
    if runs:
        assert resolve_device("cuda") == CUDA
        return
    with pytest.raises(InvalidValue, match=r"Imitation is sm_90 and torch .* was built for " + ", ".join(built)):
        resolve_device("cuda")
    assert resolve_device("auto").type in ("cpu", "mps")
    assert "Imitation is sm_90" in caplog.text


def test_a_driver_that_is_too_old_is_said_as_torch_says_it(monkeypatch):
    old = "The NVIDIA driver on your system is too old (found version 11040).\nPlease update it."

    def init() -> None:
        raise RuntimeError(old)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(InvalidValue, match=r"too old \(found version 11040\).*CUDA_VISIBLE_DEVICES is '7'"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    with pytest.raises(InvalidValue, match="no CUDA device is visible"):
        resolve_device("cuda:0")
    assert resolve_device("auto").type in ("cpu", "mps")


def test_a_torch_without_cuda_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(InvalidValue, match="built without CUDA"):
        resolve_device("cuda")


def test_memory_is_compared_with_what_is_free_and_held_and_said_in_words(a_gpu):
    assert devices.device_memory(torch.device("cpu")) is None
    require_memory(torch.device("cpu"), 2**60, "anything", "")
    require_memory(CUDA, 6 * GIBI, "a model", "")
    with pytest.raises(OutOfCapacity, match=r"a model needs 6\.5 GiB .* on cuda:0, where 6\.0 GiB of 8\.0 GiB .*\. Do"):
        require_memory(CUDA, 13 * GIBI // 2, "a model", "Do this.")
    a_gpu.setattr(torch.cuda, "memory_reserved", lambda *_: GIBI)
    require_memory(CUDA, 13 * GIBI // 2, "a model", "")
    assert in_words(3 * 2**20) == "3 MiB"
