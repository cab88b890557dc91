"""Test classes to inherit: all laws of a mechanism, cache, model or kernel, parametrised by pytest over its cases."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest
from attn_core import CacheFamily, Mechanism, ModelFamily
from attn_core.kernels.attend import AttendKernel

from attn_testing import laws
from attn_testing.cache_subject import CacheSubject
from attn_testing.kernel_subject import KernelSubject
from attn_testing.law import Law, LawBroken
from attn_testing.laws import MECHANISM_LAWS
from attn_testing.laws import caches as cache_laws
from attn_testing.laws import kernel as kernel_laws
from attn_testing.laws import models as model_laws
from attn_testing.model_subject import ModelSubject, Values
from attn_testing.subject import SETTINGS, Setting, Subject


class Suite:
    """Base class of the test classes that a plugin's test file inherits.

    `laws` are the laws that a subclass must inherit: all laws of its kind, or none if it picks single laws.
    """

    laws: ClassVar[tuple[type[Law], ...]] = ()

    @classmethod
    def make_subject(cls) -> Any:
        """Create the subject under test: an object with `cases`."""
        raise NotImplementedError(f"{cls.__name__} must define the subject under test")

    @classmethod
    def subject(cls) -> Any:
        """The subject under test, created once per class."""
        if "_subject" not in vars(cls):
            cls._subject = cls.make_subject()  # type: ignore[attr-defined]
        return cls._subject  # type: ignore[attr-defined]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("pytest_generate_tests", GUARD, "subject"):
            if name in vars(cls) and cls.__module__.partition(".")[0] != __name__.partition(".")[0]:
                raise TypeError(f"{cls.__qualname__}.{name} is defined by attn_testing and must not be overridden")

    @classmethod
    def chosen(cls, law: type[Law], *, every: bool) -> tuple[list[Any], str]:
        """The cases that a law checks, all or those of a usual run, and the reason if there are none."""
        return law.applicable(cls.subject().cases, cls.__qualname__, every=every)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrise each law by its cases; a law without any becomes one skipped test with the reason."""
        if "case" in metafunc.fixturenames:
            law = law_of(type(self), metafunc.definition.originalname or metafunc.definition.name)
            every = metafunc.config.getoption("--every-case", default=True)
            cases, why = self.chosen(law, every=every)
            if cases and not every:
                cases, why = untested(metafunc.config, law, cases), "other classes test each part of its cases"
            skipped = [pytest.param(None, id="none", marks=pytest.mark.skip(reason=why))]
            metafunc.parametrize("case", [pytest.param(case, id=case.label) for case in cases] or skipped)
        elif "subject" in metafunc.fixturenames:
            metafunc.parametrize("subject", [self.subject()], ids=["all"])

    @pytest.fixture(autouse=True)
    def _named_in_reports(self, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
        test = getattr(request.node, "originalname", GUARD)
        if test != GUARD and (name := self.reported()):
            record_property("law", json.dumps({"mechanism": name, "law": law_of(type(self), test).title()}))

    @classmethod
    def reported(cls) -> str:
        """The name of the mechanism under which reports list the laws that passed; empty if it is not a mechanism."""
        return ""

    def test_no_law_is_dropped_or_replaced(self) -> None:
        """A law may only be overridden by a test that is marked `xfail` with a reason, and none may be dropped."""
        found = tampering(type(self))
        if found:
            raise LawBroken("; ".join(found))


GUARD = "test_no_law_is_dropped_or_replaced"


TESTED = pytest.StashKey[dict[type[Law], set[object]]]()


def untested(config: pytest.Config, law: type[Law], cases: list[Any]) -> list[Any]:
    """The cases with a part (`Law.parts`) that no case of this run has had before."""
    seen = config.stash.setdefault(TESTED, {}).setdefault(law, set())
    found = []
    for case in cases:
        parts = law.parts(case)
        if parts is None or not parts <= seen:
            seen |= parts or set()
            found.append(case)
    return found


def law_of(cls: type, test: str) -> type[Law]:
    """The law that defines the test of this name."""
    for base in cls.__mro__:
        if base is not cls and issubclass(base, Law) and test in base.checks() and not issubclass(base, Suite):
            return base
    raise LookupError(f"{cls.__qualname__}.{test} takes a case, but no law defines it")


def tampering(cls: type[Suite]) -> list[str]:
    """A message for every law of the suite that `cls` drops, replaces or skips without an `xfail` with a reason."""
    found = [f"{law.title()} is not inherited" for law in cls.laws if not issubclass(cls, law)]
    found += [f"the class is marked {mark.name}" for mark in marks(cls) if mark.name in {"skip", "skipif", "xfail"}]
    for law in [base for base in cls.__mro__ if issubclass(base, Law) and not issubclass(base, Suite)]:
        for test in law.checks():
            own = getattr(cls, test, None)
            if own is not getattr(law, test) and not excused(own):
                found.append(f"{test} ({law.title()}) is replaced without an xfail that has a reason")
    return found


def excused(test: Any) -> bool:
    """Whether an overriding test is marked `xfail` with a reason, is still run, and is not skipped."""
    admitted = [m for m in marks(test) if m.name == "xfail" and m.kwargs.get("reason") and m.kwargs.get("run", True)]
    return bool(admitted) and not any(mark.name in {"skip", "skipif"} for mark in marks(test))


def marks(item: Any) -> list[pytest.Mark]:
    """The marks on a class or function."""
    found = getattr(item, "pytestmark", [])
    return [
        mark.mark if isinstance(mark, pytest.MarkDecorator) else mark
        for mark in (found if isinstance(found, list) else [found])
    ]


class MechanismSuite(Suite):
    """The mechanism that a test class tests; inherit it together with single laws, or `MechanismLaws` for all laws.

    `mechanism` is a name or an object; `options` are the mechanism's own; `settings` are those that models may set.
    """

    mechanism: ClassVar[str | Mechanism]
    options: ClassVar[Mapping[str, Any]] = {}
    settings: ClassVar[Sequence[Setting]] = SETTINGS

    @classmethod
    def make_subject(cls) -> Subject:
        """The mechanism with its options and settings."""
        return Subject(cls.mechanism, cls.options, cls.settings)

    @classmethod
    def chosen(cls, law: type[Law], *, every: bool) -> tuple[list[Any], str]:
        """The same of all configured cases: whether their layers can be built is known when a test runs."""
        return law.applicable(cls.subject().configured, cls.__qualname__, every=every)

    @pytest.fixture(autouse=True)
    def _can_be_built(self, request: pytest.FixtureRequest) -> None:
        case = getattr(request.node, "callspec", None) and request.node.callspec.params.get("case")
        if case is not None and case.refusal is not None:
            pytest.skip(str(case.refusal))

    @classmethod
    def reported(cls) -> str:
        """The name of the mechanism."""
        return str(cls.subject().mechanism.name)


class MechanismLaws(
    MechanismSuite,
    laws.Described,
    laws.Options,
    laws.EveryOptionActs,
    laws.Settings,
    laws.Undeclared,
    laws.Abilities,
    laws.RowSums,
    laws.WeightsOfOutput,
    laws.CausalityByPerturbation,
    laws.CausalityByGradient,
    laws.Bidirectionality,
    laws.PaddingInvariance,
    laws.NoAllowedKey,
    laws.DecodeEqualsForward,
    laws.ChunkedPrefill,
    laws.BatchInvariance,
    laws.TreeEqualsPaths,
    laws.KVSharing,
    laws.DroppedWeights,
    laws.Gradients,
    laws.Training,
    laws.MicroBatches,
    laws.Recomputation,
    laws.Precision,
    laws.StateBytes,
    laws.Cost,
    laws.StepCost,
    laws.SavedAndLoaded,
    laws.Copied,
    laws.PaddingInFront,
    laws.KernelNames,
    laws.NoSequences,
    laws.OnMeta,
    laws.HeadSplit,
    laws.Equation,
    laws.Purity,
    laws.Devices,
    laws.StatesAreRead,
    laws.Preemption,
    laws.StepPrecision,
    laws.Compiles,
):
    """All laws of mechanisms. A plugin's test file inherits this and names its mechanism."""

    laws = MECHANISM_LAWS


class CacheSuite(Suite):
    """The cache that a test class tests: `family`, a name or an object."""

    family: ClassVar[str | CacheFamily]

    @classmethod
    def make_subject(cls) -> CacheSubject:
        """The cache and the models that it is tested with."""
        return CacheSubject(cls.family)


class CacheLaws(
    CacheSuite, cache_laws.ViewsEqual, cache_laws.RefusesWhenFull, cache_laws.ReleaseFreesAll, cache_laws.LiveBytes
):
    """All laws of caches. A cache's test file inherits this and names its family."""

    laws = cache_laws.CACHE_LAWS


class ModelSuite(Suite):
    """The models that a test class tests: a `family`, by name or as an object, and `configs` by label.

    Configs are plain values of small models, with a context length of at least 13 tokens.
    """

    family: ClassVar[str | ModelFamily]
    configs: ClassVar[Mapping[str, Values]]

    @classmethod
    def make_subject(cls) -> ModelSubject:
        """The family and its configs."""
        return ModelSubject(cls.family, cls.configs)


class ModelLaws(
    ModelSuite,
    model_laws.Described,
    model_laws.Causality,
    model_laws.StepEqualsForward,
    model_laws.CrowdEqualsAlone,
    model_laws.GreedyTokensOfLogits,
    model_laws.SavedAndLoaded,
):
    """All laws of models. A model's test file inherits this, names its family and gives small configs."""

    laws = model_laws.MODEL_LAWS


class KernelSuite(Suite):
    """The kernel that a test class tests: `kernel`, a name or an object, of the operation `attend`."""

    kernel: ClassVar[str | AttendKernel]

    @classmethod
    def make_subject(cls) -> KernelSubject:
        """The kernel and the problems it accepts."""
        return KernelSubject(cls.kernel)


class KernelLaws(KernelSuite, kernel_laws.AgreesWithOracle, kernel_laws.RefusesTheRest):
    """All laws of kernels. A kernel's test file inherits this and names its kernel."""

    laws = kernel_laws.KERNEL_LAWS
