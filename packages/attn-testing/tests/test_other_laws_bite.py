"""Laws of caches, kernels and models: each has something broken on purpose, and finds it alone."""

import pytest
from broken.kernels import BROKEN_KERNELS, SoundKernel
from broken.models import BROKEN_MODELS, SoundFamily
from broken.stores import BROKEN_STORES, SoundStore, StoreFamily

from attn_testing.cache_subject import CacheSubject
from attn_testing.check import judge
from attn_testing.kernel_subject import KernelSubject
from attn_testing.laws.caches import CACHE_LAWS
from attn_testing.laws.kernel import KERNEL_LAWS
from attn_testing.laws.models import MODEL_LAWS
from attn_testing.model_subject import ModelSubject


def models(family):
    return ModelSubject(family, {"small": {"vocab_size": 11, "hidden_size": 8}})


KINDS = {
    "caches": (CACHE_LAWS, CacheSubject, StoreFamily(SoundStore), BROKEN_STORES),
    "kernels": (KERNEL_LAWS, KernelSubject, SoundKernel(), BROKEN_KERNELS),
    "models": (MODEL_LAWS, models, SoundFamily(), BROKEN_MODELS),
}
EVERY = [(kind, law) for kind, (laws, *_) in KINDS.items() for law in laws]


def found_by(laws, subject):
    return {result.law: result.detail for result in (judge(law, subject) for law in laws) if not result.passed}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sound_breaks_no_law(kind):
    laws, subject_of, sound, _ = KINDS[kind]
    assert found_by(laws, subject_of(sound)) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_there_is_something_broken_for_every_law(kind):
    laws, _, _, broken = KINDS[kind]
    assert set(broken) == set(laws)


@pytest.mark.parametrize(("kind", "law"), EVERY, ids=lambda value: value if isinstance(value, str) else value.title())
def test_what_breaks_one_law_is_found_by_that_law_alone(kind, law):
    laws, subject_of, _, broken = KINDS[kind]
    found = found_by(laws, subject_of(broken[law]))
    assert set(found) == {law.title()}, found
    assert "LawBroken" in found[law.title()]
