"""What an engine has done since it began."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core.stores import Usage

from attn_engine.limits import Load
from attn_engine.scheduler import Scheduler


@dataclass
class Tally:
    """Counts of tokens."""

    computed: int = 0
    generated: int = 0
    guessed: int = 0
    accepted: int = 0

    def load(self, scheduler: Scheduler, usage: Usage) -> Load:
        """How busy the engine is, with what it has done."""
        return Load(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            state_tokens_used=usage.tokens,
            state_tokens_total=usage.tokens_total,
            preemptions=scheduler.preemptions,
            reloaded_tokens=scheduler.offload.reloaded_tokens,
            offloaded_bytes=scheduler.offload.bytes,
            computed_tokens=self.computed,
            generated_tokens=self.generated,
            shared_tokens=scheduler.shared_tokens,
            guessed_tokens=self.guessed,
            accepted_tokens=self.accepted,
        )
