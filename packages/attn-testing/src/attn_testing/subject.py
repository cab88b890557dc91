"""A mechanism under test and the configurations it is tried at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from attn_core import Capability, Mechanism, Rotary, configure, installed
from attn_core.errors import UserError

from attn_testing.case import Case

Setting = Mapping[str, Any]
"""What a model may tell a mechanism: shared fields of `MechanismConfig`."""

SETTINGS: tuple[Setting, ...] = (
    {"width": 16, "heads": 4},
    {"width": 8, "heads": 1},
    {"width": 12, "heads": 2, "head_size": 8},
    {"width": 12, "heads": 3, "bias": True},
    {"width": 16, "heads": 4, "key_value_heads": 2},
    {"width": 16, "heads": 4, "key_value_heads": 1, "bias": True},
    {"width": 16, "heads": 2, "rotary": Rotary()},
    {"width": 16, "heads": 4, "key_value_heads": 2, "rotary": Rotary(fraction=0.5, interleaved=True)},
)
"""The first must be taken by every mechanism; others may be refused with a `UserError`, as long as what is declared
is taken in some setting."""

CONTEXT = 64
"""The longest sequence that any law uses fits well into this."""


@dataclass(frozen=True)
class Refusal:
    """A setting that a mechanism did not take."""

    label: str
    setting: Setting
    error: Exception


@dataclass(frozen=True, eq=False)
class Subject:
    """A mechanism by name or as an object, its options, and the settings it is tried at."""

    given: str | Mechanism
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Sequence[Setting] = SETTINGS

    @cached_property
    def mechanism(self) -> Mechanism:
        """The mechanism itself; raises `UnknownName` where no plugin offers it."""
        return installed().mechanisms.get(self.given) if isinstance(self.given, str) else self.given

    @property
    def cases(self) -> list[Case]:
        """Every setting that the mechanism takes, causal and not where it can be both."""
        return [tried for tried in self._tried if isinstance(tried, Case)]

    @property
    def refusals(self) -> list[Refusal]:
        """Every setting that the mechanism did not take."""
        return [tried for tried in self._tried if isinstance(tried, Refusal)]

    @property
    def modes(self) -> list[Setting]:
        """The declared ways to treat later positions."""
        can = self.mechanism.can
        causal: list[Setting] = [{"causal": True}] if can(Capability.CAUSAL) else []
        free: list[Setting] = [{"causal": False}] if can(Capability.BIDIRECTIONAL) else []
        return causal + free or [{}]

    @cached_property
    def _tried(self) -> list[Case | Refusal]:
        return [self._try({**setting, **mode}) for setting in self._promised() for mode in self.modes]

    def _promised(self) -> Iterator[dict[str, Any]]:
        for setting in self.settings:
            grouped = setting.get("key_value_heads") in {None, setting.get("heads", 1)}
            turned = setting.get("rotary") is None
            if (grouped or self.mechanism.can(Capability.GROUPED)) and (
                turned or self.mechanism.can(Capability.ROTARY)
            ):
                yield {"context": CONTEXT, **setting}

    def _try(self, setting: Setting) -> Case | Refusal:
        label = label_of(setting)
        try:
            case = Case(self.mechanism, configure(self.mechanism, self.options, **setting), setting, label)
            case.layer  # noqa: B018  # building may refuse what the config alone could not
        except UserError as error:
            return Refusal(label, setting, error)
        return case


def label_of(setting: Setting) -> str:
    """A short word for a setting, such as `causal-width16-heads4-kv2`."""
    words = ["causal" if setting["causal"] else "full"] if "causal" in setting else []
    words += [f"width{setting['width']}"]
    names = {"heads": "heads", "key_value_heads": "kv", "head_size": "size"}
    words += [f"{word}{setting[name]}" for name, word in names.items() if setting.get(name)]
    words += ["bias"] * bool(setting.get("bias"))
    rotary = setting.get("rotary")
    words += [f"rotary{rotary.fraction:g}" + "i" * rotary.interleaved] if rotary else []
    return "-".join(words)
