import pytest

from attn_core.errors import InvalidValue
from attn_core.models import checked_lenders, lender_of


def everyone(lenders, layers):
    return [lender_of(checked_lenders(lenders, layers), layer, layers) for layer in range(layers)]


def test_words_say_who_lends_to_whom():
    assert everyone((), 3) == [0, 1, 2]
    assert everyone("cla:1", 3) == [0, 1, 2]
    assert everyone("cla:2", 5) == [0, 0, 2, 2, 4]
    assert everyone("cla:3", 5) == [0, 0, 0, 3, 3]
    assert everyone("yoco", 6) == [0, 1, 2, 3, 3, 3]
    assert everyone("yoco", 1) == [0]
    assert everyone([0, 1, 0, 1], 4) == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("lenders", "message"),
    [
        ("cla:0", "lenders: 'cla:0'"),
        ("cla:", "lenders: 'cla:'"),
        ("cla:²", "lenders: 'cla:²'"),
        ("all", "lenders: 'all'"),
        (7, "lenders: 7"),
        ([0, 0], r"lenders: \[0, 0\] is not allowed; allowed: 3 entries"),
        ([0, 2, 2], r"lenders\[1\]: 2 is not allowed; allowed: a layer from 0 to 1"),
        ([0, -1, 0], r"lenders\[1\]: -1"),
        ([0, True, 0], r"lenders\[1\]: True"),
        ([0, 0, 1], r"lenders\[2\]: 1 is not allowed; allowed: 2, or a layer with keys and values of its own"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(lenders, message):
    with pytest.raises(InvalidValue, match=message):
        checked_lenders(lenders, 3)
