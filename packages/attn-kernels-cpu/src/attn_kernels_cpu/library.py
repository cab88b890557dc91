"""The compiled kernels as functions of addresses and sizes."""

from __future__ import annotations

import ctypes
from functools import cache

from attn_core.errors import Unavailable

from attn_kernels_cpu import chip
from attn_kernels_cpu.compiling import compiled

ADDRESS = ctypes.c_void_p
COUNT = ctypes.c_int


class LinearStruct(ctypes.Structure):
    """`Linear` of native/tiles.hpp."""

    _fields_ = (
        ("format", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("parts", ctypes.c_int32),
        ("weights", ADDRESS),
        ("scales", ADDRESS),
        ("steps", ADDRESS),
        ("bias", ADDRESS),
    )


class MemoryStruct(ctypes.Structure):
    """`Memory` of native/attend.hpp."""

    _fields_ = (("at", ADDRESS), ("row", ctypes.c_int64), ("head", ctypes.c_int64), ("format", ctypes.c_int32))


class BlockStruct(ctypes.Structure):
    """`Block` of native/block.hpp; the heads are `Heads` of native/attend.hpp."""

    _fields_ = (
        ("projections", ADDRESS),
        ("output", ADDRESS),
        ("both", ADDRESS),
        ("down", ADDRESS),
        ("attention_gain", ADDRESS),
        ("feed_forward_gain", ADDRESS),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("query_heads", ctypes.c_int32),
        ("shared_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("rotated", ctypes.c_int32),
        ("interleaved", ctypes.c_int32),
        ("parts", ctypes.c_int32),
    )


class StepStruct(ctypes.Structure):
    """`Step` of native/block.hpp."""

    _fields_ = (
        ("tokens", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("cosines", ADDRESS),
        ("sines", ADDRESS),
        ("targets", ADDRESS),
        ("numbers", ADDRESS),
        ("start", ADDRESS),
        ("count", ADDRESS),
    )


class LayerStruct(ctypes.Structure):
    """`Layer` of native/block.hpp."""

    _fields_ = (("block", ADDRESS), ("step", ADDRESS), ("key", MemoryStruct), ("value", MemoryStruct))


SIGNATURES = {
    "attn_pack": (ADDRESS, COUNT, ADDRESS, COUNT),
    "attn_linear": (ADDRESS, ADDRESS, COUNT, ADDRESS, COUNT),
    "attn_largest": (ADDRESS, ADDRESS, COUNT, ADDRESS, COUNT),
    "attn_blocks": (ADDRESS, COUNT, ADDRESS),
}


@cache
def without_tiles() -> str | None:
    """Why the tile registers of AMX cannot be used, or None if they can; compiles the kernels to ask the system."""
    if lacking := chip.without(chip.TILES, chip.flags()):
        return lacking
    if library().attn_tiles_allowed():
        return None
    return "the system or the compiler does not let this process use the tile registers of AMX"


@cache
def trouble() -> str | None:
    """Why the kernels cannot be compiled or loaded, tried once; None if they are at hand."""
    try:
        library()
    except Unavailable as error:
        return error.message
    return None


@cache
def library() -> ctypes.CDLL:
    """The functions of native/kernels.cpp; compiles them where that was not done yet.

    Raises `Unavailable` where they cannot be compiled or loaded.
    """
    path = compiled()
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"compiled kernels cannot be loaded: {error}") from error
    for name, arguments in SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    return loaded
