"""The GGUF guard: what is well-formed is read as the library reads it, everything else is refused by one error."""

from __future__ import annotations

import struct
import tracemalloc
from contextlib import suppress
from pathlib import Path

import gguf
import pytest
from attn_core.errors import AttnError, CheckpointInvalid
from attn_models.tokenizers import tokenizer_from_gguf
from attn_models.weights import read_gguf_header
from attn_models.weights.gguf_child import dequantised
from attn_models.weights.gguf_import import placed_shards
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

STRING, ARRAY, UINT8, UINT32, BOOL = 8, 9, 0, 4, 7


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: bytes) -> bytes:
    return u64(len(value)) + value


def entry(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + u32(kind) + value


def tensor(name: bytes = b"t", sizes: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + u32(len(sizes)) + b"".join(map(u64, sizes)) + u32(kind) + u64(offset)


def file(entries: list[bytes] | None = None, tensors: list[bytes] | None = None, **over: object) -> bytes:
    entries, tensors = entries or [], tensors or []
    counts = u64(over.get("tensor_count", len(tensors))) + u64(over.get("key_count", len(entries)))
    head = over.get("magic", b"GGUF") + over.get("version", u32(3)) + counts + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(over.get("data", 128))


FINE = file([entry(b"general.name", STRING, text(b"fine"))], [tensor()])

HOSTILE = {
    "wrong magic": file(magic=b"GGML"),
    "empty": b"",
    "truncated": FINE[:40],
    "a zip archive": b"PK\x03\x04" + bytes(100),
    "version 1": file(version=u32(1)),
    "version 99": file(version=u32(99)),
    "big-endian": file(version=struct.pack(">I", 3)),
    "2^60 tensors": file(tensor_count=1 << 60),
    "2^60 keys": file(key_count=1 << 60),
    "2^64-1 keys": file(key_count=(1 << 64) - 1),
    "a string of 2^62 bytes": file([text(b"k") + u32(STRING) + u64(1 << 62)]),
    "a key of 2^62 bytes": file([u64(1 << 62)]),
    "an array of 2^40": file([entry(b"k", ARRAY, u32(UINT32) + u64(1 << 40))]),
    "an array of 2^61 eight-byte numbers": file([entry(b"k", ARRAY, u32(10) + u64(1 << 61))]),
    "an array of 20 million": file([entry(b"k", ARRAY, u32(UINT8) + u64(20_000_000))]),
    "20 million elements that are there": lambda: file(
        [entry(b"k", ARRAY, u32(UINT8) + u64(20_000_000) + bytes(20_000_000))]
    ),
    "nested arrays": file([entry(b"k", ARRAY, (u32(ARRAY) + u64(1)) * 100)]),
    "an array of empty arrays": file([entry(b"k", ARRAY, u32(ARRAY) + u64(2**62))]),
    "alignment 0": file([entry(b"general.alignment", UINT32, u32(0))], [tensor()]),
    "alignment 3": file([entry(b"general.alignment", UINT32, u32(3))], [tensor()]),
    "alignment 2^31": file([entry(b"general.alignment", UINT32, u32(1 << 31))], [tensor()]),
    "alignment of text": file([entry(b"general.alignment", STRING, text(b"32"))], [tensor()]),
    "alignment true": file([entry(b"general.alignment", BOOL, b"\1")], [tensor()]),
    "a key twice": file([entry(b"k", UINT32, u32(1))] * 2),
    "an empty key": file([entry(b"", UINT32, u32(1))]),
    "an unknown value type": file([entry(b"k", 13, u32(1))]),
    "an array of an unknown type": file([entry(b"k", ARRAY, u32(77) + u64(1))]),
    "a boolean of 2": file([entry(b"k", BOOL, b"\2")]),
    "bad UTF-8 in a key": file([entry(b"\xff\xfe", UINT32, u32(1))]),
    "bad UTF-8 in a value": file([entry(b"k", STRING, text(b"\xc3\x28"))]),
    "a shape that overflows 64 bits": file(tensors=[tensor(sizes=(1 << 32, 1 << 32, 1 << 32))]),
    "a shape that wraps to a small number": file(tensors=[tensor(sizes=((1 << 63) + 16, 2))]),
    "a shape with 0": file(tensors=[tensor(sizes=(32, 0))]),
    "2^31 dimensions": file(tensors=[text(b"t") + u32(1 << 31)]),
    "5 dimensions": file(tensors=[tensor(sizes=(32, 1, 1, 1, 1))]),
    "0 dimensions": file(tensors=[tensor(sizes=())]),
    "data outside the file": file(tensors=[tensor(offset=1 << 40)]),
    "data one byte outside": file(tensors=[tensor(sizes=(32,))], data=127),
    "an offset near 2^64": file(tensors=[tensor(offset=(1 << 64) - 32)]),
    "an unaligned offset": file(tensors=[tensor(offset=8)], data=256),
    "overlapping tensors": file(tensors=[tensor(b"a"), tensor(b"b", offset=64)], data=256),
    "a tensor twice": file(tensors=[tensor(), tensor(offset=128)], data=256),
    "a tensor without a name": file(tensors=[tensor(b"")]),
    "a tensor name of 65 bytes": file(tensors=[tensor(b"x" * 65)]),
    "an unknown quantisation": file(tensors=[tensor(kind=200)]),
    "a row that is no multiple of the block": file(tensors=[tensor(sizes=(31,), kind=8)]),
}


def test_a_well_formed_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "fine.gguf"
    path.write_bytes(FINE)
    header = read_gguf_header(path)
    assert header.metadata == {"general.name": "fine"}
    assert header.tensors["t"].shape == (32,)
    assert header.tensors["t"].offset + header.tensors["t"].nbytes == len(FINE)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_with_its_path_in_bounded_memory(name: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    content = HOSTILE[name]
    path.write_bytes(content() if callable(content) else content)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointInvalid, match=r"hostile\.gguf"):
            read_gguf_header(path)
        assert tracemalloc.get_traced_memory()[1] < 256 << 20
    finally:
        tracemalloc.stop()


def test_every_truncation_of_a_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    for length in range(len(FINE)):
        path.write_bytes(FINE[:length])
        with pytest.raises(CheckpointInvalid):
            read_gguf_header(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(CheckpointInvalid, match="cannot be read"):
            read_gguf_header(path)


@pytest.mark.parametrize("which", ["tiny_llama", "quantised_llama"])
def test_the_guard_reads_what_the_gguf_library_reads(which: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(which).path
    header, library = read_gguf_header(path), gguf.GGUFReader(path)
    known = {key: item.contents() for key, item in library.fields.items() if not key.startswith("GGUF.")}
    assert {k: list(v) if isinstance(v, tuple) else v for k, v in header.metadata.items()} == known
    assert list(header.tensors) == [item.name for item in library.tensors]
    for item in library.tensors:
        ours = header.tensors[item.name]
        assert ours.shape == tuple(reversed([int(size) for size in item.shape]))
        assert (ours.type, ours.offset, ours.nbytes) == (item.tensor_type.name, item.data_offset, item.n_bytes)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_mutated_file_is_imported_or_refused_and_nothing_else(data: st.DataObject, tiny_llama, tmp_path) -> None:
    content = bytearray(tiny_llama.path.read_bytes())
    header_length = min(tensor.offset for tensor in read_gguf_header(tiny_llama.path).tensors.values())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, header_length - 1))
        change = data.draw(st.one_of(st.binary(min_size=1, max_size=1), st.sampled_from([u64(1 << 60), u32(9), b""])))
        content[place : place + len(change)] = change
        if data.draw(st.integers(0, 9)) == 0:
            del content[data.draw(st.integers(0, len(content))) :]
    path = tmp_path / "mutated.gguf"
    path.write_bytes(content)
    with suppress(AttnError):
        header = read_gguf_header(path)
        for placement in placed_shards(header, "float32")[0].values():
            assert dequantised(header, header.tensors[placement.source]).shape == placement.shape
        tokenizer_from_gguf(header)
