"""A step over states of another model says which state is wrong and what was given."""

import pytest
import torch
from attn_core import Field, Paged, RaggedBatch, Slot
from attn_core.errors import WrongState
from attn_models.decoder.decoder import Decoder
from attn_schema.decoder import DecoderConfig
from attn_testing import DictionaryStore

SIZES = {"vocab_size": 11, "max_seq_len": 16, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "positions": "none"}
KV = {"key": Field((2, 4)), "value": Field((2, 4))}


def stepped(mechanism, states):
    model = Decoder(DecoderConfig(mechanism=mechanism, **SIZES)).eval()
    store = DictionaryStore(states, "float32")
    store.admit(0)
    tokens = torch.tensor([1, 2, 3])
    for start in (0, 3):
        batch = RaggedBatch.of([3], [start], torch.tensor)
        with torch.no_grad():
            model.step(tokens, batch, store.view(batch, [0]))


def layers(states):
    return {f"blocks.{layer}": states for layer in range(2)}


@pytest.mark.parametrize(
    ("mechanism", "states", "said"),
    [
        (
            "mha",
            {},
            r"layer blocks.0 needs Paged 'kv' \(key \[2, 4\], value \[2, 4\]\); state 'kv' is missing, given: no",
        ),
        ("mha", layers({"rows": Paged(KV)}), "state 'kv' is missing, given: 'rows'"),
        ("stick_breaking", {"blocks.0": {"kv": Paged(KV)}}, "layer blocks.1 needs .*'kv' is missing, given: no state"),
        ("linear", layers({"sums": Slot({"a": Field((1,))})}), "layer blocks.0 needs Slot .* missing, given: 'sums'"),
        ("lstmn", layers({"kv": Paged(KV)}), "layer blocks.0 needs Paged 'tapes' .* is missing, given: 'kv'"),
    ],
)
def test_a_state_that_is_missing_is_named_with_the_shapes_that_are_needed(mechanism, states, said):
    with pytest.raises(WrongState, match=said):
        stepped(mechanism, states)


def test_a_slot_of_another_shape_is_named_with_both_shapes():
    model = Decoder(DecoderConfig(mechanism="linear", **SIZES))
    own = model.state_specs()["blocks.0"]
    (name,) = own
    wrong = {field: Field((*row.shape[:-1], row.shape[-1] + 3)) for field, row in own[name].fields.items()}
    said = rf"layer blocks.0 needs Slot '{name}' .*; state '{name}' was given with"
    with pytest.raises(WrongState, match=said):
        stepped("linear", layers({name: Slot(wrong)}))


def test_a_failure_over_right_states_stays_what_it_was():
    model = Decoder(DecoderConfig(mechanism="mha", **SIZES)).eval()
    store = DictionaryStore(model.state_specs(), "float32")
    store.admit(0)
    batch = RaggedBatch.of([1], [0], torch.tensor)
    with pytest.raises(IndexError):
        model.step(torch.tensor([99]), batch, store.view(batch, [0]))
