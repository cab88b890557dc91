"""Laws of what a mechanism declares: description, configs, capabilities."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
from attn_core import Capability, Paper, Rotary, configure
from attn_core.errors import UnknownName, UserError

from attn_testing.latex import latex_error
from attn_testing.law import LawBroken, MechanismLaw, require, require_same
from attn_testing.subject import Case, Subject

TOKENS = 12


class Described(MechanismLaw):
    """A mechanism has a name, a one-line summary, an equation, a paper and a sketch, and refuses unknown options."""

    def test_a_mechanism_says_what_it_is(self, subject: Subject) -> None:
        mechanism = subject.mechanism
        name = getattr(mechanism, "name", "")
        require(
            re.fullmatch(r"[a-z][a-z0-9_]*", name),
            f"name {name!r} does not consist of lower-case letters, digits and underscores",
        )
        summary = getattr(mechanism, "summary", "")
        require(summary.strip() and "\n" not in summary, f"summary {summary!r} is not one line")
        equation = getattr(mechanism, "equation", "")
        require(equation.strip(), "there is no equation")
        wrong = latex_error(equation)
        require(wrong is None, f"the equation {equation!r} is not valid LaTeX: {wrong}")
        require(isinstance(getattr(mechanism, "paper", None), Paper), "there is no paper")
        unknown = set(mechanism.capabilities) - set(Capability)
        require(not unknown, f"capabilities {unknown} are not among {', '.join(Capability)}")

    def test_a_layer_of_its_sketch_attends(self, subject: Subject) -> None:
        mechanism = subject.mechanism
        config = configure(mechanism, mechanism.sketch, hidden_size=16, num_heads=2, max_seq_len=TOKENS)
        rows = torch.randn(1, TOKENS, 16)
        source = (rows,) if config.cross else ()
        with torch.no_grad():
            out = mechanism.build(config).eval()(rows, *source)
        require(
            out.shape == rows.shape,
            f"with the options {dict(mechanism.sketch)} of sketch the output has shape {tuple(out.shape)}",
        )

    def test_an_unknown_option_is_refused(self, subject: Subject) -> None:
        try:
            configure(subject.mechanism, {"no_such_option": 1}, hidden_size=16)
        except UnknownName:
            return
        raise LawBroken("an option that does not exist is accepted")


DOCUMENTS = (5, 7)


class Abilities(MechanismLaw):
    """A layer has the abilities that its attributes declare, and no others."""

    @classmethod
    def silent_on(cls, case: Case) -> str | None:
        return "it attends to a source" if case.cross else None

    def test_it_takes_lengths_where_it_declares_that_and_computes_each_document_alone(self, case: Case) -> None:
        rows = case.rows(1, sum(DOCUMENTS))
        with torch.no_grad():
            together = taken(case, rows, lengths=DOCUMENTS)
            require((together is not None) == case.layer.takes_lengths, f"takes_lengths is {case.layer.takes_lengths}")
            if together is not None:
                alone = [case.attend(document) for document in torch.split(rows, list(DOCUMENTS), dim=1)]
                require_same(together, torch.cat(alone, dim=1), "outputs with lengths and of each document", 1e-9)

    def test_it_takes_global_tokens_where_it_declares_that(self, case: Case) -> None:
        rows = case.rows(1, TOKENS)
        with torch.no_grad():
            found = taken(case, rows, global_tokens=torch.zeros(1, TOKENS, dtype=torch.bool))
        declared = case.layer.takes_global_tokens
        require((found is not None) == declared, f"takes_global_tokens is {declared}")

    def test_it_takes_parses_where_it_declares_that(self, case: Case) -> None:
        chain = torch.arange(TOKENS)[None] - 1
        with torch.no_grad():
            found = taken(case, case.rows(1, TOKENS), parses=chain)
        declared = case.layer.takes_parses
        require((found is not None) == declared, f"takes_parses is {declared}")

    def test_it_splits_tokens_where_it_declares_that(self, case: Case) -> None:
        if case.layer.splits_tokens:
            try:
                case.layer.require_token_split(2 * TOKENS, 2)
            except UserError as error:
                require(str(error), "a split by tokens is refused without a reason")


def taken(case: Case, rows: torch.Tensor, **given: Any) -> torch.Tensor | None:
    """The outputs of a layer called with further arguments; None where its `forward` has none of these names."""
    try:
        out: torch.Tensor = case.layer(rows, **given)
    except TypeError:
        return None
    return out


REQUIRED_FIELDS = {Capability.GROUPED: "num_kv_heads", Capability.ROTARY: "rotary"}
"""Capabilities with the config field that a mechanism must then accept, in at least one setting."""

SLIGHT = 1e-9
"""Differences above this are not due to rounding."""

ADDED = ("max_seq_len", "causal", "cross")
"""The fields that the test kit adds to every setting."""


class Settings(MechanismLaw):
    """Declared capabilities work: causal and bidirectional attention, grouped heads, rotary positions."""

    def test_a_setting_is_taken_or_refused_with_an_error_for_users(self, subject: Subject) -> None:
        for refusal in subject.refusals:
            if not isinstance(refusal.error, UserError):
                raise LawBroken(
                    f"{refusal.label} raises {type(refusal.error).__name__}, not a UserError: {refusal.error}"
                )

    def test_the_first_setting_is_taken_in_every_declared_mode(self, subject: Subject) -> None:
        for refusal in subject.refusals:
            refused = {name: value for name, value in refusal.setting.items() if name not in ADDED}
            if refused == {name: value for name, value in subject.settings[0].items() if name not in ADDED}:
                raise LawBroken(f"{refusal.label} is refused: {refusal.error}") from refusal.error

    def test_a_declared_capability_is_taken_in_some_setting(self, subject: Subject) -> None:
        for capability, field in REQUIRED_FIELDS.items():
            refused = [refusal for refusal in subject.refusals if refusal.setting.get(field)]
            accepted = [case for case in subject.cases if case.setting.get(field)]
            if refused and not accepted:
                raise LawBroken(f"{capability.name} is declared, but {refused[0].label} is refused: {refused[0].error}")

    def test_a_field_that_is_taken_changes_the_layer(self, subject: Subject) -> None:
        usual = {**subject.settings[0], **subject.modes[0], "max_seq_len": subject.context}
        heads, rotary = usual.get("num_heads", 1), subject.mechanism.can(Capability.ROTARY)
        fields: dict[str, Any] = {"bias": True, "head_dim": 3 * (usual["hidden_size"] // heads)}
        fields |= {"num_kv_heads": 1} if subject.mechanism.can(Capability.GROUPED) and heads > 1 else {}
        fields |= {"rotary": Rotary(base=50.0)} if rotary else {}
        for field, value in fields.items():
            # Set explicitly, as the default of multi-query attention is one key/value head.
            default = {"num_kv_heads": heads, "bias": False}.get(field)
            settings = {**usual, field: default}, {**usual, field: value}
            # An option may override the field, such as the sizes of keys and values; then the field acts without it.
            plain = dataclasses.replace(subject, options={})
            effects = [differ(one, settings) for one in (subject, plain)]
            require(
                True in effects or False not in effects,
                f"{field}={value!r} is accepted, but has no effect on the layer",
            )

    def test_a_layer_keeps_the_shape_of_its_input(self, subject: Subject) -> None:
        for case in subject.cases:
            query = case.rows(2, 5)
            shape = tuple(case.attend(query, case.source(2, 4)).shape)
            require(
                shape == tuple(query.shape),
                f"{case.label}: the output has shape {shape}, the input {tuple(query.shape)}",
            )


def differ(subject: Subject, settings: tuple[dict[str, Any], dict[str, Any]]) -> bool | None:
    """Whether layers of two settings differ in parameters, or in outputs with equally drawn parameters; None if one
    setting is refused."""
    one, other = (subject.attempt(setting) for setting in settings)
    if not (isinstance(one, Case) and isinstance(other, Case)):
        return None
    sizes = [{name: weight.shape for name, weight in case.layer.named_parameters()} for case in (one, other)]
    if sizes[0] != sizes[1]:
        return True
    rows, source = one.rows(2, one.tokens), one.source(2, one.tokens)
    with torch.no_grad():
        return bool((one.attend(rows, source) - other.attend(rows, source)).abs().max() > SLIGHT)


class Undeclared(MechanismLaw):
    """Undeclared features are refused, never ignored: padding, sources, causality, grouping, shared_kv, dropout."""

    def test_what_is_not_declared_is_refused(self, subject: Subject) -> None:
        broken = []
        for feature in (
            self._a_mask_of_padded_keys_is_refused,
            self._a_source_is_refused,
            self._a_mode_that_is_not_declared_is_refused,
            self._weights_are_refused,
            self._grouped_heads_are_refused,
            self._rotary_positions_are_refused,
            self._biases_are_refused,
            self._heads_of_a_size_of_their_own_are_refused,
            self._borrowing_is_refused,
            self._dropping_weights_is_refused,
            self._a_mechanism_that_is_not_causal_refuses_to_be,
            self._a_mechanism_that_is_only_causal_refuses_not_to_be,
            self._weights_that_are_not_declared_normalised_are_not,
        ):
            try:
                feature(subject)
            except LawBroken as found:
                broken.append(str(found))
        require(not broken, "; ".join(broken))

    def _a_mask_of_padded_keys_is_refused(self, subject: Subject) -> None:
        if not subject.mechanism.can(Capability.PADDING):
            case = subject.cases[0]
            key_padding_mask = torch.tensor([[True, True, False]])
            source = case.source(1, 3)
            refuses(lambda: case.attend(case.rows(1, 3), source, key_padding_mask), "PADDING", "a mask of padded keys")

    def _a_source_is_refused(self, subject: Subject) -> None:
        case = next((case for case in subject.cases if not case.cross), None)
        if case is not None:
            rows = case.rows(1, 3)
            refuses(lambda: case.attend(rows, rows), "CROSS", "a source")

    def _a_mode_that_is_not_declared_is_refused(self, subject: Subject) -> None:
        if not subject.mechanism.can(Capability.CROSS):
            refuses(lambda: build(subject, cross=True, causal=False), "CROSS", "a config with cross=True")
        if subject.mechanism.only_cross:
            refuses(lambda: build(subject, cross=False), "CAUSAL or BIDIRECTIONAL", "a config with cross=False")

    def _weights_are_refused(self, subject: Subject) -> None:
        if not subject.mechanism.can(Capability.WEIGHTS):
            case = subject.cases[0]
            refuses(lambda: case.weights(case.rows(1, 3), case.source(1, 3)), "WEIGHTS", "a call for weights")

    def _grouped_heads_are_refused(self, subject: Subject) -> None:
        if not subject.mechanism.can(Capability.GROUPED):
            refuses(lambda: build(subject, num_kv_heads=2), "GROUPED", "fewer key/value heads than query heads")

    def _rotary_positions_are_refused(self, subject: Subject) -> None:
        if not subject.mechanism.can(Capability.ROTARY):
            refuses(lambda: build(subject, rotary=Rotary()), "ROTARY", "rotary positions")

    def _biases_are_refused(self, subject: Subject) -> None:
        if not subject.mechanism.can(Capability.BIAS):
            refuses(lambda: build(subject, bias=True), "BIAS", "biases")

    def _heads_of_a_size_of_their_own_are_refused(self, subject: Subject) -> None:
        if not subject.mechanism.can(Capability.HEAD_DIM):
            refuses(lambda: build(subject, head_dim=6), "HEAD_DIM", "head_dim")

    def _borrowing_is_refused(self, subject: Subject) -> None:
        if not subject.mechanism.can(Capability.SHARES_KV):
            refuses(lambda: build(subject, shares_kv=True), "SHARES_KV", "a config with shares_kv")

    def _dropping_weights_is_refused(self, subject: Subject) -> None:
        if not subject.mechanism.drops_weights:
            refuses(lambda: build(subject, dropout=0.5), "drops_weights", "a config with dropout")

    def _a_mechanism_that_is_not_causal_refuses_to_be(self, subject: Subject) -> None:
        can = subject.mechanism.can
        if not can(Capability.CAUSAL) and can(Capability.BIDIRECTIONAL):
            refuses(lambda: directed(subject, causal=True), "CAUSAL", "causal=True")

    def _a_mechanism_that_is_only_causal_refuses_not_to_be(self, subject: Subject) -> None:
        can = subject.mechanism.can
        if can(Capability.CAUSAL) and not can(Capability.BIDIRECTIONAL):
            refuses(lambda: directed(subject, causal=False), "BIDIRECTIONAL", "causal=False")

    def _weights_that_are_not_declared_normalised_are_not(self, subject: Subject) -> None:
        if subject.mechanism.can(Capability.WEIGHTS) and not subject.mechanism.can(Capability.NORMALISED):
            require(
                not all(normalised(case) for case in subject.cases),
                "all weights are non-negative and sum to one, but NORMALISED is not declared",
            )


def build(subject: Subject, **setting: Any) -> Any:
    """Build a layer with the first setting, changed by `setting`."""
    values = {
        "max_seq_len": subject.context,
        **subject.settings[0],
        **subject.modes[0],
        "num_heads": 4,
        "hidden_size": 16,
        **setting,
    }
    return subject.mechanism.build(configure(subject.mechanism, subject.options, **values))


def directed(subject: Subject, *, causal: bool) -> Any:
    """Build a layer with `causal` set in the config directly, as `configure` would refuse an undeclared value."""
    values = {
        "max_seq_len": subject.context,
        **subject.settings[0],
        **subject.modes[0],
        "num_heads": 4,
        "hidden_size": 16,
    }
    config = configure(subject.mechanism, subject.options, **values)
    return subject.mechanism.build(dataclasses.replace(config, causal=causal))


def refuses(call: Any, capability: str, what: str) -> None:
    """Raise `LawBroken` unless the call raises an error that refuses it."""
    try:
        call()
    except (UserError, TypeError, NotImplementedError, AttributeError):
        return
    raise LawBroken(f"{what} is accepted, but {capability} is not declared: declare it, or refuse with a UserError")


def normalised(case: Case) -> bool:
    """Whether the weights for one random input are non-negative and sum to one."""
    weights = case.weights(case.rows(1, 5), case.source(1, 5))
    return bool((weights >= 0).all()) and bool((weights.sum(-1) - 1).abs().max() < 1e-9)
