"""A model that is loaded and runs on a thread of this process."""

from __future__ import annotations

import time
import uuid
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import cast

from attn_client.results.inference import Chunk
from attn_client.sampling import Prompt, Sampling
from attn_core import state_bytes
from attn_core.errors import InvalidValue
from attn_core.models import LanguageModel
from attn_engine import EngineLimits, EngineLoop, Event, Request, build_engine
from attn_engine import Sampling as EngineSampling
from attn_models.loading import load_draft, load_model

from attn_local.words import Words, sampling_fields

CACHE = "shared"
REQUESTS = 32
DRAFT_GUESSES = 4
"""Tokens that a draft guesses ahead where a request does not say."""
STATE_BYTES = 512 * 2**20


class RunningModel:
    """The model in `folder`, with the one in `draft` to guess for it; raises what loading them raises, `InvalidValue`
    where it has no tokenizer, `Incompatible` for a draft of other tokens.

    `weights` is one of `attn_core.kernels.linear.WEIGHT_CHOICES`, `branches` in how many ways a guess may go on.
    """

    def __init__(self, folder: Path, weights: str = "auto", draft: Path | None = None, branches: int = 1) -> None:
        loaded = load_model(folder, weights=weights)
        if loaded.tokenizer is None:
            raise InvalidValue.of("model", folder, "a model folder with a tokenizer.json")
        self._context = loaded.model.context
        self.weights: str = getattr(loaded.model, "weights", None) or "unpacked"
        self._words = Words(loaded.tokenizer)
        room = _token_room(loaded.model)
        helper = None if draft is None else load_draft(draft, loaded, weights=weights)
        engine = build_engine(
            loaded.model,
            loaded.tokenizer,
            cache=CACHE,
            requests=REQUESTS,
            tokens=room,
            limits=EngineLimits(guesses=0 if helper is None else DRAFT_GUESSES, branches=branches),
            draft=helper,
        )
        self._loop = EngineLoop(engine)

    def generate(self, prompt: Prompt, sampling: Sampling, seconds: float | None) -> Generator[Chunk, None, None]:
        """The completion of a prompt, piece by piece; closing the generator cancels it."""
        ids = self._words.read(prompt)
        fields = sampling_fields(sampling)
        fields.setdefault("max_new_tokens", max(1, min(EngineSampling.max_new_tokens, self._context - len(ids))))
        deadline = None if seconds is None else time.monotonic() + seconds
        request = Request(
            id=uuid.uuid4().hex,
            token_ids=ids,
            source_ids=self._words.source(prompt),
            task=EngineSampling(**fields),
            deadline=deadline,
        )
        with closing(cast("Generator[Event, None, None]", self._loop.stream(request))) as events:
            for event in events:
                yield self._words.chunk(event)

    def stop(self) -> None:
        """End the thread; what still runs is cancelled."""
        self._loop.stop()


def _token_room(model: LanguageModel) -> int:
    """The tokens whose states fit STATE_BYTES, no more than all requests at full context need."""
    layers = model.state_specs().values()
    fixed = sum(state_bytes(specs, tokens=0, dtype="float32") for specs in layers)
    row = sum(state_bytes(specs, tokens=1, dtype="float32") for specs in layers) - fixed
    needed = REQUESTS * model.context
    return max(1, min(needed, STATE_BYTES // row)) if row else needed
