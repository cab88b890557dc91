"""Row-wise operations (norms, rotary positions, gates, losses): correctness on this GPU, and speed compared with torch,
torch.compile and the copy bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from attention import said_of
from attn_core import Rotary
from attn_core.kernels.rowwise import Targets
from attn_kernels_triton.backends.rowwise import TritonCrossEntropy
from attn_kernels_triton.rowwise.gate import gated
from attn_kernels_triton.rowwise.norm import rms_norm, rms_norm_sum
from attn_kernels_triton.rowwise.rotary import rotate
from attn_models import losses
from attn_models.losses import mean_loss
from attn_variants.compute.rotary import cos_sin_of, half_swapped, pair_swapped
from recurrences import judged
from timing import copied_per_second, seconds
from torch import Tensor
from torch.nn import functional

EPS = 1e-6
Compute = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class RowCase:
    """An operation on input tensors of these shapes, with attn's implementation and torch's.

    `forward` and `backward` are the memory traffic as a multiple of the first input's size; 0 if it is not measured.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    ours: Compute
    plain: Compute
    forward: int = 0
    backward: int = 0

    def leaves(self, device: str, dtype: torch.dtype) -> list[Tensor]:
        """Random input tensors, exactly representable in bfloat16."""
        generator = torch.Generator(device).manual_seed(0)
        drawn = (torch.randn(shape, generator=generator, device=device) for shape in self.shapes)
        return [part.bfloat16().to(dtype) for part in drawn]


SMALL, JUDGED, TIMED = (8, 32, 48, 70), (515, 4096, 14336, 32003), (8192, 4096, 14336, 128256)
"""Rows, width, intermediate width and vocabulary: for Triton's interpreter, for verdicts, and for timing (a model of
eight billion parameters)."""


def cases(device: str, sizes: tuple[int, int, int, int]) -> list[RowCase]:
    """The cases: norms, rotary positions, gates and losses."""
    rows, width, inner, vocabulary = sizes
    small = sizes == SMALL
    many, wide = (rows, width), (rows, inner)
    return [
        RowCase(
            name=f"norm {many}",
            shapes=(many, (width,)),
            ours=lambda x, g: rms_norm(x, g, EPS),
            plain=norm,
            forward=2,
            backward=3,
        ),
        RowCase(
            name=f"norm of a sum {many}",
            shapes=(many, many, (width,)),
            ours=lambda x, a, g: rms_norm_sum(x, a, g, EPS),
            plain=lambda x, a, g: (x + a, norm(x + a, g)),
            forward=4,
            backward=4,
        ),
        RowCase(
            name=f"SwiGLU {wide}",
            shapes=(wide, wide),
            ours=lambda gate, up: gated(gate, up, "silu"),
            plain=lambda gate, up: functional.silu(gate) * up,
            forward=3,
            backward=5,
        ),
        RowCase(
            name=f"GEGLU {wide}",
            shapes=(wide, wide),
            ours=lambda gate, up: gated(gate, up, "gelu"),
            plain=lambda gate, up: functional.gelu(gate) * up,
            forward=3,
            backward=5,
        ),
        *(turning(device, interleaved=pairs, part=part, small=small) for pairs in (False, True) for part in (1.0, 0.5)),
        *losing(device, (rows, width, vocabulary)),
    ]


def norm(rows: Tensor, gain: Tensor) -> Tensor:
    """torch's RMSNorm."""
    return functional.rms_norm(rows, rows.shape[-1:], gain, EPS)


def turning(device: str, *, interleaved: bool, part: float, small: bool) -> RowCase:
    """The case of rotary positions on the fraction `part` of each head."""
    shape = (1, 9, 3, 16) if small else (2, 4096, 32, 128)
    size = int(shape[-1] * part)
    places = torch.arange(shape[1], device=device)
    cos_sin = cos_sin_of(Rotary(interleaved=interleaved), size, places, torch.float32)
    wide = cos_sin_of(Rotary(interleaved=interleaved), size, places, torch.float64)
    swapped = pair_swapped if interleaved else half_swapped

    def plain(rows: Tensor) -> Tensor:
        cosines, sines = wide if rows.dtype == torch.float64 else cos_sin
        head = rows[..., :size]
        return torch.cat([(head * cosines + swapped(head) * sines).to(rows.dtype), rows[..., size:]], dim=-1)

    return RowCase(
        name=f"rotary, {'neighbours' if interleaved else 'halves'}, {size} of {shape}",
        shapes=(shape,),
        ours=lambda rows: rotate(rows, *cos_sin, interleaved=interleaved),
        plain=plain,
        forward=2,
        backward=2,
    )


def losing(device: str, sizes: tuple[int, int, int]) -> Iterator[RowCase]:
    """The cases of cross-entropy losses of hidden states [rows, width] under an output matrix, whole and in chunks."""
    rows, width, vocabulary = sizes
    ids = torch.randint(vocabulary, (rows,), device=device, generator=torch.Generator(device).manual_seed(1))
    ids[::7] = -100
    for targets in (Targets(), Targets(smoothing=0.1, cap=30.0)):

        def ours(hidden: Tensor, weight: Tensor, targets: Targets = targets) -> Tensor:
            return losses.linear_cross_entropy(hidden, weight * width**-0.5, ids, targets)

        def plain(hidden: Tensor, weight: Tensor, targets: Targets = targets) -> Tensor:
            return mean_loss(hidden @ (weight * width**-0.5).T, ids, targets)

        shapes = ((rows, width), (vocabulary, width))
        yield RowCase(name=f"losses {sizes}, {targets}", shapes=shapes, ours=ours, plain=plain)


def found_by_us(small: bool) -> None:  # noqa: FBT001 -- one fact
    """Give the losses their kernel directly: on a bare machine no package is installed, so none would be found."""
    kernel = TritonCrossEntropy()

    def row_result(_kind: Any, _form: str, compute: Callable[[TritonCrossEntropy], Tensor], *_: Any) -> Tensor:
        return compute(kernel)

    losses.row_result = row_result  # type: ignore[assignment]
    if small:
        losses.LOGITS["cpu"] = 200


def verdicts(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """For each case and result, the relative error against float64, and whether it is right."""
    found_by_us(small)
    for case in cases(device, SMALL if small else JUDGED):
        for dtype in (torch.float32,) if small else (torch.bfloat16, torch.float32):
            leaves = case.leaves(device, dtype)
            exact = results(case.plain, [part.double() for part in leaves])
            usual, found, again = (results(run, leaves) for run in (case.plain, case.ours, case.ours))
            for place, truth in enumerate(exact):
                same = torch.equal(found[place], again[place])
                yield judged(f"{case.name}, {dtype}", str(place), (found[place], usual[place], truth), same=same)


def results(run: Compute, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The outputs, and the gradients of a fixed weighted sum of them."""
    own = [part.detach().requires_grad_() for part in leaves]
    outs = outputs(run, own)
    found = torch.autograd.grad(outs, own, [probe(out) for out in outs])
    return [*(out.detach() for out in outs), *found]


def outputs(run: Compute, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The outputs as a tuple, also if there is only one."""
    found = run(*leaves)
    return found if isinstance(found, tuple) else (found,)


def probe(out: Tensor) -> Tensor:
    """The weights of an output in the sum: from -1 to 1, or 1 for a single number."""
    weights = torch.linspace(-1, 1, out.numel(), device=out.device) if out.numel() > 1 else torch.ones(1)
    return weights.to(out.device, out.dtype).view_as(out)


def tables(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """The times of both passes compared with torch's, the fraction of the copy bandwidth, and the peak memory."""
    found_by_us(small)
    copied = copied_per_second(device)
    for case, leaves in timed_cases(device, small=small):
        ours, theirs = times(case.ours, leaves, device), times(case.plain, leaves, device)
        row: dict[str, Any] = {"case": case.name, "forward_ms": 1e3 * ours[0], "both_ms": 1e3 * ours[1]}
        row["torch"] = {"forward": theirs[0] / ours[0], "both": theirs[1] / ours[1]}
        if device == "cuda":
            row["peak_bytes"] = {name: peak(run, leaves) for name, run in (("ours", case.ours), ("torch", case.plain))}
        if case.forward:
            moved = leaves[0].nbytes
            row["share_of_copy"] = case.forward * moved / ours[0] / copied
            row["share_of_copy_both"] = (case.forward + case.backward) * moved / ours[1] / copied
        yield row


def compiled(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """The times of torch.compile's programs for both passes, divided by attn's."""
    found_by_us(small)
    for case, leaves in timed_cases(device, small=small):
        if device != "cuda":
            yield {"case": case.name, "beside": "torch.compile", "refused": "not on a CPU"}
            continue
        torch.compiler.reset()
        try:
            theirs = times(torch.compile(case.plain), leaves, device)
        except Exception as error:  # noqa: BLE001 -- whatever fails in a peer costs this row alone
            yield {"case": case.name, "beside": "torch.compile", "refused": said_of(error)}
            continue
        ours = times(case.ours, leaves, device)
        ratios = {"forward": theirs[0] / ours[0], "both": theirs[1] / ours[1]}
        yield {"case": case.name, "beside": "torch.compile", **ratios}


def timed_cases(device: str, *, small: bool) -> Iterator[tuple[RowCase, list[Tensor]]]:
    """The timed cases with their input tensors."""
    for case in cases(device, SMALL if small else TIMED):
        yield case, case.leaves(device, torch.float32 if small else torch.bfloat16)


def times(run: Compute, leaves: Sequence[Tensor], device: str) -> tuple[float, float]:
    """The times of the forward pass without gradients, and of both passes, in seconds."""
    with torch.no_grad():
        forward = seconds(lambda: run(*leaves), device)
    own = [part.detach().requires_grad_() for part in leaves]
    changes = [torch.ones_like(out) for out in outputs(run, own)]
    return forward, seconds(lambda: torch.autograd.grad(outputs(run, own), own, changes), device)


def peak(run: Compute, leaves: Sequence[Tensor]) -> int:
    """The peak memory of both passes beyond their operands, in bytes."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results(run, leaves)
    return torch.cuda.max_memory_allocated() - before
