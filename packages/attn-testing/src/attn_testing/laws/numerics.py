"""Laws of the module itself: gradients, dtypes, state dict, torch.compile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import ClassVar

import torch
from attn_core import Capability
from attn_core.declared import DeclaredMechanism
from attn_core.masks.base import Mask
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch.autograd.gradcheck import GradcheckError, gradcheck
from torch.func import functional_call

from attn_testing.law import LawBroken, MechanismLaw, require, require_same
from attn_testing.subject import Case, in_mode


class Gradients(MechanismLaw):
    """In float64, gradients to inputs and weights equal finite differences."""

    def test_gradients_equal_finite_differences(self, case: Case) -> None:
        query, source = case.rows(1, 3), case.source(1, 3)
        layer = case.build()
        names = [name for name, _ in layer.named_parameters()]
        inputs = [query] if source is None else [query, source]
        values = [*inputs, *(weight.detach() for _, weight in layer.named_parameters())]

        def compute(*tensors: Tensor) -> Tensor:
            weights = dict(zip(names, tensors[len(inputs) :], strict=True))
            out: Tensor = functional_call(layer, weights, tensors[: len(inputs)])
            return out

        try:
            gradcheck(compute, [value.clone().requires_grad_() for value in values], fast_mode=True)
        except GradcheckError as error:
            raise LawBroken(str(error).strip()) from error


class Training(MechanismLaw):
    """In training, outputs and gradients are finite; without randomness, outputs equal those of evaluation."""

    cases_at_most = 4

    def test_training_is_finite_and_without_draws_the_same_as_evaluation(self, case: Case) -> None:
        rows, source = case.rows(2, case.tokens).requires_grad_(), case.source(2, case.tokens)
        once, again = (in_mode(case, rows, source, training=True, seed=seed) for seed in (3, 4))
        require(bool(torch.isfinite(once).all()), "an output in training is not finite")
        if once.requires_grad:
            (gradient,) = torch.autograd.grad(once.square().sum(), rows, materialize_grads=True)
            require(bool(torch.isfinite(gradient).all()), "a gradient in training is not finite")
        if torch.equal(once, again):
            with torch.no_grad():
                require_same(once, case.attend(rows, source), "outputs in training and in evaluation", 1e-9)


TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-1}
MIN_EQUAL_ROWS = 0.7
"""The share of rows that rounding must not change if a mechanism chooses keys by comparing values."""


class Precision(MechanismLaw):
    """A float32 or bfloat16 layer returns outputs in that dtype, close to those in float64."""

    cases_at_most = 4

    def test_fewer_bits_give_nearly_the_same_in_their_own_type(self, case: Case) -> None:
        for dtype, tolerance in TOLERANCES.items():
            layer = case.build(dtype=dtype)
            exact = case.build(dtype=dtype).double()
            query, source = case.rows(2, 6).to(dtype), case.source(2, 5)
            source = None if source is None else source.to(dtype)
            with torch.no_grad():
                out = case.attend(query, source, None, layer)
                expected = case.attend(query.double(), None if source is None else source.double(), None, exact)
            require(out.dtype == dtype, f"a {dtype} layer returns outputs in {out.dtype}")
            if case.mechanism.can(Capability.CHOOSES):
                require_mostly_same(out.double(), expected, f"{dtype} and float64", tolerance)
            else:
                require_same(out.double(), expected, f"{dtype} and float64", tolerance)


def require_mostly_same(found: Tensor, expected: Tensor, what: str, tolerance: float) -> None:
    """Raise `LawBroken` unless all outputs [..., width] are finite and at least `MIN_EQUAL_ROWS` of rows are equal."""
    require(bool(torch.isfinite(found).all()), f"{what}: an output is not finite")
    error = (found - expected).abs() / (1 + expected.abs())
    equal = (error.amax(-1) <= tolerance).double().mean().item()
    require(equal >= MIN_EQUAL_ROWS, f"{what} differ in {1 - equal:.0%} of the rows (allowed {1 - MIN_EQUAL_ROWS:.0%})")


class SavedAndLoaded(MechanismLaw):
    """A new layer that loads the state dict of another one gives the same outputs."""

    cases_at_most = 2

    def test_a_layer_that_loads_the_state_of_another_computes_the_same(self, case: Case) -> None:
        one, other = case.build(seed=0), case.build(seed=1)
        other.load_state_dict(one.state_dict())
        query, source = case.rows(2, 6), case.source(2, 5)
        with torch.no_grad():
            loaded, saved = case.attend(query, source, None, other), case.attend(query, source, None, one)
        require_same(loaded, saved, "outputs of the loaded layer and of the saved one", 1e-12)


SIZES = ((7, 17, 19), (11, 23, 29))
"""Batch sizes, lengths and source lengths; the second set must reuse the graph that was captured with the first.

torch.compile would identify a size with an equal one, such as the width, so these are distinct primes.
"""

SHORT = ((2, 3, 5), (3, 5, 7))
"""Like `SIZES`, for mechanisms that loop over the tokens."""


def masks_of(mask: Mask) -> Iterator[type[Mask]]:
    """The class of a mask and those of the masks that it combines."""
    yield type(mask)
    for value in vars(mask).values():
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, Mask):
                yield from masks_of(part)


class Compiles(MechanismLaw):
    """`torch.compile(fullgraph=True)` captures the layer once for all lengths, and its outputs stay the same.

    A loop over the tokens is captured once for every length; it is tested with shorter sequences, to save time.
    `backend` is that of torch.compile; "eager" captures the graph as every backend does, and needs no C++ compiler.
    """

    cases_at_most = 2
    backend: ClassVar[str] = "eager"

    @classmethod
    def parts(cls, case: Case) -> frozenset[object]:
        """The layer's class, and the classes of the parts of its spec; of a mechanism that has no spec its name."""
        mechanism, config = case.mechanism, case.config
        used: list[object] = [type(case.layer), "cross" if case.cross else "self"]
        if not isinstance(mechanism, DeclaredMechanism):
            return frozenset([*used, mechanism.name])
        spec = mechanism.spec(config)
        grouped = "grouped" if spec.heads.key_value < spec.heads.query else "own"
        used += [*masks_of(spec.mask), *map(type, spec.parts.values())]
        return frozenset([*used, grouped, type(spec.norm), type(spec.rotary)])

    def test_the_layer_compiles_without_a_graph_break_and_gives_the_same(self, case: Case) -> None:
        layer = case.build()
        torch.compiler.reset()
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=self.backend)
        loops = case.mechanism.sequential
        for time, (batch, length, keys) in enumerate(SHORT if loops else SIZES):
            query, source = case.rows(batch, length), case.source(batch, keys)
            try:
                once = time > 0 and not loops
                with torch.compiler.set_stance("fail_on_recompile") if once else nullcontext():
                    out = case.attend(query, source, None, compiled)
            except (TorchDynamoException, RuntimeError) as error:
                raise LawBroken(f"batch {batch}, length {length}: {str(error).strip()}") from error
            require_same(
                out,
                case.attend(query, source),
                f"outputs of the compiled and the plain layer, batch {batch}, length {length},",
                1e-10,
            )
