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

TOKENS = 33
CHUNKS = (4, 1, 27, 1)
LAYER = "layer"


class KVSharing(MechanismLaw):
    """A layer that takes keys and values from an identical layer equals it, and has no weights or states for them."""

    needs: ClassVar[tuple[Capability, ...]] = (Capability.SHARES_KV,)
    cases_at_most = 4

    @classmethod
    def silent_on(cls, case: Case) -> str | None:
        return "it attends to a source" if case.cross else None

    def test_a_layer_that_borrows_from_its_double_equals_it(self, case: Case) -> None:
        rows, sharing_layer = case.rows(2, TOKENS), kv_sharing(case)
        with torch.no_grad():
            lent: Fields = case.layer.project_kv(rows)
            found, expected = sharing_layer(rows, shared_kv=lent), case.attend(rows)
            require_same(found, expected, "outputs of a layer with shares_kv and of the source layer", case.tolerance)
            own = case.layer(rows, shared_kv=lent)
            require_same(
                own,
                expected,
                "outputs of a layer with its own keys and values as shared_kv and without",
                case.tolerance,
            )
            if case.mechanism.can(Capability.WEIGHTS):
                weights = sharing_layer.weights(rows, shared_kv=lent)
                require_same(
                    weights, case.weights(rows), "weights of a layer with shares_kv and of the source layer", 1e-10
                )

    def test_gradients_reach_the_layer_that_lends(self, case: Case) -> None:
        source_layer, rows = case.build(), case.rows(1, TOKENS)
        kv_sharing(case)(rows, shared_kv=source_layer.project_kv(rows)).square().sum().backward()
        moved = [
            name for name, weight in source_layer.named_parameters() if weight.grad is not None and weight.grad.any()
        ]
        require(moved, "no parameter of the source layer gets a gradient from the layer with shares_kv")

    def test_steps_over_the_states_of_the_double_give_what_the_double_gives(self, case: Case) -> None:
        if silent_where_nothing_decodes(case):
            return
        require(not case.mechanism.state(config_of(case)), "a layer with shares_kv declares states of its own")
        sharing_layer, store = kv_sharing(case), DictionaryStore({LAYER: case.specs})
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
                got.append(sharing_layer.step(new, batch, view).unflatten(0, (2, length)))
            done += length
        with torch.no_grad():
            expected = torch.stack([case.attend(one[None])[0] for one in rows.values()])
        require_same(
            torch.cat(got, dim=1), expected, "outputs of steps with shares_kv and of the source layer", case.tolerance
        )

    def test_it_costs_what_it_computes_without_keys_and_values(self, case: Case) -> None:
        sharing_layer, rows = kv_sharing(case), case.rows(1, TOKENS)
        if hasattr(sharing_layer, "use_kernel"):
            sharing_layer.use_kernel("plain")
        declared = case.mechanism.cost(config_of(case), Shape(query=TOKENS, key=TOKENS))
        with torch.no_grad():
            lent = case.layer.project_kv(rows)
            with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
                sharing_layer(rows, shared_kv=lent)
        counted = int(counter.get_total_flops())
        require(
            declared.flops == counted,
            f"{declared.flops} FLOPs are declared for a layer with shares_kv, {counted} counted",
        )
        has = sum(weight.numel() for weight in sharing_layer.parameters())
        require(
            declared.parameters == has,
            f"{declared.parameters} parameters are declared, a layer with shares_kv has {has}",
        )


def config_of(case: Case) -> Any:
    """The config of a layer with shares_kv."""
    return dataclasses.replace(case.config, shares_kv=True)


def kv_sharing(case: Case) -> Any:
    """A layer with shares_kv that has the same weights as the case's layer."""
    layer = case.mechanism.build(config_of(case)).double().eval()
    weights = case.layer.state_dict()
    layer.load_state_dict({name: weights[name] for name in layer.state_dict()})
    return layer
