"""Build the layer of a mechanism by its name."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from attn_core import Mechanism, MechanismConfig, configure, installed
from attn_core.config import SHARED_FIELDS
from attn_core.errors import InvalidValue, UnknownName

from attn_variants.display import describe

if TYPE_CHECKING:
    from torch import nn
else:
    nn = Any


def layer(mechanism: str | Mechanism, **options: Any) -> nn.Module:
    """Build the attention layer of a mechanism, with randomly initialised weights.

        gqa = attn_variants.layer("gqa", hidden_size=512, num_heads=8, num_kv_heads=2)
        out = gqa(torch.randn(2, 100, 512))  # [batch, query_len, hidden_size]

    Every installed mechanism is available by name, from this package or from a plugin; `attn list mechanisms` lists
    them. The layer takes inputs [batch, query_len, hidden_size] and returns the same shape; mechanisms for
    cross-attention take the encoder's output [batch, key_len, hidden_size] as second argument. `forward` also takes
    the keyword `key_padding_mask`, bool [batch, key_len], True where a key is real.

    Args:
        mechanism: The name of a mechanism, such as "mha", "gqa", "mla", "sliding_window" or "retnet"; or
            "package/name" if two packages register the same name.
        **options: The fields of `attn_core.MechanismConfig` (`hidden_size`, `num_heads`, `num_kv_heads`, `head_dim`,
            `causal`, `bias`, `rotary`, `dropout`, ...) and the mechanism's own options, such as `window` of
            "sliding_window"; `attn show NAME` lists them. `causal` is True by default if the mechanism can be causal.

    Raises:
        UnknownName: There is no mechanism, or no option, of this name.
        AmbiguousName: Two packages register the name.
        InvalidValue: An option is missing, or has a value that is not allowed.
        Incompatible: Options exclude one another.
    """
    found = installed().mechanisms.get(mechanism) if isinstance(mechanism, str) else mechanism
    if not isinstance(found, Mechanism):
        raise InvalidValue.of("mechanism", mechanism, "the name of a mechanism or a Mechanism")
    config = configured(found, **options)
    module: nn.Module = found.build(config)
    describe(module, found, config)
    return module


def configured(mechanism: Mechanism, **options: Any) -> MechanismConfig:
    """Build a mechanism's config from shared fields and its own options; raises the same errors as `layer`."""
    fields = {field.name: field for field in dataclasses.fields(mechanism.Config)}
    for name in options:
        if name not in fields:
            raise UnknownName.of(f"option of mechanism {mechanism.name!r}", name, fields)
    for name, field in fields.items():
        if name not in options and field.default is field.default_factory is dataclasses.MISSING:
            raise InvalidValue(f"mechanism {mechanism.name!r}: {name} must be given", field=name)
    own = {name: value for name, value in options.items() if name not in SHARED_FIELDS}
    return configure(mechanism, own, **{name: options[name] for name in options if name in SHARED_FIELDS})
