"""The conformance kit: laws that a mechanism, kernel, cache or model must keep."""

from attn_testing import laws
from attn_testing.check import LawResult, check
from attn_testing.expect import LawBroken
from attn_testing.law import Law, MechanismLaw
from attn_testing.mechanism_laws import MechanismLaws, MechanismSuite
from attn_testing.memory import DictionaryStore
from attn_testing.subject import SETTINGS, Subject

__all__ = [
    "SETTINGS",
    "DictionaryStore",
    "Law",
    "LawBroken",
    "LawResult",
    "MechanismLaw",
    "MechanismLaws",
    "MechanismSuite",
    "Subject",
    "check",
    "laws",
]
