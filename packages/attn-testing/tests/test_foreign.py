"""The laws for foreign implementations: verdicts known by hand on torch's own, and a broken function for each law."""

import pytest
import torch
from attn_core.errors import Incompatible, InvalidValue, UnknownName
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from attn_testing.check import judge
from attn_testing.foreign import Subject, examine, foreign, found_object, markdown
from attn_testing.foreign_subject import ForeignFunction, ForeignModule
from attn_testing.laws.foreign import FOREIGN_LAWS

SDPA = "torch.nn.functional:scaled_dot_product_attention"


def right(query, key, value, attn_mask=None):
    """Attention by this page's own lines, in which an empty row is zero."""
    dtype, query, key, value = value.dtype, query.double(), key.double(), value.double()
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    powers = torch.exp(scores - scores.amax(-1, keepdim=True).clamp(min=-1e300) if scores.numel() else scores)
    return (powers / powers.sum(-1, keepdim=True).clamp(min=1e-30) @ value).to(dtype)


def peeking(query, key, value, attn_mask=None):
    return right(
        query, key, value, None if attn_mask is None else attn_mask | torch.ones_like(attn_mask).triu(1).tril(1)
    )


def blind(query, key, value, attn_mask=None):
    return right(query, key, value, torch.eye(query.shape[2], key.shape[2], dtype=torch.bool))


def noisy(query, key, value, attn_mask=None):
    return right(query, key, value, attn_mask) + 1e-9 * torch.randn_like(query)


def destructive(query, key, value, attn_mask=None):
    with torch.no_grad():
        query.mul_(0.5)
    return right(query, key, value, attn_mask)


def across_the_batch(query, key, value, attn_mask=None):
    return right(query, key - key.mean((0, 2), keepdim=True), value - value.mean(0), attn_mask)


def reads_padding(query, key, value, attn_mask=None):
    seen = attn_mask if attn_mask is None else torch.ones_like(attn_mask).tril(key.shape[2] - query.shape[2])
    return right(query, key, value, seen)


def empty_rows_are_nan(query, key, value, attn_mask=None):
    scores = query @ key.mT * query.shape[-1] ** -0.5
    return scores.masked_fill(~attn_mask, -torch.inf).softmax(-1) @ value


def top_left(query, key, value, is_causal=False):
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril() if is_causal else None
    return right(query, key, value, seen)


def detached(query, key, value, attn_mask=None):
    return right(query, key.detach(), value, attn_mask)


class Once(torch.autograd.Function):
    """A square whose gradient has no gradient to its input."""

    @staticmethod
    def forward(ctx, rows):
        ctx.rows = rows.detach()
        return rows.square()

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.rows * grad


def once(query, key, value, attn_mask=None):
    return right(query, key, Once.apply(value), attn_mask)


def coarse(query, key, value, attn_mask=None):
    out = right(query, key, value, attn_mask)
    return out if query.dtype != torch.bfloat16 else (out * 2).round() / 2


def overflowing(query, key, value, attn_mask=None):
    powers = torch.exp(query @ key.mT * query.shape[-1] ** -0.5) * (1 if attn_mask is None else attn_mask)
    return powers / powers.sum(-1, keepdim=True) @ value


def never_empty(query, key, value, attn_mask=None):
    return right(query, key, value, attn_mask) + 0 * key[:, :, :1]


def breaking(query, key, value, attn_mask=None):
    torch._dynamo.graph_break()
    return right(query, key, value, attn_mask)


def forgetful(query, key, value, attn_mask=None):
    """Right for whole sequences and single queries, not for several queries over more keys."""
    several = 1 < query.shape[2] < key.shape[2]
    return right(query, key, value, attn_mask) + (value.mean() if several else 0)


def leaking(query, key, value, attn_mask=None):
    """Right under a causal mask alone: in any other the first key stays visible."""
    first = torch.arange(key.shape[2]) == 0
    return right(query, key, value, None if attn_mask is None else attn_mask | first)


def cubic(query, key, value, attn_mask=None):
    square = key @ key.mT if key.shape[2] else key
    return right(query, key, value, attn_mask) + 0 * (square @ square.mT)[..., :1].mean()


BROKEN = {
    "same_twice": (noisy, destructive),
    "each_request_alone": (across_the_batch,),
    "causality": (peeking, blind),
    "padding": (reads_padding,),
    "nothing_to_read": (empty_rows_are_nan,),
    "decoding_is_the_whole": (top_left,),
    "gradients": (detached,),
    "second_gradients": (once,),
    "sixteen_bits": (coarse,),
    "large_scores": (overflowing,),
    "compiles": (breaking,),
    "chunks_are_the_whole": (forgetful,),
    "documents_apart": (leaking,),
    "price": (cubic,),
}


def keeps(law, function):
    case = ForeignFunction(function.__name__, function, causal=True, options={})
    return judge(law, Subject([case])).passed


@pytest.mark.parametrize("law", FOREIGN_LAWS, ids=lambda law: law.title())
def test_a_right_function_keeps_every_law(law):
    assert keeps(law, right)


@pytest.mark.parametrize(
    ("law", "function"),
    [(law, one) for law in BROKEN for one in BROKEN[law]],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_each_law_bites(law, function):
    assert not keeps({one.title(): one for one in FOREIGN_LAWS}[law], function)


def test_the_causal_flag_of_torch_starts_at_the_first_key():
    """With fewer queries than keys its mask is aligned to the top left, unlike in decoding."""
    found = {result.law: result for result in examine(SDPA).results}
    assert not found["decoding_is_the_whole"].passed
    assert found["decoding_is_the_whole"].detail.startswith("2 tokens")
    assert found["causality"].passed
    assert found["padding"].passed
    query, key, value = torch.randn(3, 1, 1, 4, 8)
    last = scaled_dot_product_attention(query[:, :, -1:], key, value, is_causal=True)
    torch.testing.assert_close(last, value[:, :, :1])


def test_modules_are_built_and_asked_with_padding():
    found = {result.law: result for result in examine("torch.nn:MultiheadAttention").results}
    assert found["padding"].applied
    assert found["padding"].passed
    assert not found["decoding_is_the_whole"].applied
    assert "| `torch.nn:MultiheadAttention` |" in markdown([examine("torch.nn:MultiheadAttention", causal=False)])


class Summing(nn.Module):
    """A recurrence that continues a sequence; `stale` keeps the state of the first piece, `masked` wants a mask of all
    tokens so far with it."""

    def __init__(self, *, stale, masked):
        super().__init__()
        self.stale, self.masked, self.seen = stale, masked, 0

    def forward(self, rows, prev_hidden=None, return_next_prev_hidden=False, attention_mask=None):
        self.seen = rows.shape[1] + (0 if prev_hidden is None else self.seen)
        if self.masked and prev_hidden is not None:
            assert attention_mask is not None
            assert attention_mask.shape == (len(rows), self.seen)
        out = rows.cumsum(1) + (0 if prev_hidden is None else prev_hidden)
        kept = out[:, -1:] if prev_hidden is None or not self.stale else prev_hidden
        return (out, kept) if return_next_prev_hidden else out


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("stale", [False, True])
def test_a_module_that_returns_its_state_is_continued_with_the_mask_that_it_wants(stale, masked):
    case = ForeignModule("summing", Summing(stale=stale, masked=masked), causal=True)
    found = {law.title(): judge(law, Subject([case])) for law in FOREIGN_LAWS}
    for law in ("decoding_is_the_whole", "chunks_are_the_whole"):
        assert found[law].applied
        assert found[law].passed is not stale


def test_models_of_transformers_are_built_small_with_their_own_cache_and_positions():
    pytest.importorskip("transformers")
    one = foreign_case("transformers:LlamaModel", {"num_key_value_heads": 1})
    laws = {law.title(): law for law in FOREIGN_LAWS}
    for name in ("causality", "padding", "decoding_is_the_whole", "documents_apart"):
        result = judge(laws[name], Subject([one]))
        assert result.applied
        assert result.passed, result.detail


def foreign_case(target, options):
    case = foreign(target, found_object(target), options, causal=True, padding=None)
    return case.cast(case.dtype)


def test_laws_can_be_left_out_with_a_reason_and_lengths_be_multiples():
    results = examine(SDPA, silent={"compiles": "it is not asked to"}, multiple=4).results
    left = {result.law: result for result in results}["compiles"]
    assert (left.applied, left.detail) == (False, "it is not asked to")


class Words(nn.Module):
    def forward(self, rows):
        return "rows"


class Elsewhere(nn.Module):
    def forward(self, rows):
        return rows.cuda()


def test_what_cannot_be_judged_is_said_in_a_sentence():
    with pytest.raises(Incompatible, match="returns str, and no tensor"):
        ForeignModule("words", Words(), causal=False).dtype  # noqa: B018
    with pytest.raises(Incompatible, match="cannot run here"):
        ForeignModule("elsewhere", Elsewhere(), causal=False).dtype  # noqa: B018
    with pytest.raises(UnknownName, match="nothing_here"):
        examine("torch.nn:nothing_here")
    with pytest.raises(InvalidValue, match="PACKAGE"):
        examine("torch")
    with pytest.raises(InvalidValue, match="in_features"):
        examine("torch.nn:Linear")
    with pytest.raises(Incompatible, match="no argument known to make it causal"):
        examine("torch.nn.functional:cosine_similarity")
