#!/usr/bin/env bash
# torch.func.jvp (jacfwd, linearize too) takes the derivative of an operator of torch.library.custom_op to be zero; dual numbers of forward_ad raise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
. "$folder/venv/bin/activate"
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1 TMPDIR="$folder" PYTHONWARNINGS=ignore
pip install --quiet torch==2.13.0
pip install --quiet numpy
cat > "$folder/show.py" <<'PYTHON'
import torch
import torch.autograd.forward_ad as forward
print("torch", torch.__version__)


@torch.library.custom_op("shown::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor: return x * x


square.register_fake(lambda x: torch.empty_like(x))
square.register_autograd(
    lambda ctx, g: 2 * ctx.saved_tensors[0] * g,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


class Square(torch.autograd.Function):
    """The operator, and its rule beside it."""

    @staticmethod
    def forward(x): return square(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g): return 2 * ctx.saved_tensors[0] * g

    @staticmethod
    def jvp(ctx, tangent): return 2 * ctx.saved_tensors[0] * tangent


def along(fn, x): return torch.func.jvp(fn, (x,), (torch.ones_like(x),))[1].tolist()


x = torch.tensor([1.0, 2.0])
leaf = x.clone().requires_grad_()
print("autograd of square(x) + x:", torch.autograd.grad((square(leaf) + leaf).sum(), leaf)[0].tolist())
def plus(x): return square(x) + x


lost = along(plus, x), torch.func.jacfwd(plus)(x).sum(0).tolist(), torch.func.linearize(plus, x)[1](torch.ones(2)).tolist()
right = along(lambda x: Square.apply(x) + x, x)
print("jvp, jacfwd, linearize:", *lost)
print("jvp with a Function around it that has the rule:", right)
assert lost == ([1, 1],) * 3 and right == [3, 5]
try:
    with forward.dual_level():
        square(forward.make_dual(leaf, torch.ones(2)))
    raise AssertionError("dual numbers do not raise")
except NotImplementedError as error:
    print("dual numbers:", error)
PYTHON
python "$folder/show.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
