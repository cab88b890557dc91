"""Linear recurrences: correctness on this GPU, times, and decoding speed relative to the copy bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from attn_core.kernels.recurrence import Steps
from attn_kernels_triton.recurrence.compute import by_chunks, by_token
from attn_variants.mechanisms.recurrence_scan import recurrent
from timing import copied_per_second, seconds
from torch import Tensor

FACTOR, ROUNDINGS, MORE = 1.25, 4, 32
"""The allowed error; MORE roundings are allowed for log decays, whose gradients are sums with strong cancellation."""

OF_DECAYS = ("decay", "rate", "step_bias", "fade.0.weight", "fade.1.weight", "fade.1.bias")
"""The suffixes of the names of decays, and of the weights from which decays are computed."""

KINDS = [(decay, delta_rule) for delta_rule in (False, True) for decay in ("none", "head", "channel")]
"""The kinds of decay, without and with the delta rule: linear attention, RetNet, GLA; DeltaNet, Gated DeltaNet, KDA."""


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """Random steps of one kind of recurrence, exactly representable in bfloat16; `sizes` are those of keys and values.

    With `shared`, all sequences have the same decay; with `after`, the recurrence starts from a non-zero state.
    """

    decay: str
    delta_rule: bool
    tokens: int = 300
    batch: int = 2
    heads: int = 2
    sizes: tuple[int, int] = (64, 64)
    dtype: torch.dtype = torch.bfloat16
    shared: bool = False
    after: bool = False

    @property
    def name(self) -> str:
        """The description of the case in the report."""
        rule = "delta rule" if self.delta_rule else "additive"
        more = ", one decay for all" * self.shared + ", after others" * self.after
        return f"recurrence, {rule}, decay {self.decay}, {self.sizes}, {self.dtype}, {self.tokens} tokens{more}"

    def steps(self, device: str) -> Steps:
        """Random steps: keys with a norm of about one, log decays down to -0.1."""
        generator = torch.Generator(device).manual_seed(0)

        def rows(*size: int, make: Any = torch.randn, dtype: torch.dtype = self.dtype) -> Tensor:
            drawn: Tensor = make(self.batch, self.tokens, self.heads, *size, generator=generator, device=device)
            return drawn.bfloat16().to(dtype)

        key, value = self.sizes
        fades = {"none": None, "head": 1, "channel": key}[self.decay]
        wide = {"make": torch.rand, "dtype": torch.float32}
        return Steps(
            query=rows(key) * key**-0.5,
            key=rows(key) * key**-0.5,
            value=rows(value),
            decay=None if fades is None else rows(fades, **wide)[: 1 if self.shared else None] * -0.1,
            strength=rows(**wide) if self.delta_rule else None,
        )

    def before(self, device: str) -> Tensor | None:
        """The initial state; None for a zero state."""
        generator = torch.Generator(device).manual_seed(1)
        shape = (self.batch, self.heads, *self.sizes)
        return torch.randn(shape, generator=generator, device=device) if self.after else None


RIGHT = [
    *(
        Recurrence(decay=decay, delta_rule=delta_rule, dtype=dtype, sizes=sizes)
        for decay, delta_rule in KINDS
        for dtype, sizes in ((torch.bfloat16, (128, 128)), (torch.float32, (64, 80)))
    ),
    *(Recurrence(decay=decay, delta_rule=True, sizes=(128, 72), after=True) for decay in ("none", "head", "channel")),
    Recurrence(decay="head", delta_rule=False, shared=True, sizes=(256, 64)),
]
SMALL_SHAPE: dict[str, Any] = {"tokens": 20, "batch": 1, "sizes": (16, 16), "dtype": torch.float32}
SMALL = [
    Recurrence(decay="none", delta_rule=False, **SMALL_SHAPE),
    Recurrence(decay="head", delta_rule=False, shared=True, **SMALL_SHAPE),
    Recurrence(decay="channel", delta_rule=True, after=True, **SMALL_SHAPE),
]


def constant(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Verdicts on recurrences without decay."""
    return verdicts("none", device, small=small)


def by_head(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Verdicts on recurrences with one decay for each head."""
    return verdicts("head", device, small=small)


def by_channel(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Verdicts on recurrences with one decay for each channel."""
    return verdicts("channel", device, small=small)


def verdicts(decay: str, device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """For each kind and result of both kernels, the relative error against float64, and whether it is right."""
    for case in (case for case in (SMALL if small else RIGHT) if case.decay == decay):
        steps, before = case.steps(device), case.before(device)
        exact = results(recurrent, cast(steps, torch.float64), None if before is None else before.double())
        usual = results(recurrent, cast(steps, case.dtype), None if before is None else before.to(case.dtype))
        found, again = (results(by_chunks, steps, before) for _ in range(2))
        for name, truth in exact.items():
            same = torch.equal(found[name], again[name])
            yield judged(case.name, name, (found[name], usual[name], truth), same=same)
        with torch.no_grad():
            found_by_token = by_token(steps, before)[0]
        yield judged(case.name, "token by token", (found_by_token, usual["output"], exact["output"]), same=True)


def judged(case: str, what: str, three: tuple[Tensor, Tensor, Tensor], *, same: bool) -> dict[str, Any]:
    """The verdict on a result, given as (found, plain computation in the same type, exact)."""
    found, usual, truth = three
    size = float(torch.linalg.vector_norm(truth)) or 1.0
    error, own = (float(torch.linalg.vector_norm(part.double() - truth)) / size for part in (found, usual))
    roundings = MORE if what.endswith(OF_DECAYS) else ROUNDINGS
    allowed = FACTOR * own + roundings * torch.finfo(usual.dtype).eps
    right = error <= allowed and same
    return {"case": case, "what": what, "error": error, "allowed": allowed, "same": same, "right": right}


def cast(steps: Steps, dtype: torch.dtype) -> Steps:
    """The steps converted to one element type."""
    return Steps(*(None if part is None else part.to(dtype) for part in steps))


def results(compute: Callable[..., tuple[Tensor, Tensor]], steps: Steps, before: Tensor | None) -> dict[str, Tensor]:
    """The output and the final state, and the gradients of fixed weighted sums of both."""
    given = {**steps._asdict(), "before": before}
    leaves = {name: part.detach().requires_grad_() for name, part in given.items() if part is not None}
    outs = compute(Steps(**{name: part for name, part in leaves.items() if name != "before"}), leaves.get("before"))
    probes = [torch.linspace(-1, 1, out.numel(), device=out.device).to(out.dtype).view_as(out) for out in outs]
    found = torch.autograd.grad(outs, list(leaves.values()), probes)
    return {
        "output": outs[0].detach(),
        "memory": outs[1].detach(),
        **{f"gradient to {name}": part for name, part in zip(leaves, found, strict=True)},
    }


def timed_cases(*, small: bool) -> Iterator[Recurrence]:
    """The timed cases: one of each kind, with many tokens."""
    shape: dict[str, Any] = {"tokens": 32, "batch": 1, "dtype": torch.float32}
    if not small:
        shape = {"tokens": 8192, "batch": 2, "heads": 16, "sizes": (128, 128)}
    for decay, delta_rule in KINDS[: 1 if small else None]:
        yield Recurrence(decay=decay, delta_rule=delta_rule, **shape)


def tables(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """The times of the forward and the backward pass, and of decoding."""
    for case in timed_cases(small=small):
        forward, backward = times(lambda given: by_chunks(given, None)[0], case.steps(device), device)
        yield {"case": case.name, "forward_ms": 1e3 * forward, "backward_ms": 1e3 * backward}
    yield from decoding(device, small=small)


def times(run: Callable[[Steps], Tensor], steps: Steps, device: str) -> tuple[float, float]:
    """The times of the forward pass, and of the backward pass alone, in seconds."""
    with torch.no_grad():
        forward = seconds(lambda: run(steps), device)
    leaves = Steps(*(None if part is None else part.detach().requires_grad_() for part in steps))
    out = run(leaves)
    change, given = torch.randn_like(out), [part for part in leaves if part is not None]
    return forward, seconds(lambda: torch.autograd.grad(out, given, change, retain_graph=True), device)


def decoding(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Decoding of one token for 64 requests: the fraction of the copy bandwidth for reading and writing states."""
    copied = copied_per_second(device)
    for decay, delta_rule in KINDS:
        batch, heads, size = (1, 2, 16) if small else (64, 32, 128)
        shape = {"batch": batch, "heads": heads, "sizes": (size, size)}
        case = Recurrence(decay=decay, delta_rule=delta_rule, tokens=1, **shape)  # type: ignore[arg-type]
        steps = case.steps(device)
        memory = torch.randn(batch, heads, size, size, device=device)
        with torch.no_grad():
            took = seconds(lambda given=steps, held=memory: by_token(given, held), device)
        moved = 2 * memory.nbytes
        yield {"case": f"decoding, {case.name}", "ms": 1e3 * took, "share_of_copy": moved / took / copied}
