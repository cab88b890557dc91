"""Forward passes on a CPU whose results do not depend on what else is computed: batch invariance, bit for bit."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from contextvars import Token
from functools import cache
from typing import Any, cast

import torch
from attn_core.errors import Incompatible
from attn_core.kernels.base import INVARIANT
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from attn_kernels_cpu.library import library
from attn_kernels_cpu.products import activated, linear, matrix
from attn_kernels_cpu.rowwise import Norm

aten = torch.ops.aten


class BatchInvariant(TorchFunctionMode):
    """A mode in which every number of a row is computed by the same operations in the same order, alone or with others.

    PyTorch chooses the order of sums by the number of rows, and computes the last elements of a tensor by other
    instructions. Here sums and products add up their terms one after the other, so that terms which are zero, such as
    those of masked keys, change nothing wherever they are. Kernels are used only if they do the same (see
    `attn_core.kernels.base.batch_invariant`). 16-bit elements are computed in float32 and rounded once. Gradients are
    those of PyTorch's functions: the mode is for forward passes.

    Raises `Incompatible` for an operation without such a computation, by its name, and for float64.
    """

    def __init__(self) -> None:
        super().__init__()
        self._outer: list[Token[bool]] = []
        self._operations = Operations()  # type: ignore[no-untyped-call]

    def __enter__(self) -> BatchInvariant:
        self._outer.append(INVARIANT.set(True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        INVARIANT.reset(self._outer.pop())

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Run a function of PyTorch, with the replacements of its operations if it has any."""
        if func in EXACT_FUNCTIONS or func.__name__ == "__get__":
            return func(*args, **(kwargs or {}))
        if func in DIRECT or (func in UNTRACKED and not torch.is_grad_enabled()):
            return (DIRECT.get(func) or UNTRACKED[func])(*args, **(kwargs or {}))
        with self._operations:
            return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The part of `BatchInvariant` that replaces PyTorch's operations, of which its functions are composed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Run the replacement of an operation, if it has one, or the operation itself if its results are exact."""
        own = computation_of(func)
        if own is not None:
            return own(*args, **(kwargs or {}))
        with self:
            return func._op_dk(COMPOSITE, *args, **(kwargs or {}))  # noqa: SLF001 -- PyTorch's own composition


COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd  # noqa: SLF001 -- PyTorch has no public name for it


@cache
def computation_of(func: Any) -> Callable[..., Any] | None:
    """The batch-invariant computation of an operation of PyTorch: its replacement in `OWN`, or itself if its results
    are exact or those of each element alone; None if it is composed of others. Raises `Incompatible` for any other."""
    if func in OWN:
        return OWN[func]
    packet = func.overloadpacket.__name__
    if func.is_view or packet.removesuffix("_") in EXACT:
        return func  # type: ignore[no-any-return]
    new = getattr(getattr(aten, packet.removesuffix("_"), None), func._overloadname, None)  # noqa: SLF001
    if packet.endswith("_") and new in OWN:
        return lambda rows, *args, **kwargs: rows.copy_(OWN[new](rows, *args, **kwargs))
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), COMPOSITE):  # noqa: SLF001
        return None
    raise Incompatible(f"batch_invariant: {func} has no batch-invariant computation", operation=str(func))


def products(left: Tensor, right: Tensor) -> Tensor:
    """The products [batch, rows, columns] of matrices [batch, rows, depth] and [batch, depth, columns], each element
    one chain of fused multiply-adds in the order of depth, in the dtype of `left`."""
    wide, other = (_in_lines(part) for part in (left, right))
    out = torch.empty(left.shape[0], left.shape[1], right.shape[2])
    sizes = left.shape[1], right.shape[2], left.shape[2], torch.get_num_threads()
    steps = (part.stride(0) for part in (wide, other))
    library().attn_products(
        ctypes.byref(matrix(wide[0])), ctypes.byref(matrix(other[0])), out.data_ptr(), len(out), *steps, *sizes
    ) if out.numel() else None
    return out.to(left.dtype)


def _in_lines(rows: Tensor) -> Tensor:
    """[batch, rows, columns] in float32, copied unless its rows or its columns are contiguous."""
    wide = rows.float()
    return wide if 1 in wide.stride()[1:] else wide.contiguous()


def _mm(left: Tensor, right: Tensor) -> Tensor:
    return products(left[None], right[None])[0]


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002 -- torch's name
    if input.dtype is weight.dtype is torch.float32:
        return linear(input, weight, bias)
    with Operations():  # type: ignore[no-untyped-call]
        return functional.linear(input, weight, bias)


def _matmul(input: Tensor, other: Tensor) -> Tensor:  # noqa: A002 -- torch's name
    if input.dim() < 2 or other.dim() < 2:
        with Operations():  # type: ignore[no-untyped-call]
            return torch.matmul(input, other)
    batch, left, right = input.shape[:-2], input, other
    if batch != other.shape[:-2]:
        batch = torch.broadcast_shapes(batch, other.shape[:-2])  # type: ignore[no-untyped-call]
        left, right = (part.expand(*batch, -1, -1) for part in (input, other))
    left, right = (part.reshape(-1, *part.shape[-2:]) for part in (left, right))
    return products(left, right).view(*batch, input.shape[-2], other.shape[-1])


def _addmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _mm(left, right) * alpha + bias * beta


def _baddbmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return products(left, right) * alpha + bias * beta


def _total(rows: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:  # noqa: FBT001, FBT002
    """The sums over some axes, each in the order of its elements."""
    if not rows.is_floating_point():
        exact: Tensor = aten.sum.dim_IntList(rows, dim, keepdim, dtype=dtype)
        return exact
    axes = sorted(axis % max(1, rows.dim()) for axis in ([dim] if isinstance(dim, int) else dim or range(rows.dim())))
    kept = [axis for axis in range(rows.dim()) if axis not in axes]
    shape = [rows.shape[axis] for axis in kept]
    depth = math.prod(rows.shape[axis] for axis in axes)
    flat = rows.permute(*kept, *axes).reshape(math.prod(shape), depth)
    found = _mm(torch.ones(1, depth), flat.float().T)[0].view(shape)
    if keepdim:
        found = found.view([1 if axis in axes else size for axis, size in enumerate(rows.shape)])
    return found.to(dtype or rows.dtype)


def _mean(rows: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:  # noqa: FBT001, FBT002
    found = _total(rows.float(), dim, keepdim)
    return (found / (rows.numel() / max(1, found.numel()))).to(dtype or rows.dtype)


def _variance_mean(
    rows: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    middle = _mean(rows, dim, keepdim=True)
    squares = _total((rows - middle).square(), dim, keepdim)
    count = rows.numel() / max(1, middle.numel()) - (1 if correction is None else correction)
    return squares / count, middle.view(squares.shape)


def _softmax(rows: Tensor, dim: int, half_to_float: bool) -> Tensor:  # noqa: FBT001
    return _by_rows("attn_softmax", rows, dim).to(torch.float32 if half_to_float else rows.dtype)


def _safe_softmax(rows: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    wide = rows if dtype is None else rows.to(dtype)
    return _softmax(wide, dim, half_to_float=False).masked_fill((wide == -math.inf).all(dim, keepdim=True), 0)


def _log_softmax(rows: Tensor, dim: int, half_to_float: bool) -> Tensor:  # noqa: FBT001
    return _by_rows("attn_log_softmax", rows, dim).to(torch.float32 if half_to_float else rows.dtype)


def _by_rows(function: str, rows: Tensor, dim: int) -> Tensor:
    """A function of native/kernels.cpp of each row along an axis, in float32."""
    wide = rows.float().transpose(dim, -1).contiguous()
    out = torch.empty_like(wide)
    size = wide.shape[-1] if wide.dim() else 1
    sizes = wide.numel() // max(1, size), size
    getattr(library(), function)(wide.data_ptr(), *sizes, out.data_ptr(), torch.get_num_threads())
    return out.transpose(dim, -1)


def _logsumexp(rows: Tensor, dim: Any, keepdim: bool = False) -> Tensor:  # noqa: FBT001, FBT002
    top = rows.amax(dim, keepdim=True)
    top = top.where(top.isfinite(), 0)
    found = _total((rows - top).exp(), dim, keepdim=True).log() + top
    return found if keepdim else found.squeeze(dim)


def _vector_norm(rows: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:  # noqa: A002, FBT001, FBT002
    if ord != 2:
        raise Incompatible(f"batch_invariant: a norm of order {ord} has no batch-invariant computation")
    return _total(rows.float().square(), dim, keepdim).sqrt().to(dtype or rows.dtype)


def _layer_norm(
    rows: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    axes = list(range(-len(shape), 0))
    wide = rows.float()
    middle = _mean(wide, axes, keepdim=True)
    apart = wide - middle
    inverse = torch.rsqrt(_mean(apart.square(), axes, keepdim=True) + eps)
    out = apart * inverse
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias).to(rows.dtype), middle, inverse


def _rms_norm(
    input: Tensor,  # noqa: A002 -- torch's name
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    rows = input.float().reshape(-1, math.prod(normalized_shape))
    gain = rows.new_ones(rows.shape[1]) if weight is None else weight.float().flatten()
    least = torch.finfo(input.dtype).eps if eps is None else eps
    out = Norm.apply(rows.contiguous(), None, gain.contiguous(), least)[1]  # type: ignore[no-untyped-call]
    return cast("Tensor", out.view(input.shape).to(input.dtype))


def _addcmul(rows: Tensor, left: Tensor, right: Tensor, *, value: float = 1) -> Tensor:
    return rows + (left * right if value == 1 else left * right * value)


def _sigmoid(rows: Tensor) -> Tensor:
    return (1 / (1 + (-rows.float()).exp())).to(rows.dtype)


def _silu(input: Tensor, inplace: bool = False) -> Tensor:  # noqa: A002, ARG001, FBT001, FBT002 -- torch's names
    return activated(input.float(), "silu").to(input.dtype)


def _gelu(rows: Tensor, *, approximate: str = "none") -> Tensor:
    return activated(rows.float(), "gelu_tanh" if approximate == "tanh" else "gelu").to(rows.dtype)


def _softplus(rows: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    scaled = rows * beta
    return rows.where(scaled > threshold, scaled.exp().log1p() / beta)


def _elu(rows: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    return scale * rows.where(rows > 0, alpha * (rows * input_scale).expm1())


def _power(base: Any, exponent: Any) -> Tensor:
    if isinstance(exponent, (int, float)) and exponent in SIMPLE:
        exact: Tensor = aten.pow.Tensor_Scalar(base, exponent)
        return exact
    powers: Tensor = (torch.as_tensor(base).log() * exponent).exp()
    return powers


def _solve_triangular(
    matrix: Tensor, rows: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:
    """By forward substitution, for a lower matrix with ones on its diagonal."""
    if upper or not left or not unitriangular:
        raise Incompatible("batch_invariant: linalg_solve_triangular needs a lower unitriangular matrix at the left")
    solved = rows.clone()
    for row in range(1, rows.shape[-2]):
        known = (part.flatten(0, -3) for part in (matrix[..., row : row + 1, :row], solved[..., :row, :]))
        solved[..., row, :] -= products(*known).view(solved[..., row, :].shape)
    return solved


SIMPLE = (0, 0.5, -0.5, 1, -1, 2, -2, 3)
"""Exponents that PyTorch computes by multiplications, divisions and square roots."""


OWN: Mapping[Any, Callable[..., Any]] = {
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: products,
    aten.baddbmm.default: _baddbmm,
    aten.mv.default: lambda left, right: _mm(left, right[:, None])[:, 0],
    aten.dot.default: lambda left, right: _mm(left[None], right[:, None])[0, 0],
    aten.sum.default: _total,
    aten.sum.dim_IntList: _total,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.var_mean.correction: _variance_mean,
    aten.var.correction: lambda *args, **kwargs: _variance_mean(*args, **kwargs)[0],
    aten._softmax.default: _softmax,  # noqa: SLF001
    aten._safe_softmax.default: _safe_softmax,  # noqa: SLF001
    aten._log_softmax.default: _log_softmax,  # noqa: SLF001
    aten.logsumexp.default: _logsumexp,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.native_layer_norm.default: _layer_norm,
    aten.addcmul.default: _addcmul,
    aten.sigmoid.default: _sigmoid,
    aten.silu.default: _silu,
    aten.gelu.default: _gelu,
    aten.softplus.default: _softplus,
    aten.elu.default: _elu,
    aten.linalg_solve_triangular.default: _solve_triangular,
    aten.prod.dim_int: lambda rows, dim, keepdim=False: (
        rows.cumprod(dim).narrow(dim, -1, 1).squeeze(() if keepdim else dim)
    ),
    aten.exp2.default: lambda rows: (rows * math.log(2)).exp(),
    aten.pow.Tensor_Scalar: _power,
    aten.pow.Tensor_Tensor: _power,
    aten.pow.Scalar: _power,
}
"""Operations of PyTorch whose results depend on other elements, and their replacements."""

DIRECT: Mapping[Any, Callable[..., Any]] = {
    functional.linear: _linear,
    functional.silu: _silu,
    functional.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
}
UNTRACKED: Mapping[Any, Callable[..., Any]] = {
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.addcmul: _addcmul,
    functional.layer_norm: lambda rows, shape, weight=None, bias=None, eps=1e-5: _layer_norm(
        rows, shape, weight, bias, eps
    )[0],
}
"""Frequent functions, and what the replacements of their operations compute: always, and only without gradients."""

_EXACT_OF_ELEMENTS = """
add sub rsub mul div neg abs sign sgn exp log log2 log10 log1p expm1 sin cos tanh erf sqrt rsqrt reciprocal square relu
leaky_relu threshold clamp clamp_min clamp_max maximum minimum eq ne lt le gt ge isnan isinf isfinite logical_and
logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor bitwise_left_shift floor ceil round
bitwise_right_shift trunc remainder floor_divide where masked_fill isin addcdiv lerp xlogy log_sigmoid_forward
"""
_EXACT_IN_ORDER = """
empty zeros ones full arange scalar_tensor new_zeros new_empty new_ones new_full zeros_like ones_like empty_like eye set
full_like empty_strided new_empty_strided rand randn bernoulli uniform normal random randint clone copy _to_copy resize
detach lift_fresh fill zero cat stack index index_select index_put _index_put_impl gather scatter embedding topk sort
constant_pad_nd repeat roll flip tril triu argsort amax amin max min aminmax argmax argmin any all cumsum cummax
logcumsumexp nonzero unique_consecutive bincount nll_loss_forward _local_scalar_dense is_same_size searchsorted
bucketize equal index_copy _unsafe_view index_fill masked_scatter slice_scatter select_scatter scatter_add index_add
diag_embed linalg_cholesky_ex _cholesky_solve_helper cholesky_solve _linalg_check_errors
_assert_async
"""
EXACT = frozenset((_EXACT_OF_ELEMENTS + _EXACT_IN_ORDER).split())
"""Names of operations of PyTorch that compute each element by the same instructions wherever it is, and of those that
move, choose or order elements, add them up from the first on, or solve each matrix of a batch by a call of LAPACK."""

_COMPOSED = """
view reshape transpose permute t expand expand_as view_as unsqueeze squeeze flatten unflatten split chunk unbind narrow
select swapaxes movedim contiguous to float type_as size dim stride numel element_size is_floating_point data_ptr pad
is_contiguous tolist item hstack vstack tensor as_tensor is_tensor is_grad_enabled take_along_dim repeat_interleave
__getitem__ __setitem__ __len__ __bool__ __int__ __float__ requires_grad_ __neg__ __eq__ __ne__ __lt__ __le__ __gt__
promote_types long cpu
__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ __itruediv__
__ge__ __and__ __or__ __xor__ __invert__ __ior__ __iand__
"""
EXACT_FUNCTIONS = frozenset(
    getattr(place, name + suffix)
    for place in (torch, Tensor, functional)
    for name in (*_COMPOSED.split(), *EXACT)
    for suffix in ("", "_")
    if callable(getattr(place, name + suffix, None))
)
"""The functions of PyTorch that are composed of operations in `EXACT` only, and run as they are."""
