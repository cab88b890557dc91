"""The conformance kit: laws that a mechanism, kernel, cache or model must keep."""

from attn_testing import laws
from attn_testing.agreement import Agreement
from attn_testing.cache_laws import CacheLaws, CacheSuite
from attn_testing.check import LawResult, check
from attn_testing.expect import LawBroken
from attn_testing.kernel_laws import KernelLaws, KernelSuite
from attn_testing.law import Law, MechanismLaw
from attn_testing.mechanism_laws import MechanismLaws, MechanismSuite
from attn_testing.memory import DictionaryStore
from attn_testing.model_laws import ModelLaws, ModelSuite
from attn_testing.subject import SETTINGS, Subject

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
