"""Every field with text either names a stored object and is marked, or is known to be free text."""

from __future__ import annotations

import msgspec
import pytest
from attn_core.errors import InvalidValue
from attn_schema import DataConfig, EngineConfig, LoraConfig, ModelConfig, ObjectiveConfig, TrainingConfig
from attn_schema.on_policy import OnPolicyConfig
from attn_schema.prepared import PrepareConfig
from attn_schema.schema import FieldInfo, fields_of, is_noun

FREE_TEXT = {
    ModelConfig: {"family", "mechanism", "positions", "routing", "kv_sharing"},
    DataConfig: {"columns", "languages"},
    TrainingConfig: {"device"},
    LoraConfig: {"lora_target_modules", "rank_pattern", "alpha_pattern", "modules_to_save"},
    OnPolicyConfig: {"reward_funcs", "rollout_server", "rollout_model"},
    EngineConfig: {"device", "dtype", "kernel", "kv_cache", "fingerprint"},
    PrepareConfig: {"columns", "validation"},
}
"""Fields whose text is compared with words, has a form that is checked, is read by the user's own command only, or
names what an administrator's other server has."""


def nouns_in(noun: type[msgspec.Struct]) -> set[type[msgspec.Struct]]:
    return {noun}.union(*(nouns_in(info.kind) for info in fields_of(noun) if is_noun(info.kind)))


NOUNS = sorted(nouns_in(TrainingConfig) | nouns_in(EngineConfig) | {PrepareConfig}, key=lambda noun: noun.__name__)
MARKED = [(noun, info) for noun in NOUNS for info in fields_of(noun) if "names" in info.extra]


def test_every_field_with_text_is_marked_or_known_to_be_free_text() -> None:
    unknown = {
        (noun.__name__, info.name)
        for noun in NOUNS
        for info in fields_of(noun)
        if info.kind in {str, tuple[str, ...]}
        and "names" not in info.extra
        and info.name not in FREE_TEXT.get(noun, ())
    }
    assert not unknown
    marked = {(noun, info.name) for noun, info in MARKED}
    assert marked >= {(ModelConfig, "base_model"), (ObjectiveConfig, "teacher"), (EngineConfig, "draft_model")}
    assert marked >= {(DataConfig, name) for name in ("dataset", "tokenizer", "prepared")}


@pytest.mark.parametrize(("noun", "info"), MARKED, ids=lambda value: getattr(value, "name", None))
@pytest.mark.parametrize("text", ["a\0b", "/a\0b", "x" * 5000, "/x" * 2500, "/data/" + "é" * 130])
def test_text_that_no_file_can_have_as_its_path_is_refused(
    noun: type[msgspec.Struct], info: FieldInfo, text: str
) -> None:
    with pytest.raises(InvalidValue) as caught:
        noun(**{info.name: text})
    assert caught.value.metadata["field"] == info.name
