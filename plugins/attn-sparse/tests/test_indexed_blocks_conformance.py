from attn_testing import MechanismLaws


class TestIndexedBlocks(MechanismLaws):
    mechanism = "indexed_blocks"
    options = {"index_size": 8, "block": 4, "top": 3, "local": 2}
