import pytest
import torch
from attn_core import Rotary
from attn_core.rotary import Yarn
from attn_sparse.dsa.indexer import FAR, SHORTEST, turn, turns


@pytest.mark.parametrize("start", [0, -5, FAR - 3])
def test_rows_are_turned_by_the_angles_of_their_positions(start):
    """Angles are looked up, except before the first position and far away."""
    rotary = Rotary(base=300.0, scaling=Yarn(factor=4.0, original_max_position_embeddings=64))
    rows, places = torch.randn(2, SHORTEST, 3, 8), torch.arange(SHORTEST).flip(0).expand(2, -1) + start
    cosines, sines = (part[:, :, None] for part in turns(rotary, 6, places, rows.dtype))
    first, second = rows[..., :3], rows[..., 3:6]
    turned = first * cosines - second * sines, second * cosines + first * sines, rows[..., 6:]
    torch.testing.assert_close(turn(rows, places, rotary, 6), torch.cat(turned, dim=-1), rtol=0, atol=0)
