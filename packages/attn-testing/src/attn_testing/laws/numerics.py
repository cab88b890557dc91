"""Laws of the module itself: gradients, dtypes, state dict, torch.compile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from attn_core import Capability
from attn_core.masks.base import Mask
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters
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

    def test_gradients_among_many_tokens_equal_a_difference(self, case: Case) -> None:
        layer, rows, source = case.build(), case.rows(1, case.tokens), case.source(1, case.tokens)
        inputs = [given for given in (rows, source) if given is not None]
        weights = dict(layer.named_parameters())
        generator = torch.Generator().manual_seed(8)

        def drawn(shape: torch.Size) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        along = [drawn(value.shape) for value in (*inputs, *weights.values())]
        probe = drawn(rows.shape)

        def compute(size: float) -> Tensor:
            moved = [value + size * way for value, way in zip((*inputs, *weights.values()), along, strict=True)]
            given = dict(zip(weights, moved[len(inputs) :], strict=True))
            out: Tensor = functional_call(layer, given, tuple(moved[: len(inputs)]))
            return (out * probe).sum()

        values = [*(value.requires_grad_() for value in inputs), *weights.values()]
        found = torch.autograd.grad(compute(0.0), values, materialize_grads=True)
        slope = sum(((gradient * way).sum() for gradient, way in zip(found, along, strict=True)), torch.zeros(()))
        with torch.no_grad():
            difference = (compute(STEP) - compute(-STEP)) / (2 * STEP)
        require_same(slope, difference, f"the slope by gradients among {case.tokens} tokens and by a difference", 1e-4)

    def test_gradients_in_training_are_those_of_evaluation(self, case: Case) -> None:
        rows, source = case.rows(2, 9), case.source(2, 9)
        with torch.no_grad():
            drawn = [in_mode(case, rows, source, training=True, seed=seed) for seed in (3, 4)]
            plain = case.attend(rows, source)
        if not all(bool(((one - plain).abs() <= 1e-9).all()) for one in drawn):
            return
        found = []
        for training in (True, False):
            layer = case.build().train(training)
            given = [rows.clone().requires_grad_(), *layer.parameters()]
            out = case.attend(given[0], source, None, layer)
            if training and getattr(layer, "take_auxiliary_loss", lambda: None)() is not None:
                return
            probe = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
            found.append(torch.autograd.grad((out * probe).sum(), given, materialize_grads=True))
        for place, (ours, theirs) in enumerate(zip(*found, strict=True)):
            # What the outputs do not depend on may be trained by a loss of the layer's own.
            if theirs.any():
                require_same(ours, theirs, f"gradient {place} in training and in evaluation", 1e-9)


STEP = 1e-6
"""The length of the step by which a slope is measured."""


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

    def test_float32_is_kept_among_many_tokens(self, case: Case) -> None:
        if case.mechanism.can(Capability.CHOOSES):
            return
        layer, exact = case.build(dtype=torch.float32), case.build(dtype=torch.float32).double()
        query, source = case.rows(1, case.tokens).float(), case.source(1, case.tokens)
        with torch.no_grad():
            out = case.attend(query, None if source is None else source.float(), None, layer)
            memory = None if source is None else source.float().double()
            expected = case.attend(query.double(), memory, None, exact)
        require_same(out.double(), expected, f"float32 and float64 among {case.tokens} tokens", 1e-4)


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


SIZES, MOST_CAPTURES = ((7, 17, 19), (11, 23, 29), (13, 31, 37)), 2
"""Batch sizes, lengths and source lengths, and for how many of them a graph may be captured: two, as sequences that fit
into a window may be computed otherwise.

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
    """`torch.compile(fullgraph=True)` captures the layer at most twice for all lengths, and its outputs stay the same.

    A loop over the tokens is captured once for every length; it is tested with shorter sequences, to save time.
    `backend` is that of torch.compile; "eager" captures the graph as every backend does, and needs no C++ compiler.
    """

    cases_at_most = 2
    backend: ClassVar[str] = "eager"

    @classmethod
    def parts(cls, case: Case) -> frozenset[object]:
        """The layer's class, and the classes of the parts of its spec or what distinguishes its recurrence."""
        if case.refusal is not None:
            return frozenset()
        mechanism, config = case.mechanism, case.config
        spec, recurrence = mechanism.spec(config), mechanism.recurrence(config)
        used: list[object] = [type(case.layer), "cross" if case.cross else "self"]
        used += [] if recurrence is None else [(recurrence.decay, recurrence.delta_rule)]
        if spec is not None:
            used += [] if case.has_shared_layer else [mechanism.name]
            used += [*masks_of(spec.mask), *map(type, spec.parts.values()), type(spec.norm), type(spec.rotary)]
        return frozenset(used)

    def test_the_layer_compiles_without_a_graph_break_and_gives_the_same(self, case: Case) -> None:
        layer = case.build()
        torch.compiler.reset()
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=self.backend)
        loops, captured = case.mechanism.sequential, []
        for batch, length, keys in SHORT if loops else SIZES:
            query, source = case.rows(batch, length), case.source(batch, keys)
            before = graphs()
            try:
                out = case.attend(query, source, None, compiled)
            except (TorchDynamoException, RuntimeError) as error:
                raise LawBroken(f"batch {batch}, length {length}: {str(error).strip()}") from error
            require_same(
                out,
                case.attend(query, source),
                f"outputs of the compiled and the plain layer, batch {batch}, length {length},",
                1e-10,
            )
            captured += [length] if graphs() > before else []
        require(loops or len(captured) <= MOST_CAPTURES, f"graphs are captured for each of the lengths {captured}")


def graphs() -> int:
    """The number of graphs that torch.compile has captured."""
    return int(counters["stats"]["unique_graphs"])
