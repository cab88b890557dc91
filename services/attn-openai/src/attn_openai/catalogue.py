"""The data of the web page of a mechanism: the facts of `attn show`, its picture, and the curves of `attn compare`."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from attn_cli.comparison import row
from attn_cli.facts import describe, price, verdicts, weights_statement
from attn_cli.options import Sizes, supported_sizes
from attn_cli.pictures import tensors, view_of
from attn_core import Capability, Mechanism, MechanismConfig, installed
from attn_core.computation import WholeCall
from attn_core.errors import DeadlineExceeded, InvalidValue, OutOfCapacity, UnknownName
from attn_core.options import option_fields
from latex2mathml.converter import convert

POSITIONS = 24
"""The number of query and key positions in the picture."""
DTYPE = "float32"
MOST = {"hidden_size": 16384, "num_heads": 256, "num_kv_heads": 256, "seq": 2**14}
"""The largest sizes that a request may have."""
DEFAULTS = {"hidden_size": 512, "num_heads": 8, "num_kv_heads": None, "seq": 1024}
DRAWN = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": None}
"""The sizes of the layer that is computed for a picture that the mask alone cannot give: large ones take long."""
DRAWING_SECONDS = 2.0
"""Processor time that the layer of a picture may take; there is no picture for options that need more."""
DRAWING_ELEMENTS = 2**20
"""The largest tensor that the layer of a picture may create, in elements."""
MOST_OPTION = 2**16
"""The largest value of a numeric option here."""
MOST_COMPARED = 6
CURVE = [2**power for power in range(6, 18)]
"""Sequence lengths of the cost curves."""
ALWAYS_PRICED = 2**12
"""Tokens up to which a cost is computed, however long that takes."""
CURVE_SECONDS = 0.5
"""Processor time after which a curve ends at the length that it has reached."""
FIELDS = {"name", "options", "compare", *MOST}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MechanismView:
    """The request of a page for a mechanism: its name, options and sizes, and mechanisms to compare it with."""

    name: str
    options: Mapping[str, Any]
    compare: tuple[str, ...]
    sizes: Sizes
    seq: int

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> MechanismView:
        """Parse the body of a request; raises `InvalidValue` or `UnknownName` for invalid fields."""
        for key in body:
            if key not in FIELDS:
                raise UnknownName.of("field", key, FIELDS)
        name, options, compare = body.get("name"), body.get("options", {}), body.get("compare", [])
        if not isinstance(name, str) or not name or name.startswith("-"):
            raise InvalidValue.of("name", name, "the name of a mechanism")
        if not isinstance(options, dict):
            raise InvalidValue.of("options", options, "an object of options by name")
        for key, value in options.items():
            _require_small(f"options.{key}", value)
        if (
            not isinstance(compare, list)
            or len(compare) > MOST_COMPARED
            or not all(isinstance(x, str) for x in compare)
        ):
            raise InvalidValue.of("compare", compare, f"at most {MOST_COMPARED} names of mechanisms")
        found = {field: whole(body, field) for field in MOST}
        seq = found.pop("seq") or 1
        sizes = Sizes(**found)  # type: ignore[arg-type]
        return cls(name=name, options=options, compare=tuple(compare), sizes=sizes, seq=seq)

    def facts(self) -> dict[str, Any]:
        """Everything that the page shows, ready for JSON; raises `UserError` for options that do not fit together."""
        mechanism = installed().mechanisms.get(self.name)
        fitted = supported_sizes(self.sizes, mechanism)
        config = fitted.config(mechanism, self._required(mechanism))
        facts = describe(mechanism)
        curves = self._curves(mechanism)
        # Allowed pairs of some masks are counted row by row: costs are limited to the length that a curve reached.
        most = max(curves[0]["tokens"][-1], ALWAYS_PRICED)
        if self.seq > most:
            allowed = f"at most {most} with these options, as counting the allowed pairs takes longer beyond"
            raise InvalidValue.of("seq", self.seq, allowed)
        prices = price(mechanism, config, self.seq, DTYPE)
        return {
            **facts,
            **prices,
            "name": self.name,
            "paper_url": mechanism.paper.url,
            "mathml": equation_lines(mechanism.equation),
            "options": own_options(mechanism),
            "weights": weights_statement(mechanism),
            "kernels": verdicts(mechanism, config, WholeCall(dtype=DTYPE, tokens=self.seq)),
            "picture": self._picture(mechanism),
            "curves": curves,
        }

    def _required(self, mechanism: Mechanism) -> dict[str, Any]:
        """The given options, and for those without a default the values of the mechanism's picture."""
        defaults = option_fields(mechanism)
        sketched = {name: mechanism.sketch[name] for name, default in defaults.items()
                 if default is dataclasses.MISSING and name in mechanism.sketch}  # fmt: skip
        return sketched | dict(self.options)

    def _picture(self, mechanism: Mechanism) -> dict[str, Any]:
        """A caption and a grid; if drawing exceeds its limits, an empty grid with the reason as caption."""
        shown = dict(self.options) or dict(mechanism.sketch)
        config = supported_sizes(self.sizes, mechanism).config(mechanism, shown)
        if mechanism.spec(config) is not None and not mechanism.can(Capability.CHOOSES):
            view = view_of(mechanism, config, POSITIONS, shown)
            return {"caption": view.caption, "grid": view.grid}
        small: Sizes = dataclasses.replace(self.sizes, **DRAWN)  # type: ignore[arg-type]
        return layer_picture(mechanism, supported_sizes(small, mechanism).config(mechanism, shown), shown)

    def _curves(self, mechanism: Mechanism) -> list[dict[str, Any]]:
        """The cost curves of this mechanism with its options, and of the compared ones with their default options."""
        fitted = supported_sizes(self.sizes, mechanism)
        config = fitted.config(mechanism, self._required(mechanism))
        own = _curve(self.name, lambda tokens: price(mechanism, config, tokens, DTYPE))
        others = [name for name in self.compare if name != self.name]
        return [own, *(_curve(name, partial(self._row, name)) for name in others)]

    def _row(self, name: str, tokens: int) -> dict[str, Any]:
        return row(name, self.sizes, tokens, DTYPE)


def layer_picture(mechanism: Mechanism, config: MechanismConfig, shown: Mapping[str, Any]) -> dict[str, Any]:
    """The picture of a random layer, drawn within `DRAWING_SECONDS`; if that is exceeded, an empty grid and why."""
    try:
        with bounded_torch(DRAWING_SECONDS, DRAWING_ELEMENTS):
            view = view_of(mechanism, config, POSITIONS, shown)
    except (DeadlineExceeded, OutOfCapacity) as error:
        return {"caption": f"There is no picture with these options: {error.message}.", "grid": []}
    return {"caption": view.caption, "grid": view.grid}


@contextlib.contextmanager
def bounded_torch(seconds: float, elements: int) -> Iterator[None]:
    """Limit the torch calls of this thread in time and in the size of their results.

    The first call that is over a limit raises: `DeadlineExceeded` after `seconds` of this thread's processor time,
    `OutOfCapacity` for a tensor with more than `elements` elements. Raises `MissingPackage` without torch.
    """
    torch = tensors()
    began = time.thread_time()

    def look(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG001 -- torch's
        if time.thread_time() - began > seconds:
            raise DeadlineExceeded(f"computing the layer takes more than {seconds:g} seconds")
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.numel() > elements:
            raise OutOfCapacity(f"the layer creates a tensor of more than {elements} elements")
        return made

    bounded = type("Bounded", (torch.overrides.TorchFunctionMode,), {"__torch_function__": look})
    with bounded():
        yield


def _curve(name: str, price_at: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    prices = [price_at(CURVE[0])]  # imports for the first price do not count as its time
    began = time.thread_time()
    for tokens in CURVE[1:]:
        prices.append(price_at(tokens))
        if time.thread_time() - began > CURVE_SECONDS:
            break
    values = {key: [one[key] for one in prices] for key in ("allowed_flops", "state_bytes")}
    return {"name": name, "tokens": CURVE[: len(prices)]} | values


def own_options(mechanism: Mechanism) -> list[dict[str, Any]]:
    """The options of a mechanism: name, type, description, default, and the value used for its picture."""
    fields = {field.name: field for field in dataclasses.fields(mechanism.Config)}
    found = []
    for name, default in option_fields(mechanism).items():
        kind = fields[name].type
        shown = None if default is dataclasses.MISSING else default
        found.append(
            {
                "name": name,
                "type": kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind)),
                "description": fields[name].metadata.get("help", ""),
                "default": shown,
                "required": default is dataclasses.MISSING,
                "sketch": mechanism.sketch.get(name),
            }
        )
    return found


def equation_lines(equation: str) -> list[str]:
    r"""The equation as MathML, one element per part separated by `\quad`; empty if it cannot be converted."""
    parts = [part for part in re.split(r",?\s*\\q?quad\s*", equation) if part.strip()]
    try:
        return [convert(part, display="block") for part in parts]
    except Exception:  # noqa: BLE001 - equations of plugins are anything; the page shows the LaTeX then
        return []


def whole(body: Mapping[str, Any], field: str) -> int | None:
    """An integer size from a request body, or its default; raises `InvalidValue`."""
    value, most = body.get(field, DEFAULTS[field]), MOST[field]
    if value is None and DEFAULTS[field] is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise InvalidValue.of(field, value, f"a whole number from 1 to {most}")
    return value


def _require_small(field: str, value: Any) -> None:
    """Raise `InvalidValue` for a number, at any depth, that is too large for building a layer quickly."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            _require_small(field, each)
    elif isinstance(value, int | float) and not abs(value) <= MOST_OPTION:
        raise InvalidValue.of(field, value, f"a number of at most {MOST_OPTION} here")
