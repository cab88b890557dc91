"""The law of tensor parallelism: a layer whose heads are split over ranks equals the sum of the ranks' layers."""

from __future__ import annotations

from typing import Any

import torch
from attn_core.errors import Incompatible, MechanismInvalid, UserError
from attn_core.splitting import ParameterSplit, Rank, rank_config, rank_layer, require_split
from attn_core.states import state_bytes
from torch import Tensor

from attn_testing.law import MechanismLaw, require, require_same
from attn_testing.laws.decoding import silent_where_nothing_decodes
from attn_testing.serving import Serving
from attn_testing.subject import Case, Subject

RANKS = 2
TOKENS = 11
CLOSE = 1e-12


class HeadSplit(MechanismLaw):
    """The sum of two layers with half the heads each has the outputs and gradients of the whole layer.

    If a mechanism does not declare `splits_heads`, a split is refused with an error that names it.
    """

    @classmethod
    def silent_on(cls, case: Any) -> str | None:
        """The reason for heads that cannot be divided over two ranks, and for mechanisms that refuse."""
        try:
            require_split(case.mechanism, case.config, RANKS)
            case.mechanism.build(rank_config(case.mechanism, case.config, Rank(0, RANKS)))
        except MechanismInvalid:
            return None
        except UserError as error:
            return error.message
        return None

    def test_ranks_together_give_the_outputs_and_gradients_of_the_whole(self, case: Case) -> None:
        """The sum over the ranks equals the whole layer, also with a source if the layer takes one."""
        whole = case.build()
        query, source = case.rows(2, TOKENS).requires_grad_(), case.source(2, TOKENS + 2)
        expected = case.attend(query, source, layer=whole)
        upstream = torch.randn_like(expected)
        inputs = torch.autograd.grad(expected, query, upstream, retain_graph=True)[0]
        expected.backward(upstream)
        parts = [rank_layer(whole, Rank(rank, RANKS)) for rank in range(RANKS)]
        outs = [case.attend(query, source, layer=part) for part, _ in parts]
        require_same(
            sum(outs[1:], start=outs[0]), expected, "outputs summed over the ranks and of the whole layer", CLOSE
        )
        given = [torch.autograd.grad(out, query, upstream, retain_graph=True)[0] for out in outs]
        require_same(
            sum(given[1:], start=given[0]),
            inputs,
            "input gradients summed over the ranks and of the whole layer",
            CLOSE,
        )
        for out in outs:
            out.backward(upstream)
        for name, parameter in whole.named_parameters():
            got = gathered_gradient([(part.get_parameter(name), splits[name]) for part, splits in parts])
            wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            require_same(got, wanted, f"gradients of {name} gathered from the ranks and of the whole layer", CLOSE)

    def test_steps_of_ranks_together_are_steps_of_the_whole(self, case: Case) -> None:
        """Ranks that decode with the states of only their own heads sum up to the whole layer."""
        if silent_where_nothing_decodes(case):
            return
        rows, source, whole = case.rows(TOKENS), case.source(5), case.build()
        expected, total = stepped(case, whole, rows, source), torch.zeros_like(rows)
        for rank in range(RANKS):
            config = rank_config(case.mechanism, case.config, Rank(rank, RANKS))
            own = Case(case.mechanism, config, case.setting, case.label, case.tokens)
            total = total + stepped(own, rank_layer(whole, Rank(rank, RANKS))[0], rows, source)
            held, all_held = (
                state_bytes(specs, tokens=9, source=5, dtype="float64") for specs in (own.specs, case.specs)
            )
            require(
                held <= all_held, f"the states of a rank take {held} bytes, more than the {all_held} of the whole layer"
            )
        require_same(total, expected, "outputs of steps summed over the ranks and of the whole layer", case.tolerance)

    def test_what_is_not_declared_is_refused_by_name(self, subject: Subject) -> None:
        """A mechanism that does not declare `splits_heads` refuses a split instead of computing wrong results."""
        if subject.mechanism.splits_heads:
            return
        for case in subject.cases:
            refusal = ""
            try:
                rank_layer(case.layer, Rank(0, RANKS))
            except Incompatible as error:
                refusal = error.message
            require(
                repr(subject.mechanism.name) in refusal,
                f"a split is not refused with an error that names the mechanism, but with {refusal!r}",
            )


def stepped(case: Case, layer: Any, rows: Tensor, source: Tensor | None) -> Tensor:
    """The outputs [tokens, width] of one request: a prompt, then tokens one by one."""
    serving, prompt = Serving(case, layer=layer), len(rows) - 3
    serving.open(0, source)
    out = [serving.step({0: rows[:prompt]})[0]]
    out += [serving.step({0: rows[at : at + 1]})[0] for at in range(prompt, len(rows))]
    return torch.cat(out)


def gathered_gradient(parts: list[tuple[Any, ParameterSplit]]) -> Tensor:
    """The gradient of a whole parameter, assembled from those of its part and `ParameterSplit` on each rank."""
    split = parts[0][1]
    grads = [torch.zeros_like(part) if part.grad is None else part.grad for part, _ in parts]
    if split.once:
        return grads[0]
    if split.axis is None:
        return sum(grads[1:], start=grads[0])
    total = torch.zeros_like(split.whole(grads))
    for rank, grad in enumerate(grads):
        total.index_add_(split.axis, torch.tensor(split.indices(Rank(rank, len(grads)))), grad)
    return total
