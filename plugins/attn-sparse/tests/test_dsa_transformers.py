"""The indexer beside that of transformers' DeepSeek-V3.2."""

import attn_sparse.dsa
import pytest
import torch
from attn_core import Rotary, configure


@pytest.mark.oracle
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_it_chooses_what_the_indexer_of_transformers_chooses(fraction):
    deepseek = pytest.importorskip("transformers.models.deepseek_v32.modeling_deepseek_v32")
    settings = pytest.importorskip("transformers.models.deepseek_v32.configuration_deepseek_v32")
    turned = int(8 * fraction)  # of so many heads none gives exactly 0, where transformers leaves ties to chance
    theirs = deepseek.DeepseekV32Indexer(
        settings.DeepseekV32Config(
            hidden_size=16, q_lora_rank=16, index_n_heads=12, index_head_dim=8, index_topk=4, qk_rope_head_dim=turned
        ),
        layer_idx=0,
    )
    torch.manual_seed(0)
    mechanism, rotary = attn_sparse.dsa.Dsa(), Rotary(base=10000.0, fraction=fraction)
    options = {"index_heads": 12, "index_size": 8, "top": 4}
    layer = mechanism.build(configure(mechanism, options, hidden_size=16, num_heads=2, rotary=rotary)).eval()
    ours = layer.inner.indexer
    pairs = {"query": "wq_b", "key": "wk", "norm": "k_norm", "weight": "weights_proj"}
    for mine, other in pairs.items():
        getattr(theirs, other).load_state_dict(getattr(ours, mine).state_dict())
    rows = torch.randn(2, 23, 16)
    frequencies = 10000.0 ** (-torch.arange(0, turned, 2) / turned)
    angles = torch.cat([torch.arange(23)[:, None] * frequencies] * 2, dim=-1)[None].expand(2, -1, -1)
    mask = torch.ones(23, 23, dtype=torch.bool).tril()
    places = torch.arange(23).expand(2, -1)
    found = theirs(rows, rows, (angles.cos(), angles.sin()), mask, places)
    read = (layer.weights(rows) > 0).all(1)
    for token in range(4, 23):
        for sequence in range(2):
            expected = sorted(found[sequence, token].tolist())
            assert read[sequence, token].nonzero().flatten().tolist() == expected
