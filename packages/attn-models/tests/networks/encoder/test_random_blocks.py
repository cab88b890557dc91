"""What is drawn once differs between the layers of an encoder."""

import itertools

import pytest
from attn_core import MechanismConfig
from attn_core.errors import InvalidValue
from attn_models.encoder.config import EncoderConfig
from attn_models.encoder.encoder import Encoder
from attn_models.encoder_decoder.config import TransformerConfig
from attn_models.encoder_decoder.transformer import Transformer

SIZES = {"vocab_size": 11, "max_seq_len": 64, "hidden_size": 8, "num_layers": 3, "num_heads": 2, "intermediate_size": 8}
LENGTH = 64


def encoder(options):
    return Encoder(EncoderConfig(**SIZES, mechanism="bigbird", options=options)).blocks


def transformer(options):
    sizes = SIZES | {"max_encoder_len": LENGTH, "encoder": "bigbird", "encoder_options": options}
    return Transformer(TransformerConfig(**sizes)).encoder


def seen(block):
    """Which keys every query of every head may see."""
    mask = block.attention.spec.mask.over(LENGTH)
    return [mask.of_head(head).runs(query, LENGTH) for head in range(2) for query in range(LENGTH)]


@pytest.mark.parametrize("blocks", [encoder, transformer])
def test_every_layer_has_random_blocks_of_its_own(blocks):
    patterns = [seen(block) for block in blocks({"block": 2, "random": 2})]
    assert all(one != other for one, other in itertools.combinations(patterns, 2))
    again = [seen(block) for block in blocks({"block": 2, "random": 2})]
    assert again == patterns


@pytest.mark.parametrize("blocks", [encoder, transformer])
@pytest.mark.parametrize("seed", [0, 7])
def test_a_seed_that_is_given_holds_for_all_layers(blocks, seed):
    first, *others = [seen(block) for block in blocks({"block": 2, "random": 2, "seed": seed})]
    assert all(other == first for other in others)


@pytest.mark.parametrize("wrong", [-1, 0.5, "first", None])
def test_a_layer_that_is_no_place_in_a_model_is_refused(wrong):
    with pytest.raises(InvalidValue, match="layer"):
        MechanismConfig(hidden_size=8, layer=wrong)
