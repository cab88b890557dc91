#!/usr/bin/env bash
# torch 2.13.0, `torch.autograd.function.once_differentiable`: one would expect that a second derivative through a
# function that it marks raises an error. It raises only if no other path leads from the gradient to the input. Where
# another term of the same sum has such a path, the part of the marked function is left out, and nothing is said.
# Seen for f(x) = marked_square(x) + x**3 at x = 3: the second derivative is 18 (6x of the cube), the true one is 20.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from torch.autograd import Function, grad
from torch.autograd.function import once_differentiable


class MarkedSquare(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx, incoming):
        (x,) = ctx.saved_tensors
        return 2 * x * incoming


def second(f):
    x = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    (first,) = grad(f(x), x, create_graph=True)
    return grad(first, x)[0].item()


try:
    alone = second(lambda x: MarkedSquare.apply(x))
except RuntimeError as error:
    alone = f"RuntimeError: {str(error).splitlines()[0]}"
beside = second(lambda x: MarkedSquare.apply(x) + x**3)
print(f"torch {torch.__version__}; alone: {alone}; beside x**3: {beside} (true: 20)")
assert str(alone).startswith("RuntimeError"), alone
assert beside == 18.0, beside
PYTHON
