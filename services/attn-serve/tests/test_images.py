"""Models of images behind the gateway: they are loaded, and their maps are over the cells of an image."""

from __future__ import annotations

import pytest
import torch
from attn_core import installed
from attn_core.errors import UserError
from attn_engine.host.attention_maps import compute_maps
from attn_engine.host.loading import use_kernel
from attn_engine.host.tokenization import PromptTokenizer
from attn_models.loading import load_model, save_model
from attn_models.tokenizers.learned import word_tokenizer
from attn_schema import AttentionMapsRequest, EncoderPrompt, Prompt


@pytest.fixture
def loaded(tmp_path):
    tokenizer = word_tokenizer(["0 1 2 3", "a line"])
    family = installed().models.get("show_attend_tell")
    fields = {
        "max_seq_len": 8,
        "hidden_size": 4,
        "embedding": 4,
        "features": 4,
        "rows": 2,
        "columns": 3,
        "max_encoder_len": 7,
    }
    torch.manual_seed(0)
    model = family.build(family.configure(fields | {"vocab_size": tokenizer.vocab_size}))
    save_model(tmp_path / "model", model, tokenizer)
    return load_model(tmp_path / "model")


@pytest.mark.parametrize("kernel", [None, "plain"])
def test_a_model_of_images_passes_the_trial_of_its_kernels_before_requests_come(loaded, kernel):
    use_kernel(loaded.model, kernel)
    with pytest.raises(UserError, match="no_such_kernel"):
        use_kernel(loaded.model, "no_such_kernel")


def test_each_word_has_a_weight_for_every_cell_and_the_cells_have_their_names(loaded):
    prompt = Prompt(text="a line", encoder_prompt=EncoderPrompt(text="0 1 2 3 2 1"))
    (answer,) = compute_maps(loaded, AttentionMapsRequest(model="", prompt=prompt), PromptTokenizer(loaded.tokenizer))
    assert answer.attention_weights.shape == (1, 3, 6)
    assert [label.strip() for label in answer.key_tokens] == ["0", "1", "2", "3", "2", "1"]
    weights = torch.tensor(answer.attention_weights.view().tolist())
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 3))
