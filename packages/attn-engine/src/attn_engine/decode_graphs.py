"""Decode steps that are captured as CUDA graphs: every sequence computes one token, and the inputs stay at fixed
addresses (`attn_core.stores.StaticDecode`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from attn_core.errors import NotGraphSafe
from attn_core.graph_safety import static_step
from attn_core.models import LanguageModel
from attn_core.stores import StateStore, StaticDecode, StaticStore
from torch import Tensor

from attn_engine.recorded_steps import RecordedSteps, Recorder

if TYPE_CHECKING:
    from attn_engine import sequence as sequences
    from attn_engine.scheduler import ScheduledChunk

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""The numbers of requests for which steps are recorded; beyond the last one, in increments of `SIZE_INCREMENT`."""
SIZE_INCREMENT = 32


class DecodeGraphs(RecordedSteps):
    """Decode steps of a model over a store, recorded by number of requests."""

    steps_name: ClassVar[str] = "decode steps"
    size_unit: ClassVar[str] = "requests"

    def __init__(self, model: LanguageModel, store: StateStore, recorder: Recorder, max_num_seqs: int) -> None:
        super().__init__(recorder, sizes_to(max_num_seqs))
        self._model = model
        self._store = store
        self._inputs: StaticDecode | None = None

    def run(self, chunks: Sequence[ScheduledChunk]) -> Tensor | None:
        """Hidden states [sequences, hidden_size] of a decode step, valid until the next step.

        None if it is not a decode step, or cannot be recorded. Raises whatever replaying a recorded step raises.
        """
        if any(chunk.length != 1 or chunk.draft.tokens for chunk in chunks):
            return None
        sequences = [chunk.sequence for chunk in chunks]
        return self._repeat(sequences, [sequence.tokens[sequence.computed] for sequence in sequences])

    def run_after(self, sequences: Sequence[sequences.Sequence], rows: Sequence[int], last: Tensor) -> Tensor | None:
        """Like `run`, for a step whose input tokens are known only to the device: `rows` of `last` [tokens], int64."""
        return self._repeat(sequences, rows, last)

    def _repeat(
        self, sequences: Sequence[sequences.Sequence], tokens: Sequence[int], last: Tensor | None = None
    ) -> Tensor | None:
        size = self.ready(len(sequences))
        if size is None:
            return None
        positions = [sequence.computed for sequence in sequences]
        self._static().load(tokens, positions, [sequence.number for sequence in sequences], size, last)
        return self.repeat(size, len(sequences))

    def load_padding(self, size: int) -> None:
        """See `RecordedSteps.load_padding`."""
        self._static().load((), (), (), size)

    def compute(self, size: int) -> Tensor:
        """See `RecordedSteps.compute`."""
        inputs = self._static()
        with static_step(self.owned):
            return self._model.step(inputs.tokens(size), inputs.batch(size), inputs.view(size))

    def _static(self) -> StaticDecode:
        if self._inputs is None:
            if not isinstance(self._store, StaticStore):
                raise NotGraphSafe(f"the cache ({type(self._store).__name__}) has no input buffers at fixed addresses")
            self._inputs = self._store.static_decode(self._sizes[-1], self._model.max_seq_len)
        return self._inputs


def sizes_to(most: int) -> tuple[int, ...]:
    """The numbers of requests, up to `most`, for which steps are recorded."""
    known = [*SIZES, *range(SIZES[-1] + SIZE_INCREMENT, most + SIZE_INCREMENT, SIZE_INCREMENT)]
    return (*(size for size in known if size < most), most)
