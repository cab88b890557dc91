"""The law of layers that use the keys and values of another layer."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from attn_core import Capability, Fields, Shape
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from attn_testing.law import MechanismLaw, require, require_same
from attn_testing.laws.decoding import silent_where_nothing_decodes
from attn_testing.memory import DictionaryStore
from attn_testing.serving import ragged
from attn_testing.subject import Case

TOKENS = 9
CHUNKS = (4, 1, 3, 1)
LAYER = "layer"


class KVSharing(MechanismLaw):
    """A layer that attends to what its double lends gives what the double gives; it has and remembers no keys."""

    needs: ClassVar[tuple[Capability, ...]] = (Capability.BORROWS,)
    cases_at_most = 4

    def test_a_layer_that_borrows_from_its_double_equals_it(self, case: Case) -> None:
        rows, borrower = case.rows(2, TOKENS), borrowing(case)
        with torch.no_grad():
            lent: Fields = case.layer.lend(rows)
            found, expected = borrower(rows, borrowed=lent), case.attend(rows)
            require_same(found, expected, "a layer that borrows and its double", case.tolerance)
            own = case.layer(rows, borrowed=lent)
            require_same(own, expected, "a layer given what it lends, and given nothing", case.tolerance)
            if case.mechanism.can(Capability.WEIGHTS):
                weights = borrower.weights(rows, borrowed=lent)
                require_same(weights, case.weights(rows), "weights of a layer that borrows and of its double", 1e-10)

    def test_gradients_reach_the_layer_that_lends(self, case: Case) -> None:
        lender, rows = case.build(), case.rows(1, TOKENS)
        borrowing(case)(rows, borrowed=lender.lend(rows)).square().sum().backward()
        moved = [name for name, weight in lender.named_parameters() if weight.grad is not None and weight.grad.any()]
        require(moved, "no weight of the layer that lends gets a gradient from the one that borrows")

    def test_steps_over_the_states_of_the_double_give_what_the_double_gives(self, case: Case) -> None:
        if silent_where_nothing_decodes(case):
            return
        require(not case.mechanism.state(config_of(case)), "a layer that borrows says that it remembers something")
        borrower, store = borrowing(case), DictionaryStore({LAYER: case.specs})
        rows = {name: case.rows(TOKENS, seed=40 + name) for name in range(2)}
        for name in rows:
            store.admit(name)
        got: list[Tensor] = []
        done = 0
        for length in CHUNKS:
            batch = ragged([length] * 2, [done] * 2)
            new = torch.cat([one[done : done + length] for one in rows.values()])
            view = store.view(batch, list(rows))[LAYER]
            with torch.no_grad():
                case.layer.step(new, batch, view)
                got.append(borrower.step(new, batch, view).unflatten(0, (2, length)))
            done += length
        with torch.no_grad():
            expected = torch.stack([case.attend(one[None])[0] for one in rows.values()])
        require_same(torch.cat(got, dim=1), expected, "steps that borrow, and the double", case.tolerance)

    def test_it_costs_what_it_computes_without_keys_and_values(self, case: Case) -> None:
        borrower, rows = borrowing(case), case.rows(1, TOKENS)
        if hasattr(borrower, "use_kernel"):
            borrower.use_kernel("plain")
        said = case.mechanism.cost(config_of(case), Shape(query=TOKENS, key=TOKENS))
        with torch.no_grad():
            lent = case.layer.lend(rows)
            with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
                borrower(rows, borrowed=lent)
        counted = int(counter.get_total_flops())
        require(said.flops == counted, f"{said.flops} FLOPs are declared for a layer that borrows, {counted} counted")
        has = sum(weight.numel() for weight in borrower.parameters())
        require(said.parameters == has, f"{said.parameters} parameters are declared, a layer that borrows has {has}")


def config_of(case: Case) -> Any:
    """The config of a layer that borrows."""
    return dataclasses.replace(case.config, shares_kv=True)


def borrowing(case: Case) -> Any:
    """A layer that borrows, with the weights of the case's own."""
    layer = case.mechanism.build(config_of(case)).double().eval()
    weights = case.layer.state_dict()
    layer.load_state_dict({name: weights[name] for name in layer.state_dict()})
    return layer
