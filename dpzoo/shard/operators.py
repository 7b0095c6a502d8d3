"""The operators of Python on ShardTensors: `+ - * / // % ** @ & | ^ << >>`, comparisons, reflected and in-place.

torch's own methods turn every TypeError into `NotImplemented`, and Python then says "unsupported operand type(s)": an
error inside a rule or a user's handler would be lost. So the methods of ShardTensor hand a call straight to the
function door, under the function that torch would have named, and leave only operands of foreign types to torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from dpzoo.shard.tensor import FUNCTIONS, ShardTensor

Call = Callable[[Any, Any], Any]

_is_enabled = torch._C._is_torch_function_enabled
_modes = torch._C._len_torch_function_stack
_OPERANDS = (Tensor, int, float, complex)
_OWN = frozenset((ShardTensor, Tensor, nn.Parameter, bool, int, float, complex))
_TYPES = (ShardTensor,)

# Operator -> the method that torch names in `__torch_function__`; the operators left out name themselves.
_NAMED_AS = {
    "add": "add", "radd": "add", "iadd": "add_", "sub": "sub", "isub": "sub_", "mul": "mul", "rmul": "mul",
    "imul": "mul_", "truediv": "div", "itruediv": "div_", "ifloordiv": "floor_divide_", "mod": "remainder",
    "imod": "remainder_", "matmul": "matmul", "rand": "bitwise_and", "ror": "bitwise_or", "rxor": "bitwise_xor",
    "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge",
}  # fmt: skip
_NAMED_BY_THEMSELVES = (
    "rsub", "rtruediv", "floordiv", "rfloordiv", "rmod", "pow", "rpow", "ipow", "rmatmul", "and", "iand", "or", "ior",
    "xor", "ixor", "lshift", "rlshift", "ilshift", "rshift", "rrshift", "irshift", "eq",
)  # fmt: skip


_REFLECTED = frozenset(n for n in (*_NAMED_AS, *_NAMED_BY_THEMSELVES) if n[0] == "r" and n != "rshift")


def _operator(slot: Call, func: Call) -> Call:
    """The method for one operator; `slot` is torch's own, for operands that it may refuse in favour of the other."""

    def method(self: ShardTensor, other: Any) -> Any:
        if other.__class__ in _OWN and not is_dynamo_compiling() and _is_enabled() and not _modes():
            return self.__torch_function__(func, _TYPES, (self, other))
        return func(self, other) if isinstance(other, _OPERANDS) else slot(self, other)

    return method


def _reflected(direct: Call, func: Call) -> Call:
    """`other <op> self`. Python asks the subclass first, also where the other is a tensor that would have answered."""

    def method(self: ShardTensor, other: Any) -> Any:
        if not isinstance(other, Tensor):
            return func(self, other)
        if other.__class__ in _OWN and not is_dynamo_compiling() and _is_enabled() and not _modes():
            return self.__torch_function__(direct, _TYPES, (other, self))
        return direct(other, self)

    return method


def _method_of(name: str) -> Call:
    return getattr(Tensor, _NAMED_AS.get(name, f"__{name}__"))  # type: ignore[no-any-return]


def _install() -> None:
    for name in (*_NAMED_AS, *_NAMED_BY_THEMSELVES):
        method = _operator(getattr(Tensor, f"__{name}__"), _method_of(name))
        if name in _REFLECTED:
            method = _reflected(_method_of(name[1:]), method)
        method.__name__ = f"__{name}__"
        method.__qualname__ = f"ShardTensor.__{name}__"
        setattr(ShardTensor, method.__name__, method)
    ShardTensor.__hash__ = Tensor.__hash__  # type: ignore[method-assign]


# ---------------------------------------------------------------------- functions that would swallow a TypeError
def _in_terms_of(formula: Call) -> Callable[..., Any]:
    def answer(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return formula(*args)

    return answer


# What torch makes of each of them; a handler that a user registers for one comes first.
_FORMULAS: dict[str, Call] = {
    "rsub": torch.rsub,
    "rtruediv": lambda x, other: x.reciprocal() * other,
    "floordiv": torch.floor_divide,
    "rfloordiv": lambda x, other: torch.floor_divide(other, x),
    "rmod": lambda x, other: torch.remainder(other, x),
    "pow": torch.pow,
    "rpow": lambda x, other: torch.pow(other, x),
    "ipow": Tensor.pow_,
    "rlshift": lambda x, other: torch.bitwise_left_shift(other, x),
    "rrshift": lambda x, other: torch.bitwise_right_shift(other, x),
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "iand": Tensor.bitwise_and_,
    "ior": Tensor.bitwise_or_,
    "ixor": Tensor.bitwise_xor_,
    "lshift": torch.bitwise_left_shift,
    "rshift": torch.bitwise_right_shift,
    "ilshift": Tensor.bitwise_left_shift_,
    "irshift": Tensor.bitwise_right_shift_,
    "eq": Tensor.eq,
}

for _name, _formula in _FORMULAS.items():
    FUNCTIONS[getattr(Tensor, f"__{_name}__")] = _in_terms_of(_formula)
_install()
