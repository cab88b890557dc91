"""Linear recurrences: whether they are right on this GPU, and how fast beside fla-core's and beside memory."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from attn_core import Steps
from attn_kernels_triton.scan.compute import by_chunks, by_token
from attn_variants.recurrences.recurrent import recurrent
from timing import copied_per_second, seconds
from torch import Tensor

FACTOR, ROUNDINGS, MORE = 1.25, 4, 32
"""More roundings for log decays, whose gradients are sums of differences that nearly cancel."""

THEIRS = {
    ("none", False): ("fla.ops.linear_attn", "chunk_linear_attn"),
    ("head", False): ("fla.ops.simple_gla", "chunk_simple_gla"),
    ("channel", False): ("fla.ops.gla", "chunk_gla"),
    ("none", True): ("fla.ops.delta_rule", "chunk_delta_rule"),
    ("head", True): ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    ("channel", True): ("fla.ops.kda", "chunk_kda"),
}
"""Modules and functions of fla-core by what fades and whether keys correct."""


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """Steps of one kind, numbers that bfloat16 holds: `sizes` of keys and values."""

    decay: str
    corrects: bool
    tokens: int = 300
    batch: int = 2
    heads: int = 2
    sizes: tuple[int, int] = (64, 64)
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        """What it is."""
        rule = "delta rule" if self.corrects else "additive"
        return f"recurrence, {rule}, decay {self.decay}, {self.sizes}, {self.dtype}, {self.tokens} tokens"

    def steps(self, device: str) -> Steps:
        """Random steps: keys of about length one, log decays down to -0.1."""
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
            decay=None if fades is None else rows(fades, **wide) * -0.1,
            strength=rows(**wide) if self.corrects else None,
        )


RIGHT = [
    Recurrence(decay=decay, corrects=corrects, dtype=dtype, sizes=sizes)
    for decay, corrects in THEIRS
    for dtype, sizes in ((torch.bfloat16, (128, 128)), (torch.float32, (64, 80)))
]
SMALL = [Recurrence(decay="channel", corrects=True, tokens=20, batch=1, sizes=(16, 16), dtype=torch.float32)]


def verdicts(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """For each kind and result of both kernels, the relative error against float64, and whether it is right."""
    for case in SMALL if small else RIGHT:
        steps = case.steps(device)
        exact = results(recurrent, cast(steps, torch.float64))
        usual, found = results(recurrent, cast(steps, case.dtype)), results(by_chunks, steps)
        again = results(by_chunks, steps)
        for name, truth in exact.items():
            same = torch.equal(found[name], again[name])
            yield judged(case.name, name, (found[name], usual[name], truth), same=same)
        with torch.no_grad():
            found_by_token = by_token(steps, None)[0]
        yield judged(case.name, "token by token", (found_by_token, usual["output"], exact["output"]), same=True)


def judged(case: str, what: str, three: tuple[Tensor, Tensor, Tensor], *, same: bool) -> dict[str, Any]:
    """The verdict on what was found, beside the plain computation in the same type and the truth."""
    found, usual, truth = three
    size = float(torch.linalg.vector_norm(truth)) or 1.0
    error, own = (float(torch.linalg.vector_norm(part.double() - truth)) / size for part in (found, usual))
    roundings = MORE if what.endswith("decay") else ROUNDINGS
    allowed = FACTOR * own + roundings * torch.finfo(usual.dtype).eps
    right = error <= allowed and same
    return {"case": case, "what": what, "error": error, "allowed": allowed, "same": same, "right": right}


def cast(steps: Steps, dtype: torch.dtype) -> Steps:
    """All of the steps in one type."""
    return Steps(*(None if part is None else part.to(dtype) for part in steps))


def results(compute: Callable[..., tuple[Tensor, Tensor]], steps: Steps) -> dict[str, Tensor]:
    """The output, and gradients of a fixed weighted sum of it."""
    leaves = {n: p.detach().requires_grad_() for n, p in steps._asdict().items() if p is not None}
    out, _ = compute(Steps(**leaves), None)
    probe = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=out.device).view_as(out).to(out.dtype)
    found = torch.autograd.grad(out, list(leaves.values()), probe)
    return {"output": out.detach(), **{f"gradient to {n}": g for n, g in zip(leaves, found, strict=True)}}


def tables(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Times of the forward and the backward pass, beside fla-core's where it is installed, and of decoding."""
    for decay, corrects in list(THEIRS)[: 1 if small else None]:
        shape = {"tokens": 32, "batch": 1} if small else {"tokens": 8192, "batch": 2, "heads": 16, "sizes": (128, 128)}
        dtype = torch.float32 if small else torch.bfloat16
        case = Recurrence(decay=decay, corrects=corrects, dtype=dtype, **shape)  # type: ignore[arg-type]
        steps = case.steps(device)
        ours = times(lambda given: by_chunks(given, None)[0], steps, device)
        row = {"case": case.name, "forward_ms": 1e3 * ours[0], "backward_ms": 1e3 * ours[1]}
        yield {**row, "fla": "not on a CPU" if small else beside_fla(case, steps, ours, device)}
    yield from decoding(device, small=small)


def times(run: Callable[[Steps], Tensor], steps: Steps, device: str) -> tuple[float, float]:
    """Times of the forward pass, and of the backward pass alone."""
    with torch.no_grad():
        forward = seconds(lambda: run(steps), device)
    leaves = Steps(*(None if part is None else part.detach().requires_grad_() for part in steps))
    out = run(leaves)
    change, given = torch.randn_like(out), [part for part in leaves if part is not None]
    return forward, seconds(lambda: torch.autograd.grad(out, given, change, retain_graph=True), device)


def beside_fla(case: Recurrence, steps: Steps, ours: tuple[float, float], device: str) -> dict[str, float] | str:
    """Times of fla-core's function divided by ours, and how far its output is from ours."""
    module, name = THEIRS[case.decay, case.corrects]
    try:
        function = getattr(importlib.import_module(module), name)
    except ImportError as error:
        return f"not installed: {error}"

    def run(given: Steps) -> Tensor:
        fades = None if given.decay is None else given.decay[..., 0] if case.decay == "head" else given.decay
        more = {"g": fades, "beta": given.strength}
        more = {key: part for key, part in more.items() if part is not None}
        if case.decay == "none" and not case.corrects:
            more["normalize"] = False
        out: Tensor = function(given.query, given.key, given.value, scale=1.0, **more)[0]
        return out

    try:
        with torch.no_grad():
            difference = run(steps).float() - by_chunks(steps, None)[0].float()
        theirs = times(run, steps, device)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        return f"refused: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return {"forward": theirs[0] / ours[0], "backward": theirs[1] / ours[1], "apart": float(difference.abs().max())}


def decoding(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """One token of 64 requests: the share of the copying speed at which memories are read and written."""
    copied = copied_per_second(device)
    for decay, corrects in THEIRS:
        batch, heads, size = (1, 2, 16) if small else (64, 32, 128)
        shape = {"batch": batch, "heads": heads, "sizes": (size, size)}
        case = Recurrence(decay=decay, corrects=corrects, tokens=1, **shape)  # type: ignore[arg-type]
        steps = case.steps(device)
        memory = torch.randn(batch, heads, size, size, device=device)
        with torch.no_grad():
            took = seconds(lambda given=steps, held=memory: by_token(given, held), device)
        moved = 2 * memory.nbytes
        yield {"case": f"decoding, {case.name}", "ms": 1e3 * took, "share_of_copy": moved / took / copied}
