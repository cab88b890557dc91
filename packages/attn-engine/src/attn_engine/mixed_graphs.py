"""Steps with prompts that are captured as CUDA graphs: prompt chunks of any length, with or without decode tokens.

The inputs stay at fixed addresses (`attn_core.stores.StaticMixed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from attn_core.errors import NotGraphSafe
from attn_core.graph_safety import static_step
from attn_core.models import LanguageModel
from attn_core.stores import StateStore, StaticMixed, StaticMixedStore
from torch import Tensor

from attn_engine.recorded_steps import RecordedSteps, Recorder

if TYPE_CHECKING:
    from attn_engine.scheduler import ScheduledChunk

MIN_TOKENS = 16
"""The number of tokens of the smallest recorded step, and the smallest difference between two sizes."""


class MixedLimits(NamedTuple):
    """The maximum numbers of tokens and of requests of a recorded step."""

    tokens: int
    requests: int


class MixedGraphs(RecordedSteps):
    """Steps with prompts of a model over a store, recorded by number of tokens."""

    steps_name: ClassVar[str] = "steps with prompts"
    size_unit: ClassVar[str] = "tokens"

    def __init__(self, model: LanguageModel, store: StateStore, recorder: Recorder, limits: MixedLimits) -> None:
        super().__init__(recorder, token_sizes_to(limits.tokens))
        self._model = model
        self._store = store
        self._limits = limits
        self._inputs: StaticMixed | None = None

    def run(self, chunks: Sequence[ScheduledChunk]) -> Tensor | None:
        """Hidden states [tokens, hidden_size] of a step, valid until the next step.

        None if the step cannot be recorded or exceeds the limits. Raises whatever replaying a recorded step raises.
        """
        count = sum(chunk.rows for chunk in chunks)
        if len(chunks) > self._limits.requests or any(chunk.draft.is_tree for chunk in chunks):
            return None
        size = self.ready(count)
        if size is None:
            return None
        tokens = list[int]()
        for chunk in chunks:
            tokens += chunk.sequence.tokens[chunk.start : chunk.start + chunk.length]
            tokens += chunk.draft.tokens
        contexts, lengths = [chunk.start for chunk in chunks], [chunk.rows for chunk in chunks]
        self._static().load(tokens, contexts, lengths, [chunk.sequence.number for chunk in chunks], size)
        return self.repeat(size, count)

    def load_padding(self, size: int) -> None:
        """See `RecordedSteps.load_padding`."""
        self._static().load((), (), (), (), size)

    def compute(self, size: int) -> Tensor:
        """See `RecordedSteps.compute`."""
        inputs = self._static()
        with static_step(self.owned):
            return self._model.step(inputs.tokens(size), inputs.batch(size), inputs.view(size))

    def _static(self) -> StaticMixed:
        if self._inputs is None:
            if not isinstance(self._store, StaticMixedStore):
                raise NotGraphSafe(f"the cache ({type(self._store).__name__}) has no input buffers at fixed addresses")
            limits = self._limits
            self._inputs = self._store.static_mixed(limits.tokens, limits.requests, self._model.max_seq_len)
        return self._inputs


def token_sizes_to(most: int) -> tuple[int, ...]:
    """The numbers of tokens, up to `most`, for which steps are recorded: each is at most a quarter, or `MIN_TOKENS`
    tokens, larger than the one before."""
    found, size = list[int](), MIN_TOKENS
    while size < most:
        found.append(size)
        size += max(MIN_TOKENS, 1 << (size.bit_length() - 3))
    return (*found, most) if most else ()
