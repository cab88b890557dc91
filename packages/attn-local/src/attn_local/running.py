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
from attn_core.errors import InvalidValue
from attn_engine import EngineConfig, EngineLoop, Request, RequestOutput, SamplingParams, build_engine
from attn_models.loading import load_draft, load_model

from attn_local.words import Words, sampling_fields

MAX_NUM_SEQS = 32


class RunningModel:
    """The model in `folder`, with the one in `draft` to guess for it; raises what loading them raises, `InvalidValue`
    where it has no tokenizer, `Incompatible` for a draft of other tokens.

    `weights` is one of `attn_core.kernels.linear.WEIGHT_CHOICES`, `branches` in how many ways a guess may go on.
    """

    def __init__(self, folder: Path, weights: str = "auto", draft: Path | None = None, branches: int = 1) -> None:
        loaded = load_model(folder, weights=weights)
        if loaded.tokenizer is None:
            raise InvalidValue.of("model", folder, "a model folder with a tokenizer.json")
        self.weights: str = getattr(loaded.model, "weights", None) or "unpacked"
        self._words = Words(loaded.tokenizer)
        helper = None if draft is None else load_draft(draft, loaded, weights=weights)
        engine = build_engine(
            loaded.model,
            loaded.tokenizer,
            EngineConfig(max_num_seqs=MAX_NUM_SEQS, speculative_tree_width=branches),
            draft_model=helper,
        )
        self._loop = EngineLoop(engine)

    def generate(self, prompt: Prompt, sampling: Sampling, seconds: float | None) -> Generator[Chunk, None, None]:
        """The completion of a prompt, piece by piece; closing the generator cancels it."""
        ids = self._words.read(prompt)
        deadline = None if seconds is None else time.monotonic() + seconds
        request = Request(
            id=uuid.uuid4().hex,
            token_ids=ids,
            encoder_token_ids=self._words.source(prompt),
            params=SamplingParams(**sampling_fields(sampling)),
            deadline=deadline,
        )
        with closing(cast("Generator[RequestOutput, None, None]", self._loop.stream(request))) as outputs:
            for output in outputs:
                yield self._words.chunk(output)

    def stop(self) -> None:
        """End the thread; what still runs is cancelled."""
        self._loop.stop()
