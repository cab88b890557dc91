"""The conformance test kit: laws that every mechanism, kernel, cache or model must keep."""

from attn_testing import laws
from attn_testing.agreement import Agreement
from attn_testing.check import LawResult, check
from attn_testing.law import Law, LawBroken, MechanismLaw
from attn_testing.memory import DictionaryStore
from attn_testing.subject import SETTINGS, Subject
from attn_testing.suites import (
    CacheLaws,
    CacheSuite,
    KernelLaws,
    KernelSuite,
    MechanismLaws,
    MechanismSuite,
    ModelLaws,
    ModelSuite,
)

__all__ = [
    "SETTINGS",
    "Agreement",
    "CacheLaws",
    "CacheSuite",
    "DictionaryStore",
    "KernelLaws",
    "KernelSuite",
    "Law",
    "LawBroken",
    "LawResult",
    "MechanismLaw",
    "MechanismLaws",
    "MechanismSuite",
    "ModelLaws",
    "ModelSuite",
    "Subject",
    "check",
    "laws",
]
