"""A mechanism under test: the configs that it takes, each with its layer and random inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from attn_core import Capability, Mechanism, MechanismConfig, Rotary, Source, StateSpecs, configure, installed
from attn_core.checks import require_whole
from torch import Tensor

from attn_testing.memory import rounding

JITTER = 0.1
"""Added to fresh weights, so that nothing that starts at zero stays untested."""

FEWEST = 26
TOKENS = 37
"""The longest sequences of most laws, unless more are asked for: more than a usual block, and no multiple of one."""


@dataclass(frozen=True, eq=False)
class Case:
    """A mechanism at the config of one setting; layers and inputs are float64 unless a law asks for less.

    `tokens` is the length of the longest sequences that it is tried at.
    """

    mechanism: Mechanism
    config: MechanismConfig
    setting: Mapping[str, Any]
    label: str
    tokens: int = TOKENS

    @cached_property
    def layer(self) -> Any:
        """The layer that most laws share; they do not change it."""
        return self.build()

    def build(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
        """A layer of its own, with weights drawn from `seed`, in evaluation mode."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layer = self.mechanism.build(self.config).double()
            with torch.no_grad():
                for weight in layer.parameters():
                    weight.add_(JITTER * torch.randn_like(weight))
        return layer.eval().to(dtype)

    def rows(self, *shape: int, seed: int = 1) -> Tensor:
        """Random inputs [*shape, width], float64, N(0, 1), from `seed`."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, self.config.hidden_size, generator=generator, dtype=torch.float64)

    @property
    def cross(self) -> bool:
        """Whether the layer attends to a source."""
        return self.config.cross

    @property
    def remembers_beside_source(self) -> bool:
        """Whether the layer attends to a source and remembers something of its own sequence too."""
        return self.cross and not all(isinstance(spec, Source) for spec in self.specs.values())

    @property
    def causal(self) -> bool:
        """Whether no output may depend on a later input."""
        return self.mechanism.can(Capability.CAUSAL) and self.config.causal and not self.cross

    @property
    def specs(self) -> StateSpecs:
        """What the layer remembers between steps."""
        return self.mechanism.state(self.config)

    @property
    def tolerance(self) -> float:
        """What two float64 computations of one thing may differ by: rounding, or that of states kept in fewer bits."""
        return rounding([self.specs])

    def attend(
        self, query: Tensor, source: Tensor | None = None, key_padding_mask: Tensor | None = None, layer: Any = None
    ) -> Any:
        """The outputs [batch, query, width]; `source` and `key_padding_mask` reach only layers that were given them."""
        called = self.layer if layer is None else layer
        return called(
            query, *self._extra(source), **({} if key_padding_mask is None else {"key_padding_mask": key_padding_mask})
        )

    def weights(self, query: Tensor, source: Tensor | None = None, key_padding_mask: Tensor | None = None) -> Any:
        """The weights [batch, heads, query, key]."""
        return self.layer.weights(
            query, *self._extra(source), **({} if key_padding_mask is None else {"key_padding_mask": key_padding_mask})
        )

    def source(self, *shape: int, seed: int = 2) -> Tensor | None:
        """Random source rows [*shape, width] where the layer attends to a source, else None."""
        return self.rows(*shape, seed=seed) if self.cross else None

    def _extra(self, source: Tensor | None) -> tuple[Tensor, ...]:
        return () if source is None else (source,)


def in_mode(
    case: Case,
    query: Tensor,
    source: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    *,
    training: bool,
    seed: int = 3,
) -> Tensor:
    """The outputs in evaluation, or of a fresh layer in training, which draws what it draws by this seed."""
    out: Tensor
    if not training:
        out = case.attend(query, source, key_padding_mask)
        return out
    layer = case.build().train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        out = case.attend(query, source, key_padding_mask, layer)
    return out


Setting = Mapping[str, Any]
"""What a model may tell a mechanism: shared fields of `MechanismConfig`."""

SETTINGS: tuple[Setting, ...] = (
    {"hidden_size": 16, "num_heads": 4},
    {"hidden_size": 8, "num_heads": 1},
    {"hidden_size": 12, "num_heads": 2, "head_dim": 8},
    {"hidden_size": 12, "num_heads": 3, "bias": True},
    {"hidden_size": 16, "num_heads": 4, "num_kv_heads": 2},
    {"hidden_size": 16, "num_heads": 4, "num_kv_heads": 1, "bias": True},
    {"hidden_size": 16, "num_heads": 2, "rotary": Rotary()},
    {"hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "rotary": Rotary(fraction=0.5, interleaved=True)},
)
"""The first must be taken by every mechanism; others may be refused with a `UserError`, as long as what is declared
is taken in some setting."""

SPARE = 27
"""By how much the context of a model is longer than the longest sequences."""


@dataclass(frozen=True)
class Refusal:
    """A setting that a mechanism did not take."""

    label: str
    setting: Setting
    error: Exception


@dataclass(frozen=True, eq=False)
class Subject:
    """A mechanism by name or as an object, its options, the settings it is tried at, and up to how many tokens."""

    given: str | Mechanism
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Sequence[Setting] = SETTINGS
    tokens: int = TOKENS

    def __post_init__(self) -> None:
        require_whole("tokens", self.tokens, ge=FEWEST)

    @property
    def context(self) -> int:
        """The longest sequence that a model with such a layer would have."""
        return self.tokens + SPARE

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
        """The declared modes: causal, not causal, and attending to a source."""
        can = self.mechanism.can
        causal: list[Setting] = [{"causal": True}] if can(Capability.CAUSAL) else []
        free: list[Setting] = [{"causal": False}] if can(Capability.BIDIRECTIONAL) else []
        cross: list[Setting] = [{"cross": True}] if can(Capability.CROSS) else []
        return causal + free + cross or [{}]

    @cached_property
    def _tried(self) -> list[Case | Refusal]:
        return [
            self.attempt({**setting, **mode})
            for setting in self._promised()
            for mode in self.modes
            if not (mode.get("cross") and setting.get("rotary"))
        ]

    def _promised(self) -> Iterator[dict[str, Any]]:
        """The settings that ask for nothing undeclared; a head size is asked for where the heads are not as wide as
        the model.
        """
        can = self.mechanism.can
        for setting in self.settings:
            heads = setting.get("num_heads", 1)
            asked = {
                Capability.GROUPED: setting.get("num_kv_heads") not in {None, heads},
                Capability.ROTARY: setting.get("rotary") is not None,
                Capability.BIAS: bool(setting.get("bias")),
                Capability.HEAD_DIM: setting.get("head_dim") not in {None, setting["hidden_size"] / heads},
            }
            if can(*(capability for capability, needed in asked.items() if needed)):
                yield {"max_seq_len": self.context, **setting}

    def attempt(self, setting: Setting, **options: Any) -> Case | Refusal:
        """The case of a setting, with some options changed, or that it was not taken."""
        label = label_of(setting)
        try:
            config = configure(self.mechanism, {**self.options, **options}, **setting)
            case = Case(self.mechanism, config, setting, label, self.tokens)
            case.layer  # noqa: B018  # building may refuse what the config alone could not
        except Exception as error:  # noqa: BLE001  # a mechanism may raise anything; the law `settings` says so
            return Refusal(label, setting, error)
        return case


def label_of(setting: Setting) -> str:
    """A short word for a setting, such as `causal-width16-heads4-kv2`."""
    words = ["causal" if setting["causal"] else "full"] if "causal" in setting else []
    words += ["cross"] * bool(setting.get("cross"))
    words += [f"width{setting['hidden_size']}"]
    names = {"num_heads": "heads", "num_kv_heads": "kv", "head_dim": "size"}
    words += [f"{word}{setting[name]}" for name, word in names.items() if setting.get(name)]
    words += ["bias"] * bool(setting.get("bias"))
    rotary = setting.get("rotary")
    words += [f"rotary{rotary.fraction:g}" + "i" * rotary.interleaved] if rotary else []
    return "-".join(words)
