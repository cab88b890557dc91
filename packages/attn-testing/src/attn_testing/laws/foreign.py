"""The laws that are asked of foreign implementations; each is judged by numbers alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attn_testing.foreign_subject import Foreign
from attn_testing.law import Law, require, require_same

SLACK = 1.2
"""How much more than promised the products may grow, see `Price`."""


class ForeignLaw(Law):
    """Base class of these laws, whose cases are `Foreign`; `by_tokens` says that `Foreign.tokens` are drawn."""

    by_tokens: ClassVar[bool] = True


class SameTwice(ForeignLaw):
    """Two calls with the same inputs give the same bits, and leave the inputs as they were."""

    def test_two_calls_are_equal(self, case: Foreign) -> None:
        inputs = case.inputs(2, case.tokens)
        kept = [part.clone() for part in inputs]
        first, second = case.attend(inputs).clone(), case.attend(inputs)
        require(all(map(torch.equal, inputs, kept)), "the call changes its inputs")
        require(torch.equal(first, second), f"two calls differ by up to {(first - second).abs().max().item():g}")


class EachRequestAlone(ForeignLaw):
    """A sequence in a batch gives what it gives alone."""

    def test_a_batch_is_its_rows(self, case: Foreign) -> None:
        inputs = case.inputs(3, case.tokens)
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
        tokens = case.tokens
        inputs, other = case.inputs(2, tokens), case.inputs(2, tokens, seed=3)
        before = case.attend(inputs)
        for first in sorted({1, tokens // 2, tokens - 1} - {0, tokens}):
            for size in (1.0, 1e3):
                changed = [
                    torch.cat(
                        [a.narrow(case.axis, 0, first), size * b.narrow(case.axis, first, tokens - first)], case.axis
                    )
                    for a, b in zip(inputs, other, strict=True)
                ]
                after = case.attend(changed).narrow(case.axis, 0, first)
                what = f"outputs before token {first} with other inputs from there on"
                require_same(after, before.narrow(case.axis, 0, first), what, case.tolerance)

    def test_earlier_tokens_are_read(self, case: Foreign) -> None:
        before = case.tokens - 1
        inputs, other = case.inputs(1, case.tokens), case.inputs(1, case.tokens, seed=3)
        changed = [
            torch.cat([b.narrow(case.axis, 0, before), a.narrow(case.axis, before, 1)], case.axis)
            for a, b in zip(inputs, other, strict=True)
        ]
        last = (case.attend(part).narrow(case.axis, before, 1) for part in (inputs, changed))
        require(not before or not torch.equal(*last), "the last output does not depend on earlier tokens")


class Padding(ForeignLaw):
    """Padding, before the tokens where causal, else after them, changes no output, in float32."""

    @classmethod
    def excuse(cls, case: Foreign) -> str | None:
        return None if case.pads else "no argument for padding is known"

    def test_padding_changes_nothing(self, case: Foreign) -> None:
        inputs, real = case.inputs(2, case.tokens, dtype=torch.float32), case.several(case.tokens // 2 + 1)
        # No causal attention reads padding after its tokens.
        start = case.tokens - real if case.causal else 0
        padding = torch.ones(2, case.tokens, dtype=torch.bool)
        padding[0], padding[1, start : start + real] = False, False
        try:
            # In float32, whose least number is finite wherever a mask is added.
            case.cast(torch.float32)
            found = case.attend(inputs, padding)[1:2].narrow(case.axis, start, real)
            alone = case.attend([part[1:2] for part in case.some(inputs, start, start + real)])
        finally:
            case.cast(case.dtype)
        require_same(found, alone, "a padded sequence and the sequence alone", 1e-4)


class NothingToRead(ForeignLaw):
    """A sequence whose tokens are all padding gives finite outputs and gradients."""

    @classmethod
    def excuse(cls, case: Foreign) -> str | None:
        return None if case.pads else "no argument for padding is known"

    def test_rows_without_keys_are_finite(self, case: Foreign) -> None:
        padding = torch.zeros(2, case.tokens, dtype=torch.bool)
        padding[1] = True
        inputs = case.inputs(2, case.tokens, dtype=torch.float32)
        given = [part.requires_grad_(case.no_gradients is None) for part in inputs]
        try:
            found = case.cast(torch.float32).attend(given, padding)
            require(found[1].isfinite().all(), f"the output is {found[1].flatten()[0].item()}")
            if case.no_gradients is None:
                grads = torch.autograd.grad(found[0].sum(), given)
                require(all(grad.isfinite().all() for grad in grads), "gradients of the other sequence are not finite")
        finally:
            case.cast(case.dtype)


class Resuming(ForeignLaw):
    """Base class of the laws of sequences that are continued."""

    @classmethod
    def excuse(cls, case: Foreign) -> str | None:
        return None if case.resumes else "no argument is known to continue a sequence"

    def require_whole(self, case: Foreign, lengths: list[int]) -> None:
        """The sequence in pieces of these lengths gives what it gives at once."""
        inputs = case.inputs(2, sum(lengths))
        with torch.no_grad():
            found, whole = case.pieces(inputs, lengths), case.attend(inputs)
        require_same(found, whole, f"pieces of {', '.join(map(str, lengths))} tokens and the whole", case.tolerance)


class DecodingIsTheWhole(Resuming):
    """Token after token, after a prompt or from the first, gives the outputs of the whole sequence."""

    def test_tokens_after_a_prompt_give_the_outputs_of_the_whole(self, case: Foreign) -> None:
        prompt = -(-case.tokens // 2)
        self.require_whole(case, [prompt] + [1] * (case.tokens - prompt))

    def test_tokens_alone_give_the_outputs_of_the_whole(self, case: Foreign) -> None:
        self.require_whole(case, [1] * case.tokens)


class ChunksAreTheWhole(Resuming):
    """A sequence in chunks of several tokens gives its outputs at once."""

    def test_chunks_give_the_outputs_of_the_whole(self, case: Foreign) -> None:
        third = case.tokens // 3
        self.require_whole(case, [part for part in (third, third, case.tokens - 2 * third) if part])


class DocumentsApart(ForeignLaw):
    """Documents end to end in one sequence give what each gives alone."""

    @classmethod
    def excuse(cls, case: Foreign) -> str | None:
        return None if case.packs else "no argument is known to keep documents apart"

    def test_documents_do_not_leak(self, case: Foreign) -> None:
        first = case.tokens // 3
        lengths = [part for part in (first, case.tokens - first) if part]
        inputs, start = case.inputs(1, case.tokens), 0
        found = case.packed(inputs, lengths)
        for number, length in enumerate(lengths):
            alone = case.attend(case.some(inputs, start, start + length))
            here = found.narrow(case.axis, start, length)
            require_same(here, alone, f"document {number} of {len(lengths)} and alone", case.tolerance)
            start += length


def require_gradients(check: Callable[..., bool], case: Foreign, inputs: list[Tensor]) -> None:
    """Check gradients by small differences or, where these are lost in the rounding of a softmax in float32, by large
    ones, which a kink, such as that of a ReLU, can spoil."""

    def attend(*parts: Tensor) -> Tensor:
        return case.attend(parts)

    if not check(attend, inputs, eps=1e-6, atol=1e-6, raise_exception=False):
        check(attend, inputs, eps=1e-3, atol=2e-3)


class Gradients(ForeignLaw):
    """Gradients are those of finite differences, to a precision that allows a softmax in float32."""

    by_tokens = False

    @classmethod
    def excuse(cls, case: Foreign) -> str | None:
        return case.no_gradients or (None if case.dtype == torch.float64 else "it does not compute in float64")

    def test_gradients_are_finite_differences(self, case: Foreign) -> None:
        inputs = [part.requires_grad_() for part in case.inputs(1, case.several(4))]
        require_gradients(torch.autograd.gradcheck, case, inputs)


class SecondGradients(ForeignLaw):
    """Gradients of gradients are those of finite differences."""

    by_tokens = False

    @classmethod
    def excuse(cls, case: Foreign) -> str | None:
        return case.no_gradients or (None if case.dtype == torch.float64 else "it does not compute in float64")

    def test_second_gradients_are_finite_differences(self, case: Foreign) -> None:
        inputs = [part.requires_grad_() for part in case.inputs(1, case.several(3))]
        require_gradients(torch.autograd.gradgradcheck, case, inputs)


class SixteenBits(ForeignLaw):
    """In bfloat16 the output is that of wider computations on the same inputs, to eight units of its precision."""

    by_tokens = False

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
        inputs = [1e3 * part for part in case.inputs(2, case.tokens)]
        with torch.no_grad():
            require(case.attend(inputs).isfinite().all(), "outputs are not finite")
        if case.no_gradients is None:
            given = [part.requires_grad_() for part in inputs]
            grads = torch.autograd.grad(case.attend(given).sum(), given)
            require(all(grad.isfinite().all() for grad in grads), "gradients are not finite")


class NoTokens(ForeignLaw):
    """No tokens give no outputs, without an error."""

    by_tokens = False

    def test_no_tokens_give_no_outputs(self, case: Foreign) -> None:
        found = case.attend(case.inputs(2, 0))
        require(found.shape[case.axis] == 0, f"no tokens give the shape {tuple(found.shape)}")


class Compiles(ForeignLaw):
    """`torch.compile(fullgraph=True)` traces it without a break, to the same outputs."""

    def test_it_compiles_whole(self, case: Foreign) -> None:
        inputs = case.inputs(2, case.tokens)
        expected = case.attend(inputs)
        torch.compiler.reset()
        compiled = torch.compile(lambda *parts: case.attend(parts), fullgraph=True, backend="eager")
        require_same(compiled(*inputs), expected, "compiled and not", case.tolerance)


class Price(ForeignLaw):
    """Twice the tokens cost at most four times the products, and twice them where the package promises linear cost."""

    by_tokens = False

    @classmethod
    def excuse(cls, case: Foreign) -> str | None:
        try:
            return None if products(case, case.several(8)) else "it has no products that torch counts"
        except Exception as error:  # noqa: BLE001 -- whatever counting does to a stranger's code
            return f"its products cannot be counted: {type(error).__name__}"

    def test_products_grow_as_promised(self, case: Foreign) -> None:
        few, many = (products(case, tokens) for tokens in (512, 1024))
        message = f"{few:,} operations in products for 512 tokens, {many:,} for 1,024"
        require(many <= SLACK * 2**case.growth * few, message)


def products(case: Foreign, tokens: int) -> int:
    """The operations in products for one sequence, as torch counts them."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        case.attend(case.inputs(1, tokens))
    return counter.get_total_flops()


FOREIGN_LAWS: tuple[type[ForeignLaw], ...] = (
    SameTwice,
    EachRequestAlone,
    Causality,
    Padding,
    NothingToRead,
    DecodingIsTheWhole,
    ChunksAreTheWhole,
    DocumentsApart,
    Gradients,
    SecondGradients,
    SixteenBits,
    LargeScores,
    NoTokens,
    Compiles,
    Price,
)
