"""Every law of kernels in one class."""

from __future__ import annotations

from typing import ClassVar

from attn_core.kernels.attend import AttendKernel

from attn_testing.kernel_subject import KernelSubject
from attn_testing.laws import kernel as laws_of_kernels
from attn_testing.suite import Suite


class KernelSuite(Suite):
    """What a test class says of the kernel it tests: `kernel`, a name or an object, of the operation `attend`."""

    kernel: ClassVar[str | AttendKernel]

    @classmethod
    def make_subject(cls) -> KernelSubject:
        """The kernel and the problems it accepts."""
        return KernelSubject(cls.kernel)


class KernelLaws(KernelSuite, laws_of_kernels.AgreesWithOracle, laws_of_kernels.RefusesTheRest):
    """Every law. A kernel's test file inherits this and names its kernel."""

    laws = laws_of_kernels.KERNEL_LAWS
