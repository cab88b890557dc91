"""The rows of a step and whose they are."""

from hypothesis import given
from hypothesis import strategies as st

from attn_core import RaggedBatch
from attn_core.batch import Span

requests = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=5)


@given(requests)
def test_every_row_is_located_once(pairs):
    lengths, contexts = [n for n, _ in pairs], [c for _, c in pairs]
    batch = RaggedBatch.of(lengths, contexts, list)
    assert batch.requests == len(pairs)
    assert len(batch.positions) == len(batch.request_of) == len(batch.offset_of) == sum(lengths)
    for span in batch.spans():
        rows = range(span.start, span.stop)
        first = contexts[span.request]
        assert [batch.positions[row] for row in rows] == list(range(first, first + lengths[span.request]))
        assert {batch.request_of[row] for row in rows} == {span.request}
        assert [batch.offset_of[row] for row in rows] == list(range(lengths[span.request]))


def test_spans_lie_end_to_end():
    batch = RaggedBatch.of([2, 1, 3], [0, 7, 4], list)
    assert list(batch.spans()) == [Span(0, 0, 2), Span(1, 2, 3), Span(2, 3, 6)]


def test_a_step_decodes_when_every_request_computes_one_token():
    assert RaggedBatch.of([1, 1], [4, 0], list).decoding
    assert not RaggedBatch.of([1, 2], [4, 0], list).decoding


@given(requests)
def test_requests_of_one_token_are_batches_of_their_own(pairs):
    lengths, contexts = [n for n, _ in pairs], [c for _, c in pairs]
    batch = RaggedBatch.of(lengths, contexts, list)
    found = list(batch.single_tokens())
    assert [span.request for span, _ in found] == [request for request, length in enumerate(lengths) if length == 1]
    for span, alone in found:
        assert span in list(batch.spans())
        assert vars(alone) == vars(RaggedBatch.of([1], [contexts[span.request]], list))
