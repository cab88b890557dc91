"""A tiny Gemma 3 in GGUF: its weights come back in Hugging Face's names, its tokenizer as sentencepiece works."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from attn_core.errors import CheckpointInvalid
from attn_models.loading import load_model
from attn_models.sources import convert
from attn_models.tokenizers import tokenizer_from_gguf
from attn_models.weights import read_folder, read_gguf_header

LAYERS, WIDTH, INNER, HEADS, SIZE = 7, 32, 48, 2, 16
CONTROL, USER, BYTE = 3, 4, 6
BLANK = "\u2581"
PIECES = [*"abcdehlo", BLANK, "ll", "he", "hell", "hello", BLANK + "a", "ab", "cab"]
TOKENS = (
    [(word, 0.0, CONTROL) for word in ("<pad>", "<eos>", "<bos>", "<unk>")]
    + [("  ", 0.0, USER), ("\n\n", 0.0, USER)]
    + [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    + [(piece, -float(rank), 1) for rank, piece in enumerate(PIECES)]
)
NORMS = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")


def describe(writer: gguf.GGUFWriter, tokens) -> None:
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_key_length(SIZE)
    writer.add_value_length(SIZE)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(4)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([token for token, _, _ in tokens])
    writer.add_token_scores([score for _, score, _ in tokens])
    writer.add_token_types([kind for _, _, kind in tokens])
    for place, add in enumerate(
        (writer.add_pad_token_id, writer.add_eos_token_id, writer.add_bos_token_id, writer.add_unk_token_id)
    ):
        add(place)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)


def write(path: Path, tokens=TOKENS, extra: dict[str, tuple[int, ...]] | None = None) -> dict[str, np.ndarray]:
    """The tensors of the file that was written, random ones of a whole model."""
    shapes = {"token_embd": (len(tokens), WIDTH), "output_norm": (WIDTH,), **(extra or {})}
    for layer in range(LAYERS):
        parts = dict.fromkeys(NORMS, (WIDTH,)) | {"attn_q_norm": (SIZE,), "attn_k_norm": (SIZE,)}
        parts |= {"attn_q": (HEADS * SIZE, WIDTH), "attn_k": (SIZE, WIDTH), "attn_v": (SIZE, WIDTH)}
        parts |= {"attn_output": (WIDTH, HEADS * SIZE), "ffn_down": (WIDTH, INNER)}
        parts |= {"ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH)}
        shapes |= {f"blk.{layer}.{part}": shape for part, shape in parts.items()}
    random = np.random.default_rng(0)
    tensors = {f"{name}.weight": random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    writer = gguf.GGUFWriter(path, "gemma3")
    describe(writer, tokens)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    return tensors


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma")
    tensors = write(folder / "tiny.gguf")
    return folder / "tiny.gguf", tensors, convert(folder / "tiny.gguf", folder / "tiny", "float32")


def test_gains_are_kept_as_their_distance_from_one_and_matrices_as_they_are(tiny) -> None:
    _, tensors, folder = tiny
    found = read_folder(folder).tensors
    assert len(found) == len(tensors)
    names = {"blk.0.ffn_norm.weight": "model.layers.0.pre_feedforward_layernorm.weight"}
    names |= {
        "blk.6.attn_q_norm.weight": "model.layers.6.self_attn.q_norm.weight",
        "output_norm.weight": "model.norm.weight",
    }
    for ours, theirs in names.items():
        assert torch.equal(found[theirs], torch.from_numpy(tensors[ours]) - 1)
    assert torch.equal(found["model.layers.3.mlp.up_proj.weight"], torch.from_numpy(tensors["blk.3.ffn_up.weight"]))


def test_the_folder_is_a_model_whose_sixth_layer_alone_sees_everything(tiny) -> None:
    loaded = load_model(tiny[2])
    windows = [loaded.config.choice(layer).options.get("window") for layer in range(LAYERS)]
    assert windows == [4, 4, 4, 4, 4, None, 4]
    assert loaded.model(torch.tensor([[2, 264, 265]])).isfinite().all()
    gain = loaded.model.state_dict()["blocks.0.fed_norm.weight"]
    torch.testing.assert_close(gain, torch.from_numpy(tiny[1]["blk.0.post_ffw_norm.weight"]))


@pytest.mark.oracle
def test_transformers_reads_the_same_model_in_the_folder(tiny) -> None:
    transformers = pytest.importorskip("transformers")
    peer = transformers.Gemma3ForCausalLM.from_pretrained(tiny[2]).eval()
    tokens = torch.randint(len(TOKENS), (2, 20))
    with torch.inference_mode():
        torch.testing.assert_close(load_model(tiny[2]).model(tokens), peer(tokens).logits, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("hello", ["hello"]),
        ("hell o", ["hell", BLANK, "o"]),
        ("cab a", ["cab", BLANK + "a"]),
        ("caba", ["cab", "a"]),
        ("a  b\n\nb", ["a", "  ", "b", "\n\n", "b"]),
        ("é", ["<0xC3>", "<0xA9>"]),
        ("<bos>a", ["<bos>", "a"]),
    ],
)
def test_the_best_scored_union_is_merged_first(tiny, text, pieces) -> None:
    tokenizer = tokenizer_from_gguf(read_gguf_header(tiny[0]))
    ids = tokenizer.encode(text, add_special=False)
    assert [tokenizer.token(place) for place in ids] == pieces
    assert tokenizer.decode(ids, skip_special=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.encode(text)[0] == tokenizer.bos_id


@pytest.mark.parametrize(
    ("tokens", "extra", "said"),
    [
        ([token for token in TOKENS if token[0] != "<0x41>"], {}, "255 byte tokens"),
        (TOKENS, {"rope_freqs": (8,)}, "rope_freqs"),
    ],
)
def test_a_file_that_is_no_gemma_is_refused_by_what_is_wrong(tokens, extra, said, tmp_path: Path) -> None:
    write(tmp_path / "bad.gguf", tokens, extra)
    with pytest.raises(CheckpointInvalid, match=said):
        convert(tmp_path / "bad.gguf", tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
