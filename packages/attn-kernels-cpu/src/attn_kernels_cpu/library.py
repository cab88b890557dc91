"""The compiled kernels as functions of addresses and sizes."""

from __future__ import annotations

import ctypes
from functools import cache

from attn_core.errors import Unavailable

from attn_kernels_cpu.compiling import compiled

FORMATS = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3}
"""Numbers of `Format` in native/simd.hpp."""

ADDRESS = ctypes.c_void_p
COUNT = ctypes.c_int


class LinearStruct(ctypes.Structure):
    """`Linear` of native/tiles.hpp."""

    _fields_ = (
        ("format", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("weights", ADDRESS),
        ("scales", ADDRESS),
        ("steps", ADDRESS),
        ("bias", ADDRESS),
    )


SIGNATURES = {
    "attn_pack": (ADDRESS, COUNT, ADDRESS, COUNT),
    "attn_linear": (ADDRESS, ADDRESS, COUNT, ADDRESS, COUNT),
}


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
