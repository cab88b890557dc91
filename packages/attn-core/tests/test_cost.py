"""Prices add up."""

from attn_core import Cost


def test_the_price_of_two_things_is_the_sum_of_their_prices():
    both = Cost(flops=5, allowed_flops=3, parameters=2) + Cost(flops=70, allowed_flops=60, parameters=0)
    assert both == Cost(flops=75, allowed_flops=63, parameters=2)
