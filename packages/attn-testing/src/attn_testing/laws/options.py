"""Options out of range are refused by name."""

from __future__ import annotations

from typing import Any

import torch
from attn_core import Capability, Mechanism, configure
from attn_core.errors import UserError
from attn_core.options import option_fields

from attn_testing.expect import LawBroken, require
from attn_testing.law import MechanismLaw
from attn_testing.subject import Subject

ODD: tuple[Any, ...] = (-1, 0, 1.5, -0.5, True, "word", None, float("nan"), float("inf"), (), (0,), {})
"""What a user may give by mistake; some of it is right for some options."""
TOKENS = 12


class Options(MechanismLaw):
    """An option is refused by its name with what is allowed, or taken and computed with: no other error, no NaN."""

    def test_an_odd_option_is_refused_by_name_or_computed_with(self, subject: Subject) -> None:
        for name in option_fields(subject.mechanism):
            for value in ODD:
                options = {**subject.options, name: value}
                require_answer(subject.mechanism, name, options)


def require_answer(mechanism: Mechanism, name: str, options: dict[str, Any]) -> None:
    """Raise `LawBroken` where a layer with these options neither works nor is refused for the option of this name."""
    given, causal = f"{name}={options[name]!r}", mechanism.can(Capability.CAUSAL)
    try:
        config = configure(mechanism, options, width=16, heads=2, causal=causal, context=TOKENS)
        layer, rows = mechanism.build(config).eval(), torch.ones(1, TOKENS, 16)
        with torch.no_grad():
            out = layer(rows, *((rows,) if mechanism.can(Capability.CROSS) else ()))
    except UserError as error:
        require(name in str(error), f"{given} is refused without its name: {error}")
    except Exception as error:
        raise LawBroken(f"{given} ends in {type(error).__name__}: {error}") from error
    else:
        require(bool(out.isfinite().all()), f"{given} is taken, and gives what is not finite")
