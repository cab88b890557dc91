"""What the operator leaves open is taken from the machine."""

from __future__ import annotations

import pytest
from attn_core.errors import InvalidValue
from attn_train import settings
from attn_train.settings import TrainSettings


def test_jobs_get_the_threads_that_the_limit_of_a_container_pays_for(monkeypatch):
    """In a container that is given the time of 3 of 64 cores, 64 threads would wait for one another."""
    monkeypatch.setattr(settings, "usable_cores", lambda: 3)
    assert TrainSettings.from_environment({}).threads == 3
    assert TrainSettings.from_environment({"ATTN_TRAIN_THREADS": "5"}).threads == 5


@pytest.mark.parametrize("given", ["0", "-1", "two", "1.5", "²"])
def test_a_number_of_threads_that_is_none_is_refused_with_what_is_allowed(given):
    with pytest.raises(InvalidValue, match=r"ATTN_TRAIN_THREADS.*a whole number from 1"):
        TrainSettings.from_environment({"ATTN_TRAIN_THREADS": given})
