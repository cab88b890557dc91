import pytest

from attn_core.errors import InvalidValue
from attn_core.models import checked_kv_sharing, kv_source_layer_of


def everyone(kv_sharing, layers):
    return [kv_source_layer_of(checked_kv_sharing(kv_sharing, layers), layer, layers) for layer in range(layers)]


def test_forms_say_whose_keys_and_values_each_layer_uses():
    assert everyone((), 3) == [0, 1, 2]
    assert everyone("cla:1", 3) == [0, 1, 2]
    assert everyone("cla:2", 5) == [0, 0, 2, 2, 4]
    assert everyone("cla:3", 5) == [0, 0, 0, 3, 3]
    assert everyone("yoco", 6) == [0, 1, 2, 3, 3, 3]
    assert everyone("yoco", 1) == [0]
    assert everyone([0, 1, 0, 1], 4) == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("kv_sharing", "message"),
    [
        ("cla:0", "kv_sharing: 'cla:0'"),
        ("cla:", "kv_sharing: 'cla:'"),
        ("cla:²", "kv_sharing: 'cla:²'"),
        ("all", "kv_sharing: 'all'"),
        (7, "kv_sharing: 7"),
        ([0, 0], r"kv_sharing: \[0, 0\] is not allowed; allowed: 3 entries"),
        ([0, 2, 2], r"kv_sharing\[1\]: 2 is not allowed; allowed: a layer from 0 to 1"),
        ([0, -1, 0], r"kv_sharing\[1\]: -1"),
        ([0, True, 0], r"kv_sharing\[1\]: True"),
        ([0, 0, 1], r"kv_sharing\[2\]: 1 is not allowed; allowed: 2, or a layer that has its own keys and values"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(kv_sharing, message):
    with pytest.raises(InvalidValue, match=message):
        checked_kv_sharing(kv_sharing, 3)
