"""A mechanism under test: the configs that it accepts, each with its layer and random inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from attn_core import Capability, Mechanism, MechanismConfig, Rotary, Source, StateSpecs, configure, installed
from attn_core.checks import require_whole
from attn_core.declared import DeclaredMechanism
from attn_core.options import option_fields
from torch import Tensor

from attn_testing.law import seeded
from attn_testing.memory import rounding

JITTER = 0.1
"""The scale of noise that is added to new weights, so that weights initialized to zero are tested too."""

FEWEST = 26
TOKENS = 37
"""The usual length of the longest sequences: more than a usual block size, and no multiple of one."""

WIDEST, MARGIN = 128, 9
"""Options up to this size are exceeded by the longest sequences, by this many tokens. A mechanism with options meant
for longer ones has a sketch, with which it is tested, too."""


@dataclass(frozen=True, eq=False)
class Case:
    """A mechanism with the config of one setting; layers and inputs are float64 unless a law needs another dtype.

    `tokens` is the length of the longest sequences that it is tested with.
    """

    mechanism: Mechanism
    config: MechanismConfig
    setting: Mapping[str, Any]
    label: str
    tokens: int = TOKENS

    @cached_property
    def layer(self) -> Any:
        """The layer that most laws share, and must not modify."""
        return self.build()

    def build(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
        """Build a new layer in evaluation mode, with weights drawn from `seed`."""
        with seeded(seed):
            layer = self.mechanism.build(self.config).double()
            with torch.no_grad():
                for weight in layer.parameters():
                    weight.add_(JITTER * torch.randn_like(weight))
        return layer.eval().to(dtype)

    def rows(self, *shape: int, seed: int = 1) -> Tensor:
        """Random inputs [*shape, width], float64, N(0, 1), from `seed`."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, self.config.hidden_size, generator=generator, dtype=torch.float64)

    @cached_property
    def refusal(self) -> Exception | None:
        """Why the layer cannot be built although the config is accepted; None if it can."""
        try:
            self.layer  # noqa: B018
        except Exception as error:  # noqa: BLE001  # a mechanism may raise anything; the law `settings` says so
            return error
        return None

    @property
    def has_shared_layer(self) -> bool:
        """Whether the layer is the one that computes every spec."""
        own = type(self.mechanism)
        if not issubclass(own, DeclaredMechanism):
            return False
        return own.build is DeclaredMechanism.build and own.inner is DeclaredMechanism.inner

    @property
    def cross(self) -> bool:
        """Whether the layer attends to a source."""
        return self.config.cross

    @property
    def remembers_beside_source(self) -> bool:
        """Whether the layer attends to a source and also has states of its own sequence."""
        return self.cross and not all(isinstance(spec, Source) for spec in self.specs.values())

    @property
    def causal(self) -> bool:
        """Whether no output may depend on a later input."""
        return self.mechanism.can(Capability.CAUSAL) and self.config.causal and not self.cross

    @property
    def specs(self) -> StateSpecs:
        """The specs of the states that the layer has between steps."""
        return self.mechanism.state(self.config)

    @property
    def tolerance(self) -> float:
        """The tolerance between two float64 computations of the same result, given the dtypes of the states."""
        return rounding([self.specs])

    def attend(
        self, query: Tensor, source: Tensor | None = None, key_padding_mask: Tensor | None = None, layer: Any = None
    ) -> Any:
        """The outputs [batch, query, width]; `source` and `key_padding_mask` are only passed to the layer if given."""
        called = self.layer if layer is None else layer
        return called(
            query, *self._extra(source), **({} if key_padding_mask is None else {"key_padding_mask": key_padding_mask})
        )

    def weights(self, query: Tensor, source: Tensor | None = None, key_padding_mask: Tensor | None = None) -> Any:
        """The attention weights [batch, heads, query, key]."""
        return self.layer.weights(
            query, *self._extra(source), **({} if key_padding_mask is None else {"key_padding_mask": key_padding_mask})
        )

    def source(self, *shape: int, seed: int = 2) -> Tensor | None:
        """Random source inputs [*shape, width] if the layer attends to a source, else None."""
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
    """The outputs in evaluation mode, or of a new layer in training mode with torch's generator seeded by `seed`."""
    out: Tensor
    if not training:
        out = case.attend(query, source, key_padding_mask)
        return out
    layer = case.build().train()
    with seeded(seed):
        out = case.attend(query, source, key_padding_mask, layer)
    return out


Setting = Mapping[str, Any]
"""The values that a model may set for a mechanism: shared fields of `MechanismConfig`."""

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
"""The settings that are tried. Every mechanism must accept the first; others may be refused with a `UserError`, as long
as each declared capability is accepted in some setting."""

SPARE = 36
"""The difference between the context length of a model and the length of the longest sequences."""


@dataclass(frozen=True)
class Refusal:
    """A setting that a mechanism did not accept, with the error."""

    label: str
    setting: Setting
    error: Exception


@dataclass(frozen=True, eq=False)
class Subject:
    """A mechanism, given by name or as an object, with its options, the settings to try and the maximum length.

    Without `tokens`, the longest sequences exceed each integer option up to `WIDEST`, such as a chunk of 64 tokens. If
    some options of the mechanism's sketch are not given, it is also tested with these, in some settings: the sequences
    never reach beyond a default window of thousands of tokens.
    """

    given: str | Mechanism
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Sequence[Setting] = SETTINGS
    tokens: int | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None:
            require_whole("tokens", self.tokens, ge=FEWEST)

    @cached_property
    def longest(self) -> int:
        """The length of the longest sequences, as given or as the options require."""
        if self.tokens is not None:
            return self.tokens
        given = {**option_fields(self.mechanism), **self.mechanism.sketch, **self.options}
        sizes = [value for value in given.values() if isinstance(value, int) and not isinstance(value, bool)]
        return max(TOKENS, *(size + MARGIN for size in sizes if size <= WIDEST), 0)

    @property
    def context(self) -> int:
        """The context length (`max_seq_len`) that layers are configured with."""
        return self.longest + SPARE

    @cached_property
    def mechanism(self) -> Mechanism:
        """The mechanism; raises `UnknownName` if no plugin offers it."""
        return installed().mechanisms.get(self.given) if isinstance(self.given, str) else self.given

    @property
    def configured(self) -> list[Case]:
        """A case for every accepted config, in each declared mode; then those of the sketch. No layer is built."""
        return [tried for tried in (*self._tried, *self._sketched) if isinstance(tried, Case)]

    @cached_property
    def cases(self) -> list[Case]:
        """The configured cases whose layer can be built."""
        return [case for case in self.configured if case.refusal is None]

    @property
    def refusals(self) -> list[Refusal]:
        """Every setting that the mechanism did not accept."""
        tried = [(one, one.refusal) if isinstance(one, Case) else (one, one.error) for one in self._tried]
        return [Refusal(one.label, one.setting, error) for one, error in tried if error is not None]

    @property
    def modes(self) -> list[Setting]:
        """The declared modes: causal, bidirectional, and attending to a source."""
        can = self.mechanism.can
        causal: list[Setting] = [{"causal": True}] if can(Capability.CAUSAL) else []
        free: list[Setting] = [{"causal": False}] if can(Capability.BIDIRECTIONAL) else []
        cross: list[Setting] = [{"cross": True}] if can(Capability.CROSS) else []
        return causal + free + cross or [{}]

    @cached_property
    def _tried(self) -> list[Case | Refusal]:
        return [
            self._configured({**setting, **mode})
            for setting in self._promised()
            for mode in self.modes
            if not (mode.get("cross") and setting.get("rotary"))
        ]

    @cached_property
    def _sketched(self) -> list[Case | Refusal]:
        """The mechanism with those options of its sketch that are not given, in the first and the last setting."""
        further = {name: value for name, value in self.mechanism.sketch.items() if name not in self.options}
        if not further:
            return []
        settings = list(self._promised())
        tried = [
            self._configured({**setting, **mode}, **further)
            for setting in (settings[:1] if len(settings) == 1 else [settings[0], settings[-1]])
            for mode in self.modes
            if not (mode.get("cross") and setting.get("rotary"))
        ]
        return [replace(case, label=f"{case.label}-sketch") for case in tried if isinstance(case, Case)]

    def _promised(self) -> Iterator[dict[str, Any]]:
        """The settings that need only declared capabilities; HEAD_DIM is needed if the heads together are not as wide
        as the model.
        """
        can = self.mechanism.can
        for setting in self.settings:
            heads = setting.get("num_heads", 1)
            required = {
                Capability.GROUPED: setting.get("num_kv_heads") not in {None, heads},
                Capability.ROTARY: setting.get("rotary") is not None,
                Capability.BIAS: bool(setting.get("bias")),
                Capability.HEAD_DIM: setting.get("head_dim") not in {None, setting["hidden_size"] / heads},
            }
            if can(*(capability for capability, needed in required.items() if needed)):
                yield {"max_seq_len": self.context, **setting}

    def attempt(self, setting: Setting, **options: Any) -> Case | Refusal:
        """The case of a setting, with some options changed, or its refusal; the layer is built."""
        case = self._configured(setting, **options)
        refused = isinstance(case, Case) and case.refusal
        return Refusal(case.label, setting, refused) if refused else case

    def _configured(self, setting: Setting, **options: Any) -> Case | Refusal:
        label = label_of(setting)
        try:
            config = configure(self.mechanism, {**self.options, **options}, **setting)
            self.mechanism.state(config)  # reads the spec, which may refuse what the config alone could not
        except Exception as error:  # noqa: BLE001  # a mechanism may raise anything; the law `settings` says so
            return Refusal(label, setting, error)
        return Case(self.mechanism, config, setting, label, self.longest)


def label_of(setting: Setting) -> str:
    """A short label for a setting, such as `causal-width16-heads4-kv2`."""
    words = ["causal" if setting["causal"] else "full"] if "causal" in setting else []
    words += ["cross"] * bool(setting.get("cross"))
    words += [f"width{setting['hidden_size']}"]
    names = {"num_heads": "heads", "num_kv_heads": "kv", "head_dim": "size"}
    words += [f"{word}{setting[name]}" for name, word in names.items() if setting.get(name)]
    words += ["bias"] * bool(setting.get("bias"))
    rotary = setting.get("rotary")
    words += [f"rotary{rotary.fraction:g}" + "i" * rotary.interleaved] if rotary else []
    return "-".join(words)
