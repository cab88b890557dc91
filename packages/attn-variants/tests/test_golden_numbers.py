"""Numbers worked out by hand in papers and courses."""

import pytest
import torch
from attn_core import AttentionInputs, AttentionSpec, Causal, Full, Heads, Window
from attn_core.modifiers import Alibi
from attn_core.scores import ScaledDot
from attn_variants.compute import plain, torch_sdpa
from attn_variants.distributions import softmax, sparsemax

ONE_HEAD = Heads(query=1, key_value=1, key_size=3, value_size=3)
QUERY = [[1, 0, 2], [2, 2, 2], [2, 1, 3]]
KEY = [[0, 1, 1], [4, 4, 0], [2, 3, 1]]
VALUE = [[1, 2, 3], [2, 8, 0], [2, 6, 3]]
UNSCALED = [
    [1.93662106, 6.68310531, 1.59506841],
    [1.99999397, 7.9639916, 0.05397641],
    [1.99970461, 7.75989225, 0.35838929],
]
SCALED = [[1.8638742, 6.31937101, 1.7041887], [1.99910955, 7.8141235, 0.27347206], [1.99255511, 7.47963559, 0.73587726]]
CAUSAL = [[1, 2, 3], [1.9990212, 7.99412720, 0.0029364], [1.99255511, 7.47963559, 0.73587726]]


def rows(values):
    return torch.tensor(values, dtype=torch.float64)[None, :, None, :]


@pytest.mark.parametrize("attend", [plain.attend, torch_sdpa.attend])
@pytest.mark.parametrize(
    ("score", "mask", "expected"),
    [
        (ScaledDot(scale=1.0), Full(), UNSCALED),
        (ScaledDot(), Full(), SCALED),
        (ScaledDot(), Causal(), CAUSAL),
    ],
)
def test_the_worked_example_of_three_tokens(agrees, attend, score, mask, expected):
    spec = AttentionSpec(heads=ONE_HEAD, score=score, mask=mask)
    out = attend(spec, AttentionInputs(query=rows(QUERY), key=rows(KEY), value=rows(VALUE)))
    agrees("mha", paper="the worked example of three tokens").outputs(
        out[0, :, 0], torch.tensor(expected, dtype=torch.float64), 5e-9
    )


def test_cl_45_the_weights_of_the_worked_example():
    spec = AttentionSpec(heads=ONE_HEAD)
    weights = plain.attention_weights(spec, AttentionInputs(query=rows(QUERY), key=rows(KEY), value=rows(VALUE)))
    expected = [
        [0.1361258, 0.4319371, 0.4319371],
        [0.00089045, 0.90884265, 0.09026691],
        [0.00744489, 0.75470758, 0.23784753],
    ]
    assert torch.allclose(weights[0, 0], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=5e-9)


def test_cl_47_the_look_ahead_mask_of_the_lecture():
    scores = torch.tensor(
        [[0.0, 0, 0, 0], [0.0, 0.5, 0, 0], [0.0, 0.2, 0.5, 0], [0.0, 0.2, 0.2, 0.2]], dtype=torch.float64
    )
    allowed = Causal().allows(torch.arange(4)[:, None], torch.arange(4))
    expected = [[1, 0, 0, 0], [0.3775, 0.6225, 0, 0], [0.2584, 0.3156, 0.4260, 0], [0.2144, 0.2619, 0.2619, 0.2619]]
    assert torch.allclose(softmax(scores, allowed), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=5e-5)


def test_sparsemax_of_four_scores(agrees):
    weights = sparsemax(torch.tensor([1.0, 0.5, -1.0, 0.9], dtype=torch.float64), None)
    expected = torch.tensor([8 / 15, 1 / 30, 0, 13 / 30], dtype=torch.float64)
    agrees("sparsemax", paper="golden weights of four scores").outputs(weights, expected, 1e-15)


def test_alibi_slopes_of_eight_and_of_six_heads():
    assert Alibi().slopes(8) == [2.0**-h for h in range(1, 9)]
    assert Alibi().slopes(6) == [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]


@pytest.mark.parametrize(("dilation", "scores"), [(1, 19), (2, 17)])
def test_cl_40_a_window_of_one_on_either_side_keeps_as_many_of_49_scores_as_the_course_says(dilation, scores):
    mask = Window(left=1, right=1, dilation=dilation)
    spec = AttentionSpec(heads=ONE_HEAD, mask=mask)
    tokens = torch.randn(1, 7, 1, 3, dtype=torch.float64)
    weights = plain.attention_weights(spec, AttentionInputs(query=tokens, key=tokens, value=tokens))
    assert (weights > 0).sum().item() == mask.count(7, 7) == scores
