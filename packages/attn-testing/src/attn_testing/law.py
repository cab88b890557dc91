"""A law: test methods that a plugin's test class inherits, and where they apply."""

from __future__ import annotations

from typing import Any, ClassVar

from attn_core import Capability


class Law:
    """One law. Its `test_` methods take a `case`, one configuration of what is checked, or the whole `subject`.

    `cases_at_most` bounds slow laws to that many cases, spread over all; None checks every one.
    """

    cases_at_most: ClassVar[int | None] = None

    @classmethod
    def excuse(cls, case: Any) -> str | None:
        """Why the law says nothing about this case, or None where it applies."""
        return None

    @classmethod
    def title(cls) -> str:
        """The law's name: its module's, such as `causality_by_gradient`."""
        return cls.__module__.rpartition(".")[2]

    @classmethod
    def checks(cls) -> list[str]:
        """Names of the test methods that the law itself defines."""
        return [name for name in vars(cls) if name.startswith("test_")]

    @classmethod
    def applicable(cls, cases: list[Any]) -> tuple[list[Any], str]:
        """The cases to check, and where there is none, why."""
        excuses = [cls.excuse(case) for case in cases]
        chosen = [case for case, excuse in zip(cases, excuses, strict=True) if excuse is None]
        if not chosen:
            said = sorted({excuse for excuse in excuses if excuse})
            return [], "; ".join(said) or "there is no case"
        most = cls.cases_at_most or len(chosen)
        if most >= len(chosen):
            return chosen, ""
        return [chosen[i * (len(chosen) - 1) // max(1, most - 1)] for i in range(most)], ""


class MechanismLaw(Law):
    """A law of mechanisms; `needs` are the capabilities without which it says nothing."""

    needs: ClassVar[tuple[Capability, ...]] = ()

    @classmethod
    def excuse(cls, case: Any) -> str | None:
        missing = [capability.name for capability in cls.needs if not case.mechanism.can(capability)]
        if missing:
            return f"{case.mechanism.name} does not declare {' and '.join(missing)}"
        return cls.silent_on(case)

    @classmethod
    def silent_on(cls, case: Any) -> str | None:
        """Why the law says nothing about a case whose mechanism has what it needs, or None."""
        return None
