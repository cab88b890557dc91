"""Operations on rows as their papers define them, and what three computations make of a call."""

from __future__ import annotations

import torch
from bounds import ROUNDINGS, require_close
from torch import Tensor
from torch.nn import functional


def normed(rows: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """x / √(mean(x²) + eps) · g, in float32 at least (arXiv 1910.07467, equation 4)."""
    wide = rows if rows.dtype == torch.float64 else rows.float()
    out = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()
    return (out if gain is None else out * gain).to(rows.dtype)


def turned(rows: Tensor, angles: Tensor, *, interleaved: bool) -> Tensor:
    """Pairs as complex numbers times e^(i angle), angles [tokens, pairs] (arXiv 2104.09864, section 3.2.2)."""
    pairs = angles.shape[-1]
    wide = rows if rows.dtype == torch.float64 else rows.float()
    head, rest = wide[..., : 2 * pairs], rows[..., 2 * pairs :]
    x, y = (head[..., ::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    out = torch.complex(x, y) * torch.polar(torch.ones_like(angles), angles).to(x.dtype.to_complex())[:, None]
    joined = torch.view_as_real(out).flatten(-2) if interleaved else torch.cat([out.real, out.imag], -1)
    return torch.cat([joined.to(rows.dtype), rest], -1)


ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda rows: functional.gelu(rows, approximate="tanh"),
}


def leaf(*shape: int, seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Numbers N(0, scale²) that the type holds, in float64."""
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    return drawn.to(dtype).double()


def results(compute, leaves: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The outputs of leaves in a type, and gradients of a fixed weighted sum of them to each leaf."""
    own = [part.to(dtype).requires_grad_() for part in leaves]
    found = compute(*own)
    outs = found if isinstance(found, tuple) else (found,)
    probes = [torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out).to(out.dtype) for out in outs]
    return [*(out.detach() for out in outs), *torch.autograd.grad(outs, own, probes)]


def require_right(ours, plain, leaves: list[Tensor], dtype: torch.dtype, roundings: int = ROUNDINGS) -> None:
    """Fail unless outputs and gradients are nearly as close to float64 as those of the plain computation."""
    exact, usual = results(plain, leaves, torch.float64), results(plain, leaves, dtype)
    for place, found in enumerate(results(ours, leaves, dtype)):
        assert found.dtype == usual[place].dtype
        if exact[place].numel():
            require_close(found, usual[place], exact[place], f"result {place}", roundings)
