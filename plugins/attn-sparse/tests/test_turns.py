import pytest
import torch
from attn_core import Rotary
from attn_core.rotary import Yarn
from attn_sparse.dsa.indexer import FAR, MANY, turn


@pytest.mark.parametrize("start", [0, -5, FAR - 3])
def test_many_positions_are_turned_as_each_alone(start):
    """The angles of many positions are looked up, except before the first and far away."""
    rotary = Rotary(base=300.0, scaling=Yarn(factor=4.0, original_max_position_embeddings=64))
    rows, places = torch.randn(2, MANY, 3, 8), torch.arange(MANY).flip(0).expand(2, -1) + start
    alone = [turn(rows[:, at : at + 1], places[:, at : at + 1], rotary, 6) for at in range(MANY)]
    torch.testing.assert_close(turn(rows, places, rotary, 6), torch.cat(alone, dim=1), rtol=0, atol=0)
