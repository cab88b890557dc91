"""The laws that are asked of foreign implementations; each is judged by numbers alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attn_testing.foreign_subject import Foreign
from attn_testing.law import Law, require, require_same

TOKENS = 11


class ForeignLaw(Law):
    """Base class of these laws, whose cases are `Foreign`."""


class SameTwice(ForeignLaw):
    """Two calls with the same inputs give the same bits, and leave the inputs as they were."""

    def test_two_calls_are_equal(self, case: Foreign) -> None:
        inputs = case.inputs(2, TOKENS)
        kept = [part.clone() for part in inputs]
        first, second = case.attend(inputs).clone(), case.attend(inputs)
        require(all(map(torch.equal, inputs, kept)), "the call changes its inputs")
        require(torch.equal(first, second), f"two calls differ by up to {(first - second).abs().max().item():g}")


class EachRequestAlone(ForeignLaw):
    """A sequence in a batch gives what it gives alone."""

    def test_a_batch_is_its_rows(self, case: Foreign) -> None:
        inputs = case.inputs(3, TOKENS)
        whole = case.attend(inputs)
        for row in range(3):
            alone = case.attend([part[row : row + 1] for part in inputs])
            require_same(whole[row : row + 1], alone, f"sequence {row} of a batch and alone", case.tolerance)


class Causality(ForeignLaw):
    """Changing later tokens, a little or a lot, changes no earlier output; changing earlier ones does."""

    @classmethod
    def excuse(cls, case: Foreign) -> str | None:
        return None if case.causal else "it is not causal"

    def test_later_tokens_are_not_read(self, case: Foreign) -> None:
        inputs, other = case.inputs(2, TOKENS), case.inputs(2, TOKENS, seed=3)
        before = case.attend(inputs)
        for first in (1, TOKENS // 2, TOKENS - 1):
            for size in (1.0, 1e3):
                changed = [
                    torch.cat(
                        [a.narrow(case.axis, 0, first), size * b.narrow(case.axis, first, TOKENS - first)], case.axis
                    )
                    for a, b in zip(inputs, other, strict=True)
                ]
                after = case.attend(changed).narrow(case.axis, 0, first)
                what = f"outputs before token {first} with other inputs from there on"
                require_same(after, before.narrow(case.axis, 0, first), what, case.tolerance)

    def test_earlier_tokens_are_read(self, case: Foreign) -> None:
        inputs, other, before = case.inputs(1, TOKENS), case.inputs(1, TOKENS, seed=3), TOKENS - 1
        changed = [
            torch.cat([b.narrow(case.axis, 0, before), a.narrow(case.axis, before, 1)], case.axis)
            for a, b in zip(inputs, other, strict=True)
        ]
        last = (case.attend(part).narrow(case.axis, TOKENS - 1, 1) for part in (inputs, changed))
        require(not torch.equal(*last), "the last output does not depend on earlier tokens")


class Padding(ForeignLaw):
    """Padding, before the tokens where causal, else after them, is not read: the outputs are those without it."""

    @classmethod
    def excuse(cls, case: Foreign) -> str | None:
        return None if case.pads else "no argument for padding is known"

    def test_padding_changes_nothing(self, case: Foreign) -> None:
        inputs, real = case.inputs(2, TOKENS), 7
        # No causal attention reads padding after its tokens.
        start = TOKENS - real if case.causal else 0
        padding = torch.ones(2, TOKENS, dtype=torch.bool)
        padding[0], padding[1, start : start + real] = False, False
        found = case.attend(inputs, padding)[1:2].narrow(case.axis, start, real)
        alone = case.attend([part[1:2] for part in case.some(inputs, start, start + real)])
        require_same(found, alone, "a padded sequence and the sequence alone", case.tolerance)


class NothingToRead(ForeignLaw):
    """A sequence whose tokens are all padding gives finite outputs and gradients."""

    @classmethod
    def excuse(cls, case: Foreign) -> str | None:
        return None if case.pads else "no argument for padding is known"

    def test_rows_without_keys_are_finite(self, case: Foreign) -> None:
        padding = torch.zeros(2, TOKENS, dtype=torch.bool)
        padding[1] = True
        inputs = case.inputs(2, TOKENS, dtype=torch.float32)
        given = [part.requires_grad_(case.no_gradients is None) for part in inputs]
        try:
            # In float32, whose least number is finite wherever a mask is added.
            found = case.cast(torch.float32).attend(given, padding)
            require(found[1].isfinite().all(), f"the output is {found[1].flatten()[0].item()}")
            if case.no_gradients is None:
                grads = torch.autograd.grad(found[0].sum(), given)
                require(all(grad.isfinite().all() for grad in grads), "gradients of the other sequence are not finite")
        finally:
            case.cast(case.dtype)


class DecodingIsTheWhole(ForeignLaw):
    """The last queries alone, over all keys, give the last outputs of the whole, one at a time or several."""

    @classmethod
    def excuse(cls, case: Foreign) -> str | None:
        return None if case.apart and case.causal else "its queries are not given apart from keys, or it is not causal"

    def test_the_last_queries_give_the_last_outputs(self, case: Foreign) -> None:
        query, key, value = case.inputs(2, TOKENS)
        whole = case.attend([query, key, value])
        for new in (1, 4):
            last = query.narrow(case.axis, TOKENS - new, new)
            found = case.attend([last, key, value])
            expected = whole.narrow(case.axis, TOKENS - new, new)
            require_same(found, expected, f"the last {new} of {TOKENS} queries and the whole", case.tolerance)


def require_gradients(check: Callable[..., bool], case: Foreign, inputs: list[Tensor]) -> None:
    """Check gradients by small differences or, where these are lost in the rounding of a softmax in float32, by large
    ones, which a kink, such as that of a ReLU, can spoil."""

    def attend(*parts: Tensor) -> Tensor:
        return case.attend(parts)

    if not check(attend, inputs, eps=1e-6, atol=1e-6, raise_exception=False):
        check(attend, inputs, eps=1e-3, atol=2e-3)


class Gradients(ForeignLaw):
    """Gradients are those of finite differences, to a precision that allows a softmax in float32."""

    @classmethod
    def excuse(cls, case: Foreign) -> str | None:
        return case.no_gradients or (None if case.dtype == torch.float64 else "it does not compute in float64")

    def test_gradients_are_finite_differences(self, case: Foreign) -> None:
        inputs = [part.requires_grad_() for part in case.inputs(1, 4)]
        require_gradients(torch.autograd.gradcheck, case, inputs)


class SecondGradients(ForeignLaw):
    """Gradients of gradients are those of finite differences."""

    @classmethod
    def excuse(cls, case: Foreign) -> str | None:
        return case.no_gradients or (None if case.dtype == torch.float64 else "it does not compute in float64")

    def test_second_gradients_are_finite_differences(self, case: Foreign) -> None:
        inputs = [part.requires_grad_() for part in case.inputs(1, 3)]
        require_gradients(torch.autograd.gradgradcheck, case, inputs)


class SixteenBits(ForeignLaw):
    """In bfloat16 the output is that of wider computations on the same inputs, to eight units of its precision."""

    def test_bfloat16_is_close(self, case: Foreign) -> None:
        narrow = [part.to(torch.bfloat16) for part in case.inputs(2, 64)]
        try:
            found = case.cast(torch.bfloat16).attend(narrow)
        finally:
            case.cast(case.dtype)
        # Weights of a module are now rounded to bfloat16, in both computations.
        wide = case.attend([part.to(case.dtype) for part in narrow])
        error = (found.to(wide.dtype) - wide).abs().max().item()
        scale = wide.abs().max().item()
        require(found.dtype == torch.bfloat16, f"bfloat16 inputs give {found.dtype}")
        require(error <= 8 * 2**-8 * scale, f"bfloat16 is {error:.2g} off outputs of up to {scale:.2g}")


class LargeScores(ForeignLaw):
    """Inputs a thousand times larger give finite outputs and gradients."""

    def test_large_inputs_stay_finite(self, case: Foreign) -> None:
        inputs = [1e3 * part for part in case.inputs(2, TOKENS)]
        with torch.no_grad():
            require(case.attend(inputs).isfinite().all(), "outputs are not finite")
        if case.no_gradients is None:
            given = [part.requires_grad_() for part in inputs]
            grads = torch.autograd.grad(case.attend(given).sum(), given)
            require(all(grad.isfinite().all() for grad in grads), "gradients are not finite")


class NoTokens(ForeignLaw):
    """No tokens give no outputs, without an error."""

    def test_no_tokens_give_no_outputs(self, case: Foreign) -> None:
        found = case.attend(case.inputs(2, 0))
        require(found.shape[case.axis] == 0, f"no tokens give the shape {tuple(found.shape)}")


class Compiles(ForeignLaw):
    """`torch.compile(fullgraph=True)` traces it without a break, to the same outputs."""

    def test_it_compiles_whole(self, case: Foreign) -> None:
        inputs = case.inputs(2, TOKENS)
        expected = case.attend(inputs)
        torch.compiler.reset()
        compiled = torch.compile(lambda *parts: case.attend(parts), fullgraph=True, backend="eager")
        require_same(compiled(*inputs), expected, "compiled and not", case.tolerance)


FOREIGN_LAWS: tuple[type[ForeignLaw], ...] = (
    SameTwice,
    EachRequestAlone,
    Causality,
    Padding,
    NothingToRead,
    DecodingIsTheWhole,
    Gradients,
    SecondGradients,
    SixteenBits,
    LargeScores,
    NoTokens,
    Compiles,
)
