"""Special tokens and ends are found in every file in which transformers finds them."""

from __future__ import annotations

import json

import pytest
from attn_models.tokenizers.settings import read_settings


@pytest.fixture
def write(tmp_path):
    """Writes JSON files into a folder, which it returns."""

    def to(**files):
        for name, values in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(values))
        return tmp_path

    return to


def test_a_token_that_the_tokenizer_config_leaves_out_is_that_of_the_special_tokens_map(write):
    folder = write(
        tokenizer_config={"eos_token": "</s>", "pad_token": None},
        special_tokens_map={"eos_token": "<other>", "pad_token": {"content": "<pad>"}, "bos_token": "<s>"},
    )
    settings = read_settings(folder)
    assert (settings.eos_token, settings.pad_token, settings.bos_token) == ("</s>", "<pad>", "<s>")


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"config": {"eos_token_id": 7}}, (7,)),
        ({"config": {"eos_token_id": [7, 8]}}, (7, 8)),
        ({"config": {"eos_token_id": 7}, "generation_config": {"eos_token_id": [9]}}, (9,)),
        ({"config": {"eos_token_id": 7}, "generation_config": {"temperature": 1.0}}, (7,)),
        ({"config": {"eos_token_id": None}}, ()),
    ],
)
def test_ends_are_those_of_the_model_where_the_generation_config_has_none(write, files, ends):
    assert read_settings(write(**files)).eos_ids == ends
