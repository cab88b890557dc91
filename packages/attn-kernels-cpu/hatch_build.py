"""Puts compiled kernels into the wheel where `ATTN_KERNELS_CPU_PREBUILT` names the folder that holds them.

`nox -s wheels_cpu` compiles them; without the variable the wheel is for every platform and kernels are compiled on
first use. `ATTN_KERNELS_CPU_MACHINE` is the kind of processor that they are for.
"""
# ruff: noqa: INP001 -- hatchling reads it as a file

from __future__ import annotations

import os
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PrebuiltKernels(BuildHookInterface):
    """Adds the libraries and tags the wheel with the platform that they are for."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See hatchling."""
        folder = os.environ.get("ATTN_KERNELS_CPU_PREBUILT")
        if version == "standard" and folder:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-linux_{os.environ['ATTN_KERNELS_CPU_MACHINE']}"
            build_data["force_include"][folder] = "attn_kernels_cpu/prebuilt"
