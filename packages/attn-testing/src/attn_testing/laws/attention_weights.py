"""Laws of attention weights: padding, queries without allowed keys, sums over keys, dropout."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from attn_core import Capability, configure
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attn_testing.law import MechanismLaw, require, require_same, seeded
from attn_testing.laws.decoding import PLAN, follow, silent_where_nothing_decodes
from attn_testing.subject import Case, in_mode

SHORT, PADDED = 5, 26


class PaddingInvariance(MechanismLaw):
    """Padding at the end changes no real output, and the content of padding anywhere has no effect."""

    needs: ClassVar[tuple[Capability, ...]] = (Capability.PADDING,)

    def test_padding_at_the_end_changes_nothing(self, case: Case) -> None:
        query, source, key_padding_mask = padded_batch(case)
        with torch.no_grad():
            together = case.attend(query, source, key_padding_mask)
            for row, length in enumerate((PADDED, SHORT)):
                one = query[row : row + 1] if case.cross else query[row : row + 1, :length]
                alone = case.attend(one, None if source is None else source[row : row + 1, :length])
                what = f"a sequence of {length} padded to {PADDED} and alone"
                require_same(together[row : row + 1, : one.shape[1]], alone, what, 1e-10)

    def test_the_content_of_padding_is_never_seen(self, case: Case) -> None:
        key_padding_mask = torch.tensor([[True, True, False, True, True, False, False, True, *[True] * (PADDED - 8)]])
        query, source = case.rows(1, PADDED), case.source(1, PADDED)
        rubbish = 100 * case.rows(1, PADDED, seed=4)
        with torch.no_grad():
            before = case.attend(query, source, key_padding_mask)
            if source is None:
                after = case.attend(torch.where(key_padding_mask[..., None], query, rubbish), None, key_padding_mask)
            else:
                after = case.attend(query, torch.where(key_padding_mask[..., None], source, rubbish), key_padding_mask)
        real = torch.ones_like(key_padding_mask) if case.cross else key_padding_mask
        require_same(after[real], before[real], "outputs with different content in the padding", 1e-10)

    def test_padding_is_not_seen_in_training(self, case: Case) -> None:
        mask = torch.arange(case.tokens)[None] % 5 != 2
        rows, source = case.rows(1, case.tokens), case.source(1, case.tokens)
        rubbish = torch.where(mask[..., None], 0, 100 * case.rows(1, case.tokens, seed=4))
        with torch.no_grad():
            before = in_mode(case, rows, source, mask, training=True)
            if source is None:
                after = in_mode(case, rows + rubbish, None, mask, training=True)[mask]
                before = before[mask]
            else:
                after = in_mode(case, rows, source + rubbish, mask, training=True)
        require_same(after, before, "outputs in training with different content in the padding", 1e-9)

    def test_a_sequence_does_not_depend_on_its_neighbours_or_their_padding(self, case: Case) -> None:
        mask = torch.arange(PADDED)[None] >= torch.tensor([0, 0, 3, 0, PADDED])[:, None]
        mask[1, SHORT:], mask[3, 2 * SHORT :] = False, False
        query, source = case.rows(len(mask), PADDED), case.source(len(mask), PADDED)
        other, memory, others = 9 * query, None if source is None else 9 * source, mask.clone()
        for changed, given in ((other, query), *([] if memory is None or source is None else [(memory, source)])):
            changed[:2] = given[:2]
        others[2:] = True
        with torch.no_grad():
            for training in (False, True):
                found = in_mode(case, query, source, mask, training=training)[:2]
                beside = in_mode(case, other, memory, others, training=training)[:2]
                what = f"outputs{' in training' * training} of two sequences beside others and beside different ones"
                require_same(beside, found, what, 1e-9)


def padded_batch(case: Case) -> tuple[Tensor, Tensor | None, Tensor]:
    """Two sequences of `PADDED` and `SHORT` tokens, padded to `PADDED`; for cross attention the sources are padded."""
    key_padding_mask = torch.ones(2, PADDED, dtype=torch.bool)
    key_padding_mask[1, SHORT:] = False
    return case.rows(2, PADDED), case.source(2, PADDED), key_padding_mask


class NoAllowedKey(MechanismLaw):
    """Without any allowed key, output, weights and gradients are zero, and all gradients are finite.

    For a layer that attends to a source and also has states of its own sequence, only the source's part is zero: its
    output does not depend on the content of the source, and no gradient reaches the source.
    """

    needs: ClassVar[tuple[Capability, ...]] = (Capability.PADDING,)

    def test_a_sequence_without_real_keys_gives_zeros(self, case: Case) -> None:
        query, source, key_padding_mask = blocked(case)
        out = case.attend(query, source, key_padding_mask)[1]
        if not case.remembers_beside_source:
            require_silence(case, out, "a sequence whose keys are all padding")
            return
        require(bool(torch.isfinite(out).all()), "a sequence whose source is all padding: the output is not finite")
        other = case.attend(query, case.source(2, 4, seed=7), key_padding_mask)[1]
        require_same(out, other, "outputs for two sources that are all padding", 1e-12)

    def test_a_causal_query_before_the_first_real_key_gives_zeros(self, case: Case) -> None:
        if case.cross or not case.causal:
            return
        key_padding_mask = torch.tensor([[False, False, True, True]])
        require_silence(
            case,
            case.attend(case.rows(1, 4), None, key_padding_mask)[0, :2],
            "queries before the first key that is not padding",
        )

    def test_gradients_stay_finite_and_none_reaches_the_masked(self, case: Case) -> None:
        query, source, key_padding_mask = blocked(case)
        layer = case.build()
        inputs = [given.requires_grad_() for given in (query, source) if given is not None]
        out = case.attend(query, source, key_padding_mask, layer)
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        for name, tensor in [*((f"input {i}", x) for i, x in enumerate(inputs)), *layer.named_parameters()]:
            if tensor.grad is not None:
                require(bool(torch.isfinite(tensor.grad).all()), f"the gradient with respect to {name} is not finite")
        for given in inputs[1:] if case.remembers_beside_source else inputs:
            reached = 0.0 if given.grad is None else given.grad[1].abs().max().item()
            require(
                reached == 0,
                f"the gradient with respect to a sequence whose keys are all padding is {reached:g}, not zero",
            )

    def test_weights_are_zero(self, case: Case) -> None:
        if case.mechanism.can(Capability.WEIGHTS):
            query, source, key_padding_mask = blocked(case)
            weights = case.weights(query, source, key_padding_mask)[1]
            require(
                bool((weights == 0).all()),
                f"weights of a query without allowed keys reach {weights.abs().max().item():g}, not zero",
            )


def blocked(case: Case) -> tuple[Tensor, Tensor | None, Tensor]:
    """Two sequences of 4 tokens; the second has no real key."""
    key_padding_mask = torch.tensor([[True, True, True, False], [False] * 4])
    return case.rows(2, 4), case.source(2, 4), key_padding_mask


def require_silence(case: Case, out: Tensor, what: str) -> None:
    """Raise `LawBroken` unless the outputs [row, width] are zero or, in a layer with biases, all rows are equal."""
    require(bool(torch.isfinite(out).all()), f"{what}: the output is not finite")
    left = (out - out[:1]).abs().max().item() if case.config.bias else out.abs().max().item()
    require(left <= 1e-12, f"{what}: the output reaches {left:g}, not zero")


class RowSums(MechanismLaw):
    """Weights are non-negative, sum to one over the allowed keys and are zero for all others."""

    needs: ClassVar[tuple[Capability, ...]] = (Capability.WEIGHTS, Capability.NORMALISED)

    @classmethod
    def silent_on(cls, case: Case) -> str | None:
        usual, own = map(case.mechanism.spec, (configure(case.mechanism, {}, **case.setting), case.config))
        same = usual is None or own is None or own.distribution == usual.distribution
        return None if same else "an option replaces its distribution"

    def test_weights_are_shares_of_the_allowed_keys(self, case: Case) -> None:
        query, source = case.rows(2, case.tokens), case.source(2, 29)
        check_weights(case, case.weights(query, source), None)

    def test_weights_of_padded_sequences_are_shares_of_the_real_keys(self, case: Case) -> None:
        if not case.mechanism.can(Capability.PADDING):
            return
        query, source = case.rows(2, 7), case.source(2, 7)
        key_padding_mask = torch.ones(2, 7, dtype=torch.bool)
        key_padding_mask[1, 4:] = False
        check_weights(case, case.weights(query, source, key_padding_mask), key_padding_mask)


def check_weights(case: Case, weights: Tensor, key_padding_mask: Tensor | None) -> None:
    """Raise `LawBroken` unless `weights` [batch, heads, query, key] are a distribution over the allowed keys."""
    batch, heads, queries, keys = weights.shape
    rows = [
        allowed_pairs(case, queries, keys, None if key_padding_mask is None else key_padding_mask[row])
        for row in range(batch)
    ]
    allowed = torch.stack(rows).expand(batch, heads, queries, keys)
    require(bool(torch.isfinite(weights).all()), "a weight is not finite")
    require(bool((weights >= 0).all()), f"a weight is negative: {weights.min().item():g}")
    outside = weights.masked_fill(allowed, 0).abs().max().item()
    require(outside == 0, f"a key that is not allowed has weight {outside:g}")
    sums = allowed.any(-1).to(weights.dtype).expand(weights.shape[:-1])
    require_same(weights.sum(-1), sums, "the sums of the weights, and one,", 1e-10)


def allowed_pairs(case: Case, queries: int, keys: int, key_padding_mask: Tensor | None) -> Tensor:
    """Which pairs [heads or 1, query, key] are allowed, by the mask of the spec if the mechanism has one."""
    # Positions of queries in cross attention start at 0, as they are not among the keys.
    first = 0 if case.cross else keys - queries
    rows = torch.arange(first, first + queries)[:, None]
    columns = torch.arange(keys)[None, :]
    real = torch.ones(keys, dtype=torch.bool) if key_padding_mask is None else key_padding_mask
    spec = case.mechanism.spec(case.config)
    if spec is None:
        seen = columns <= rows if case.causal and not case.cross else torch.ones(queries, keys, dtype=torch.bool)
        return seen[None] & real
    mask = spec.mask.over(int((real * (columns + 1)).max()))
    heads = [mask.of_head(head).allows(rows, columns).expand(queries, keys) for head in range(mask.heads or 1)]
    return torch.stack(heads) & real


SEQUENCES = 12
"""The number of sequences, which suffices to distinguish weights by the outputs."""

EXPLAINED, BETTER = 1e-8, 0.999
"""The unexplained share of the outputs that is always allowed, and the factor of that of other weights that is."""


class WeightsOfOutput(MechanismLaw):
    """Weights are those used for the outputs: sums by them explain the outputs better than sums by other weights.

    Outputs of plain attention are linear in the weighted sums of input rows of each head, so a least-squares fit leaves
    no residual. If a gate, a norm or a convolution follows, the residual must be smaller than with equal weights for
    all allowed keys and, if weights are normalised, than with those of another sequence. Each fit may also use the
    query's own row.
    """

    needs: ClassVar[tuple[Capability, ...]] = (Capability.WEIGHTS,)
    cases_at_most = 2

    @classmethod
    def silent_on(cls, case: Case) -> str | None:
        if case.remembers_beside_source:
            return "its outputs depend on states other than the source, too"
        return "it attends to its earlier states, not to its inputs" if case.mechanism.sequential else None

    def test_sums_of_rows_by_the_weights_explain_the_outputs(self, case: Case) -> None:
        query, source = case.rows(SEQUENCES, PADDED), case.source(SEQUENCES, PADDED)
        with torch.no_grad():
            weights, out = case.weights(query, source), case.attend(query, source)
        rows = query if source is None else source
        allowed = allowed_pairs(case, query.shape[1], rows.shape[1], None).to(weights)
        own = None if case.cross else rows
        equal = (allowed / allowed.sum(-1, keepdim=True).clamp(min=1)).expand_as(weights)
        rest = unexplained(out, weights, rows, own)
        others = {"equal weights": equal}
        if case.mechanism.can(Capability.NORMALISED):
            others["weights of another sequence"] = weights.roll(1, 0)
        for name, given in others.items():
            left = unexplained(out, given, rows, own)
            require(
                rest <= EXPLAINED or rest <= BETTER * left,
                f"inputs summed by the weights leave {rest:.3f} of the outputs unexplained, by {name} {left:.3f}",
            )


def unexplained(out: Tensor, weights: Tensor, rows: Tensor, own: Tensor | None) -> float:
    """The share of the variance of outputs [batch, query, width] that a least-squares fit does not explain.

    The fit is linear in rows [batch, key, width] summed by weights [batch, heads, query, key], and in the rows `own` of
    the queries.
    """
    sums = torch.einsum("bhqk,bkd->bqhd", weights, rows).flatten(0, 1).flatten(1)
    known = [torch.ones_like(sums[:, :1])] + ([] if own is None else [own.flatten(0, 1)])
    sums = torch.cat([sums, *known], dim=1)
    flat = out.flatten(0, 1)
    fitted = sums @ torch.linalg.lstsq(sums, flat, driver="gelsd").solution
    return float((flat - fitted).square().sum() / (flat - flat.mean(0)).square().sum())


PROBABILITY = 0.5
TOKENS = 9


class DroppedWeights(MechanismLaw):
    """Dropout of attention weights in training is determined by torch's seed; evaluation and steps drop nothing."""

    cases_at_most = 4

    @classmethod
    def silent_on(cls, case: Case) -> str | None:
        return None if case.mechanism.drops_weights else f"{case.mechanism.name} drops no weights"

    def test_evaluation_drops_nothing(self, case: Case) -> None:
        rows, source = case.rows(2, TOKENS), case.source(2, TOKENS)
        with torch.no_grad():
            found = case.attend(rows, source, None, dropping(case).layer)
            require_same(found, case.attend(rows, source), "outputs in evaluation with dropout and without", 1e-10)

    def test_one_seed_drops_the_same_and_another_others_forward_and_backward(self, case: Case) -> None:
        once, again, other = (gradient(dropping(case), seed) for seed in (3, 3, 4))
        require(torch.equal(once, again), "gradients of two passes with the same seed differ")
        require(not torch.equal(once, other), "two different seeds drop the same weights")

    def test_what_is_computed_again_for_gradients_drops_the_same(self, case: Case) -> None:
        tried = dropping(case)
        require_same(
            gradient(tried, 5, again=True),
            gradient(tried, 5),
            "gradients with recomputed activations, and without,",
            1e-10,
        )

    def test_steps_drop_nothing_even_in_training(self, case: Case) -> None:
        if silent_where_nothing_decodes(case) or not case.mechanism.can(Capability.INCREMENTAL):
            return  # The whole sequence is computed again, by the same call as in training.
        names, tried = sorted({name for step in PLAN for name in step}), dropping(case)
        tried.layer.train()
        rows = {name: case.rows(20, seed=10 + name) for name in names}
        sources = {name: case.source(3 + name, seed=30 + name) for name in names}
        found, expected = (follow(served, PLAN, rows, sources) for served in (tried, case))
        for name in names:
            require_same(found[name], expected[name], f"steps with dropout, request {name}", case.tolerance)


def dropping(case: Case) -> Case:
    """The same case with dropout of attention weights; its layer has the same parameters."""
    return dataclasses.replace(case, config=dataclasses.replace(case.config, dropout=PROBABILITY))


def gradient(case: Case, seed: int, *, again: bool = False) -> Tensor:
    """The gradient to the inputs of a training pass with this seed; with `again`, activations are recomputed."""
    layer: Any = case.build().train()
    rows, source = case.rows(2, TOKENS).requires_grad_(), case.source(2, TOKENS)
    with seeded(seed):
        if again:
            out = checkpoint(case.attend, rows, source, None, layer, use_reentrant=False)
        else:
            out = case.attend(rows, source, None, layer)
        weights = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
        found: Tensor = torch.autograd.grad((out * weights).sum(), rows)[0]
    return found
