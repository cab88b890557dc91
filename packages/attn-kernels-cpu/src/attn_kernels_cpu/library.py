"""The compiled kernels as ctypes functions of addresses and sizes."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# Imported before the kernels, which then use the OpenMP library that torch has loaded: both share one thread pool.
import torch
from attn_core.errors import Unavailable

from attn_kernels_cpu import chip
from attn_kernels_cpu.chip import InstructionSet
from attn_kernels_cpu.compiling import compiled, prebuilt

log = logging.getLogger(__name__)

ADDRESS = ctypes.c_void_p
COUNT = ctypes.c_int


class LinearStruct(ctypes.Structure):
    """The struct `Linear` of native/tiles.hpp."""

    _fields_ = (
        ("format", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("parts", ctypes.c_int32),
        ("int16", ctypes.c_int32),
        ("weights", ADDRESS),
        ("scales", ADDRESS),
        ("steps", ADDRESS),
        ("bias", ADDRESS),
    )


class MatrixStruct(ctypes.Structure):
    """The struct `Matrix` of native/gemm.hpp."""

    _fields_ = (("at", ADDRESS), ("row", ctypes.c_int64), ("column", ctypes.c_int64))


class MemoryStruct(ctypes.Structure):
    """The struct `Memory` of native/attend.hpp."""

    _fields_ = (
        ("at", ADDRESS),
        ("row", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("format", ctypes.c_int32),
        ("scales", ADDRESS),
        ("scale_row", ctypes.c_int64),
        ("scale_head", ctypes.c_int64),
    )


class BlockStruct(ctypes.Structure):
    """The struct `Block` of native/block.hpp; the numbers of heads are its `Heads` of native/attend.hpp."""

    _fields_ = (
        ("projections", ADDRESS),
        ("output", ADDRESS),
        ("both", ADDRESS),
        ("down", ADDRESS),
        ("attention_gain", ADDRESS),
        ("feed_forward_gain", ADDRESS),
        ("query_gain", ADDRESS),
        ("key_gain", ADDRESS),
        ("attended_gain", ADDRESS),
        ("fed_gain", ADDRESS),
        ("eps", ctypes.c_float),
        ("head_eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("query_heads", ctypes.c_int32),
        ("shared_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("rotated", ctypes.c_int32),
        ("interleaved", ctypes.c_int32),
        ("parts", ctypes.c_int32),
        ("activation", ctypes.c_int32),
    )


_SEEN = (("numbers", ADDRESS), ("start", ADDRESS), ("count", ADDRESS))
"""The fields of the struct `Seen` of native/attend.hpp."""


class StepStruct(ctypes.Structure):
    """The struct `Step` of native/block.hpp."""

    _fields_ = (
        ("tokens", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("cosines", ADDRESS),
        ("sines", ADDRESS),
        ("targets", ADDRESS),
        *_SEEN,
        ("composed", ctypes.c_int32),
    )


class LayerStruct(ctypes.Structure):
    """The struct `Layer` of native/block.hpp."""

    _fields_ = (("block", ADDRESS), ("step", ADDRESS), ("key", MemoryStruct), ("value", MemoryStruct))


class PagedAttentionStruct(ctypes.Structure):
    """The struct `PagedAttention` of native/attend_batch.hpp."""

    _fields_ = (
        ("query", ADDRESS),
        ("out", ADDRESS),
        ("key", MemoryStruct),
        ("value", MemoryStruct),
        ("query_heads", ctypes.c_int32),
        ("shared_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        *_SEEN,
        ("tokens", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("composed", ctypes.c_int32),
    )


class LatentAttentionStruct(ctypes.Structure):
    """The struct `LatentAttention` of native/attend_latents.hpp."""

    _fields_ = (
        ("query", ADDRESS),
        ("out", ADDRESS),
        ("latent", MemoryStruct),
        ("rest", MemoryStruct),
        ("heads", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("rest_size", ctypes.c_int32),
        *_SEEN,
        ("tokens", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


SIGNATURES = {
    "attn_pack": (ADDRESS, COUNT, ADDRESS, COUNT),
    "attn_linear": (ADDRESS, ADDRESS, COUNT, ADDRESS, COUNT),
    "attn_largest": (ADDRESS, ADDRESS, COUNT, ADDRESS, COUNT),
    "attn_product": (ADDRESS, ADDRESS, ADDRESS, ADDRESS, COUNT, COUNT, COUNT, COUNT),
    "attn_products": (ADDRESS, ADDRESS, ADDRESS, *[ctypes.c_int64] * 3, COUNT, COUNT, COUNT, COUNT),
    "attn_add_product": (ADDRESS, ADDRESS, ADDRESS, COUNT, COUNT, COUNT, COUNT),
    "attn_norm": (ADDRESS,),
    "attn_norm_changes": (ADDRESS,),
    "attn_gate": (COUNT, ADDRESS),
    "attn_turn": (ADDRESS,),
    "attn_losses": (ADDRESS,),
    "attn_rounded_product": (ADDRESS, ADDRESS, ADDRESS, ADDRESS, COUNT, COUNT, COUNT, COUNT),
    "attn_activate": (COUNT, ADDRESS, ADDRESS, ADDRESS, ctypes.c_int64, COUNT),
    "attn_softmax": (ADDRESS, ctypes.c_int64, COUNT, ADDRESS, COUNT),
    "attn_log_softmax": (ADDRESS, ctypes.c_int64, COUNT, ADDRESS, COUNT),
    "attn_attention": (ADDRESS,),
    "attn_attention_changes": (ADDRESS, ADDRESS),
    "attn_attend_paged": (ADDRESS,),
    "attn_attend_latents": (ADDRESS,),
    "attn_blocks": (ADDRESS, COUNT, ADDRESS),
    "attn_draw": (ADDRESS, COUNT, COUNT, ADDRESS, ADDRESS, COUNT),
    "attn_logprobs": (ADDRESS, COUNT, COUNT, ADDRESS, COUNT, ADDRESS, ADDRESS, ADDRESS, COUNT),
}


@dataclass(frozen=True)
class Library:
    """The loaded kernels: the instruction set that they were compiled for, and the functions of native/kernels.cpp."""

    isa: InstructionSet
    functions: ctypes.CDLL


@cache
def without_tiles() -> str | None:
    """Why the tile registers of AMX cannot be used, or None if they can; loads the kernels to find out."""
    if lacking := chip.without(chip.TILES, chip.flags()):
        return lacking
    if loaded().isa.name != "amx":
        return f"the kernels are compiled for {loaded().isa.name}, not for amx"
    if library().attn_tiles_allowed():
        return None
    return "the operating system does not permit this process to use the tile registers of AMX"


@cache
def trouble() -> str | None:
    """Why the kernels cannot be compiled or loaded, which is tried once; None if they are loaded."""
    try:
        library()
    except Unavailable as error:
        return error.message
    return None


def is_loaded() -> bool:
    """Whether the kernels have been loaded already."""
    return loaded.cache_info().currsize > 0


def library() -> ctypes.CDLL:
    """The functions of native/kernels.cpp for the fastest available instruction set, or the one in `ATTN_CPU_ISA`.

    Raises `Unavailable` if they cannot be compiled or loaded.
    """
    return loaded().functions


@cache
def loaded() -> Library:
    """The kernels for the first candidate that can be loaded; compiled if the wheel has no library for it."""
    failures = []
    for isa in chip.candidates():
        try:
            found = Library(isa, _load(isa))
        except Unavailable as error:
            failures.append(error.message)
            log.info("no kernels for %s: %s", isa.name, error.message)
            continue
        log.info("kernels for %s, %d threads", isa.name, torch.get_num_threads())
        return found
    raise Unavailable("; ".join(failures) or f"no kernels for this processor: {chip.lacking(chip.flags())}")


def _load(isa: InstructionSet) -> ctypes.CDLL:
    if (path := prebuilt(isa)) is not None:
        try:
            return _with_types(path)
        except OSError as error:
            log.info("the wheel's kernels for %s cannot be loaded, so they are compiled: %s", isa.name, error)
    path = compiled(isa)
    try:
        return _with_types(path)
    except OSError as error:
        raise Unavailable(f"compiled kernels cannot be loaded: {error}") from error


def _with_types(path: Path) -> ctypes.CDLL:
    functions = ctypes.CDLL(str(path))
    for name, arguments in SIGNATURES.items():
        function = getattr(functions, name)
        function.argtypes, function.restype = arguments, None
    return functions
