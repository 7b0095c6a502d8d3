"""Every operator of Python: the value of plain torch, in both orders and in place; errors that arrive as themselves."""

import operator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dpzoo.shard import Shard, ShardTensor, scatter_tensor
from dpzoo.shard.tensor import DISPATCH, FUNCTIONS
from dpzoo.testing import distributed, domain_mesh, expect_error

FLOATS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
INTEGERS = ("and_", "or_", "xor", "lshift", "rshift")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


def numbers(name):
    torch.manual_seed(0)
    if name in INTEGERS:
        return torch.randint(0, 5, (4, 4)), torch.randint(0, 5, (4, 4))
    return torch.rand(4, 4, dtype=torch.float64) + 0.5, torch.rand(4, 4, dtype=torch.float64) + 0.5


def cut(t, **options):
    return scatter_tensor(t, 0, domain_mesh(), [Shard(0)], sizes={0: (3, 1)}, **options)


@pytest.mark.parametrize("name", FLOATS + INTEGERS + COMPARISONS)
@distributed(ranks=2)
def test_the_value_of_plain_torch(name):
    op = getattr(operator, name)
    a, b = numbers(name)
    x, y = cut(a), cut(b)
    pairs = [(op(x, y), op(a, b)), (op(x, b), op(a, b)), (op(a, y), op(a, b))]
    if name != "matmul":
        pairs += [(op(x, 2), op(a, 2)), (op(2, y), op(2, b))]
    if name not in INTEGERS:
        pairs += [(op(nn.Parameter(a), y), op(a, b)), (op(x, nn.Parameter(b)), op(a, b))]
    for ours, theirs in pairs:
        assert isinstance(ours, ShardTensor) and ours.dtype is theirs.dtype
        assert torch.equal(ours.full_tensor(), theirs)


@pytest.mark.parametrize("name", [*FLOATS[:-1], *INTEGERS])
@distributed(ranks=2)
def test_in_place(name):
    op = getattr(operator, "i" + name.rstrip("_"))
    a, b = numbers(name)
    for other in (lambda: cut(b), lambda: b, lambda: 2):
        x = kept = cut(a)
        x = op(x, other())
        assert x is kept
        theirs = op(a.clone(), b if other() is b or isinstance(other(), Tensor) else 2)
        assert torch.equal(x.full_tensor(), theirs)


@distributed(ranks=2)
def test_gradients_of_reflected_operators():
    a = torch.rand(4, 4, dtype=torch.float64) + 0.5
    for op in (lambda t: 2 - t, lambda t: 3 / t, lambda t: 2**t, lambda t: a @ t, lambda t: a % t, lambda t: t**2):
        x, plain = cut(a, requires_grad=True), a.clone().requires_grad_(True)
        op(x).square().sum().backward()
        op(plain).square().sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


def raises(*_, **__):
    raise TypeError("the cause")


def calls_of(name, door):
    """An operator in all ways that pass the door; what runs on local tensors at once meets no aten op of ours."""
    op, (a, b) = getattr(operator, name), numbers(name)
    x, y = scatter_tensor(a, 0, domain_mesh(), [Shard(0)]), scatter_tensor(b, 0, domain_mesh(), [Shard(0)])
    calls = []
    if door == "function":
        calls += [lambda: op(x, y), lambda: op(x, b), lambda: op(a, y)]
        if name != "matmul":
            calls += [lambda: op(x, 2), lambda: op(2, y)]
    elif name in FLOATS[:-1]:
        u, v = (t.detach().requires_grad_() for t in (x, y))  # so that autograd records the call
        calls += [lambda: op(u, v), lambda: op(u, 2), lambda: op(2, v)]
    if name not in (*COMPARISONS, "matmul"):
        in_place = getattr(operator, "i" + name.rstrip("_"))
        calls += [lambda: in_place(x, y), lambda: in_place(x, 2)]
    return calls


@pytest.mark.parametrize("door", ["function", "dispatch"])
@distributed(ranks=1)
def test_a_type_error_arrives_as_itself_at_both_doors(door):
    """Whatever torch calls on the way: a handler of every function, or of every aten op, raises."""
    table = FUNCTIONS if door == "function" else DISPATCH
    for name in FLOATS + INTEGERS + COMPARISONS:
        calls = calls_of(name, door)
        with torch.enable_grad():
            for call in calls:
                call()  # everything is resolved before it is replaced
            before = dict(table)
            try:
                for func in list(table):
                    table[func] = table[func] if door == "dispatch" and "detach" in str(func) else raises
                for call in calls:
                    with pytest.raises(TypeError, match="the cause"):
                        call()
            finally:
                table.clear()
                table.update(before)


class Foreign:
    """Knows how to meet a tensor from either side."""

    def __radd__(self, other):
        return "radd"

    def __add__(self, other):
        return "add"

    def __rmatmul__(self, other):
        return "rmatmul"

    def __gt__(self, other):
        return "gt"

    def __eq__(self, other):
        return "eq"

    __hash__ = None


@distributed(ranks=2)
def test_foreign_operands():
    x = cut(torch.ones(4, 4))
    assert (x + Foreign(), Foreign() + x, x @ Foreign(), x < Foreign()) == ("radd", "add", "rmatmul", "gt")
    assert (x == Foreign()) == "eq"
    assert not (x == "text")  # noqa: SIM201 - the method under test
    assert x != None  # noqa: E711 - the method under test
    assert hash(x) == id(x) and x in {x}
    for nonsense in (lambda: x + "a", lambda: "a" + x, lambda: [1] - x, lambda: x + None, lambda: x < None):
        expect_error(nonsense, TypeError)
    assert torch.equal((x * np.float64(2)).full_tensor(), torch.full((4, 4), 2.0))
    assert torch.equal((np.float64(2) * x).full_tensor(), torch.full((4, 4), 2.0))


class Listening(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.heard = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.heard.append(func)
        return func(*args, **(kwargs or {}))


@distributed(ranks=1)
def test_a_mode_sees_operators():
    x = cut_alone()
    with Listening() as mode:
        y = (x + x) - 1
    assert Tensor.add in mode.heard and Tensor.sub in mode.heard and isinstance(y, ShardTensor)


def cut_alone():
    return scatter_tensor(torch.ones(4, 4), 0, domain_mesh(), [Shard(0)])
