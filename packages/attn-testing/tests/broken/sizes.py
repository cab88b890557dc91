"""Mechanisms whose faults begin at some size: prices of large calls, and windows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from attn_core import Cost, Fields, MechanismConfig, Paged, Shape, StateSpecs, Step
from attn_core.checks import require_whole
from torch import Tensor, nn

from broken.sound import Sound, SoundLayer

MANY_KEYS = 64


class Bulk(Sound):
    """A wrong price: sequences beyond the third are free."""

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of at most three sequences."""
        return super().cost(config, replace(shape, batch=min(shape.batch, 3)))


class FlatRate(Sound):
    """A wrong price: of a long sequence, only some keys are counted."""

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of at most `MANY_KEYS` keys per query."""
        sound = super().cost(config, shape)
        pair = 4 * config.num_heads * config.head_layout.key_size * shape.batch * shape.query
        free = pair * max(0, shape.key - MANY_KEYS)
        return replace(sound, flops=sound.flops - free, allowed_flops=min(sound.allowed_flops, sound.flops - free))


class FlatStep(FlatRate):
    """A wrong price: in a step after many tokens, only some keys are counted."""

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of at most `MANY_KEYS` keys per query, in steps."""
        return super().cost(config, shape) if isinstance(shape, Step) else Sound.cost(self, config, shape)


class WindowLayer(SoundLayer):
    """Attends to the last tokens only."""

    def __init__(self, config: MechanismConfig, window: int, extra: int = 0) -> None:
        super().__init__(config)
        self.window, self.extra = window, extra

    def _allowed(self, query: Tensor, key: Tensor) -> Tensor:
        return super()._allowed(query, key) & ((query - key).abs() < self.window)

    def _one(self, query: Tensor, places: Tensor, fields: Fields, key_places: Tensor) -> Tensor:
        before, self.window = self.window, self.window + self.extra
        try:
            return super()._one(query, places, fields, key_places)
        finally:
            self.window = before


class Windowed(Sound):
    """Attention to the last `window` tokens. It keeps every law."""

    name = "sound_window"
    equation = r"\mathrm{softmax}(q^\top k / \sqrt{d_k} + M) V"
    more_rows: ClassVar[int] = 0
    more_keys: ClassVar[int] = 0

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """The config with a `window` of tokens."""

        window: int = 100

        def __post_init__(self) -> None:
            super().__post_init__()
            require_whole("window", self.window, ge=1)

    def build(self, config: MechanismConfig) -> nn.Module:
        """Build a layer of this window."""
        Sound.build(self, config)
        return WindowLayer(config, self.Config.of(config).window, self.more_keys)

    def state(self, config: MechanismConfig) -> StateSpecs:
        """Keys and values of the last tokens."""
        own = self.Config.of(config).window
        return {"kv": Paged(Sound.state(self, config)["kv"].fields, window=own + self.more_rows)}

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost; a step meets only the kept rows and its own."""
        if isinstance(shape, Step):
            kept = self.Config.of(config).window + self.more_rows - 1
            shape = replace(shape, remembered=min(shape.remembered, kept))
        return super().cost(config, shape)


class KeepsMore(Windowed):
    """State bytes that agree only with themselves: rows are kept that no query reads."""

    more_rows = 3


class OffByOne(Windowed):
    """An off-by-one window: steps attend to one token more than whole sequences."""

    more_rows, more_keys = 1, 1
