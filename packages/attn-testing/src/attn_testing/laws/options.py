"""Laws of a mechanism's own options: odd values are refused or work, and every option has an effect."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from attn_core import Capability, Mechanism, Rotary, Shape, Step, configure
from attn_core.errors import UserError
from attn_core.options import option_fields

from attn_testing.law import LawBroken, MechanismLaw, require, seeded
from attn_testing.laws.declarations import SLIGHT
from attn_testing.laws.passes import after_update, auxiliary_loss
from attn_testing.subject import Case, Refusal, Setting, Subject

ROTARY = Rotary()
PASSES = 3

ODD_VALUES: tuple[Any, ...] = (-1, 0, 1.5, -0.5, True, "word", None, float("nan"), float("inf"), (), (0,), {})
"""Values that a user may give by mistake; some are valid for some options."""
TOKENS = 12
SMALL = 2
"""A size at which options act among few tokens, where the given one is meant for thousands."""


class Options(MechanismLaw):
    """An option is refused with an error that names it, or accepted and used: no other error, no NaN."""

    def test_an_odd_option_is_refused_by_name_or_computed_with(self, subject: Subject) -> None:
        for name in option_fields(subject.mechanism):
            for value in ODD_VALUES:
                options = {**subject.options, name: value}
                require_answer(subject.mechanism, name, options, subject.settings[0])


def require_answer(mechanism: Mechanism, name: str, options: dict[str, Any], setting: Setting) -> None:
    """Raise `LawBroken` if a layer with these options neither works nor is refused because of the option `name`.

    The mechanism accepts the `setting` with its usual options.
    """
    given = f"{name}={options[name]!r}"
    try:
        config = configure(mechanism, options, **{**setting, "max_seq_len": TOKENS})
        layer, rows = mechanism.build(config).eval(), torch.ones(1, TOKENS, config.hidden_size)
        with torch.no_grad():
            out = layer(rows, *((rows,) if config.cross else ()))
    except UserError as error:
        require(name in str(error), f"{given} is refused with an error that does not name it: {error}")
    except Exception as error:
        raise LawBroken(f"{given} raises {type(error).__name__}, not a UserError: {error}") from error
    else:
        require(bool(out.isfinite().all()), f"{given} is accepted, but outputs are not finite")


class EveryOptionActs(MechanismLaw):
    """Every option has another value that changes outputs, gradients, parameters, states, costs or training."""

    def test_every_option_changes_something_in_some_value(self, subject: Subject) -> None:
        for name, default in option_fields(subject.mechanism).items():
            present = subject.options.get(name, default)
            taken = []
            for value in other_values(subject, name, present):
                found = effect(subject, name, value)
                if found is None:
                    continue
                if found:
                    break
                taken.append(value)
            else:
                shown = ", ".join(map(repr, taken))
                sketch = subject.mechanism.sketch
                besides = [*([sketch] if sketch else []), *one_other(subject, name)]
                acts = not taken or any(effect(subject, name, value, beside) for beside in besides for value in taken)
                require(acts, f"option {name} accepts {shown} in place of {present!r}, but no value has an effect")


def other_values(subject: Subject, name: str, present: Any) -> Iterator[Any]:
    """Values that an option may accept, likely ones first: near the present one, then words in its refusal."""
    known: list[Any] = []
    if isinstance(present, bool):
        known = [not present]
    elif isinstance(present, int):
        known = [2 * present, present + 1, present // 2]
    elif isinstance(present, float):
        known = [2 * present, present / 2, (1 + present) / 2]
    refusal = subject.attempt({**subject.settings[0], **subject.modes[0]}, **{name: "no such word"})
    words = re.findall(r"[a-z][a-z0-9_]+", str(refusal.error)) if isinstance(refusal, Refusal) else []
    for value in (*known, *words, *(2, 3, 1, 0, 4, 0.5, 0.25, True, False), *((1, 0), (0, 1, 0, 1), (0,))):
        if value != present or isinstance(value, bool) != isinstance(present, bool):
            yield value


def one_other(subject: Subject, name: str) -> Iterator[dict[str, Any]]:
    """Each other option with another value, as some options only have an effect in combination, such as how to combine
    the results of several rounds."""
    for other, default in option_fields(subject.mechanism).items():
        present = subject.options.get(other, default)
        small = [SMALL] if isinstance(present, int) and not isinstance(present, bool) and present > SMALL else []
        for value in (*small, *other_values(subject, other, present)) if other != name else ():
            if isinstance(subject.attempt({**subject.settings[0], **subject.modes[0]}, **{other: value}), Case):
                yield {other: value}
                if value not in small:
                    break


def effect(subject: Subject, name: str, value: Any, beside: Mapping[str, Any] = MappingProxyType({})) -> bool | None:
    """Whether this value of an option changes anything, in combination with `beside`; None if it is refused."""
    tried = False
    for setting in ({}, {"rotary": ROTARY}) if subject.mechanism.can(Capability.ROTARY) else ({},):
        for mode in subject.modes:
            usual = {**subject.settings[0], **mode, **setting, "max_seq_len": subject.context}
            given, without = subject.attempt(usual, **{**beside, name: value}), subject.attempt(usual, **beside)
            if isinstance(given, Case) and isinstance(without, Case):
                tried = True
                if changed(given, without):
                    return True
    return False if tried else None


def changed(one: Case, other: Case) -> bool:
    """Whether two layers differ in anything observable."""
    if declared(one) != declared(other):
        return True
    return any(
        ours.shape != theirs.shape or bool((ours - theirs).abs().max() > SLIGHT)
        for ours, theirs in zip(observed(one), observed(other), strict=True)
    )


def declared(case: Case) -> list[Any]:
    """The parameter shapes, states and costs of a layer."""
    mechanism, config = case.mechanism, case.config
    sizes = [(name, tuple(weight.shape)) for name, weight in case.layer.named_parameters()]
    calls: list[Shape | Step] = [Shape(query=case.tokens, key=case.tokens)]
    calls += [Step(remembered=case.tokens, source=case.tokens)] if case.causal or case.cross else []
    return [sizes, mechanism.state(config), *(mechanism.cost(config, call) for call in calls)]


def observed(case: Case) -> list[torch.Tensor]:
    """The outputs before training, in the last of `PASSES` training passes and after it, the gradients of that pass,
    and the layer's auxiliary loss (`take_auxiliary_loss`) or 0."""
    rows, source, layer = case.rows(2, case.tokens), case.source(2, case.tokens), case.build()
    with torch.no_grad():
        before = case.attend(rows, source, None, layer)
    with seeded(3):
        layer.train()
        out = before
        for _ in range(PASSES):
            out = case.attend(rows, source, None, layer)
            after_update(layer)
    learned = list(layer.parameters())
    probe = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    gradients = torch.autograd.grad((out * probe).sum(), learned, materialize_grads=True) if out.requires_grad else ()
    own = torch.as_tensor(auxiliary_loss(layer)).detach()
    with torch.no_grad():
        return [before, own, out.detach(), case.attend(rows, source, None, layer.eval()), *gradients]
