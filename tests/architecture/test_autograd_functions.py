"""The law of second derivatives: every backward pass of the tree is differentiated again correctly, or refuses."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attn_core.errors import Incompatible
from attn_core.first_order import first_order_only
from attn_models.lora.frozen import FrozenProduct
from attn_models.tensor_parallel import CopyToRanks, SumOverRanks
from attn_variants.context_parallel import AllToAll, RingShift
from attn_variants.distributions import _Entmax, bisected_shift
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

ROOT = Path(__file__).parents[2]
SIZES = (3, 5)


class Packed(torch.nn.Module):
    inputs = SIZES[1]

    def forward(self, rows: Tensor) -> Tensor:
        return rows.double() @ torch.arange(10, dtype=torch.float64).view(5, 2)


def entmax(scores: Tensor) -> Any:
    below = scores - scores.detach().amax(-1, keepdim=True)
    return _Entmax.apply(below, 0.4, bisected_shift(below.detach(), 0.4))


def frozen(rows: Tensor) -> Any:
    return FrozenProduct.apply(rows, Packed(), Packed())


TWICE: dict[str, Callable[[Tensor], Any]] = {
    "_Entmax": entmax,
    "FrozenProduct": frozen,
    "CopyToRanks": lambda rows: CopyToRanks.apply(rows.square(), dist.group.WORLD),
    "SumOverRanks": lambda rows: SumOverRanks.apply(rows.square(), dist.group.WORLD),
    "RingShift": lambda rows: RingShift.apply(rows.square(), dist.group.WORLD),
    "AllToAll": lambda rows: AllToAll.apply(rows.square()[None], dist.group.WORLD),
}
"""Functions whose backward passes are differentiated again below; all others refuse it."""


def backward_passes() -> Iterator[tuple[Path, str, list[str]]]:
    """The file, name and decorators of every backward pass: methods of autograd functions, arguments of operators."""
    for path in sorted(ROOT.glob("*/*/src/**/*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Function") for base in node.bases):
                found = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "backward"]
                if found:
                    yield path, node.name, [ast.unparse(one) for one in found[0].decorator_list]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".register_autograd"):
                given = functions[ast.unparse(node.args[0])]
                yield path, given.name, [ast.unparse(one) for one in given.decorator_list]


def test_every_backward_pass_refuses_to_be_differentiated_or_is_checked_here() -> None:
    found = list(backward_passes())
    refusing = {name for _, name, decorators in found if "first_order_only" in decorators}
    assert {"Attend", "Linear", "Tiles", "back"} <= refusing
    unknown = [
        f"{path}: {name}"
        for path, name, decorators in found
        if "first_order_only" not in decorators and name not in TWICE
    ]
    assert not unknown


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives_equal_finite_differences(name: str) -> None:
    torch.manual_seed(0)
    rows = torch.randn(SIZES, dtype=torch.float64, requires_grad=True)
    assert gradcheck(TWICE[name], rows)
    assert gradgradcheck(TWICE[name], rows)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return rows**2

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        return 2 * rows * gradient


def test_a_refusing_function_gives_first_derivatives_and_no_second_even_beside_other_terms() -> None:
    rows = torch.tensor([3.0], requires_grad=True)
    total = (Square.apply(rows) + rows**3).sum()
    (first,) = torch.autograd.grad(total, rows, retain_graph=True)
    assert first.item() == 6 + 27
    with pytest.raises(Incompatible, match="Square"):
        torch.autograd.grad(total, rows, create_graph=True)


def test_a_refusing_function_is_compiled_whole() -> None:
    rows = torch.tensor([3.0], requires_grad=True)
    compiled = torch.compile(lambda given: Square.apply(given).sum(), backend="aot_eager", fullgraph=True)
    compiled(rows).backward()
    assert rows.grad is not None
    assert rows.grad.item() == 6
