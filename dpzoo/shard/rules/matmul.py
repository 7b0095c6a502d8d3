"""Products: matmul and relatives, einsum. A cut contraction leaves partial sums, which are added at once."""

from __future__ import annotations

import inspect
import string
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.shard.autocast import HALF, autocasts, is_on, switched_off
from dpzoo.shard.fallback import gather_call
from dpzoo.shard.function_door import broadcast_labels
from dpzoo.shard.plan import Dims, Labels, probe
from dpzoo.shard.registry import handler, rule, spellings


# ---------------------------------------------------------------------- matmul
def _product(name: str, second: str, *others: str) -> None:
    """Register `op(input, <second>)`, which multiplies along the last dim of the one and the first of the other."""
    op = getattr(torch, name)

    def plan(input: Tensor, other: Tensor) -> Dims:
        probe(op, input, other)
        a, b, out = _matmul_labels(tuple(input.shape), tuple(other.shape))
        return Dims([a, b], [out], op, sums=frozenset("k"))

    names = [inspect.Parameter(p, inspect.Parameter.POSITIONAL_OR_KEYWORD) for p in ("input", second)]
    plan.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
    rule(*spellings(name, *others), name=name)(plan)


_product("matmul", "other", "__matmul__")
_product("mm", "mat2")
_product("bmm", "mat2")
_product("mv", "vec")
_product("dot", "tensor")
_product("vdot", "other")


def _matmul_labels(x: tuple[int, ...], y: tuple[int, ...]) -> tuple[Labels, Labels, Labels]:
    n = max(len(x), len(y)) - 2
    batch = torch.broadcast_shapes(x[:-2], y[:-2]) if len(x) > 1 and len(y) > 1 else (x[:-2] if len(x) > 1 else y[:-2])

    def lead(shape: tuple[int, ...]) -> Labels:
        dims = shape[:-2]
        return tuple(
            None if size == 1 and batch[n - len(dims) + i] != 1 else n - len(dims) + i for i, size in enumerate(dims)
        )

    a: Labels = (*lead(x), "m", "k") if len(x) > 1 else ("k",)
    b: Labels = (*lead(y), "k", "n") if len(y) > 1 else ("k",)
    out: Labels = (*range(n), *(["m"] if len(x) > 1 else []), *(["n"] if len(y) > 1 else []))
    return a, b, out if max(len(x), len(y)) > 1 else ()


@handler(torch.Tensor.__rmatmul__, name="rmatmul")
def rmatmul(func: Any, self: Tensor, other: Tensor) -> Any:
    """`plain @ sharded`."""
    return torch.matmul(other, self)


def _added(name: str, product: Any) -> None:
    """`beta * input + alpha * product(a, b)`."""

    @handler(*spellings(name), name=name)
    def answer(
        func: Any, input: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Any = None
    ) -> Any:
        result = product(a, b)
        dtype = result.dtype
        if torch._C._is_any_autocast_enabled():
            input = input.to(dtype)
        if dtype in HALF:  # as torch, which rounds the sum alone; and the ranks' parts of a gradient add up unrounded
            result, input = result.float(), input.float()
        if torch.broadcast_shapes(input.shape, result.shape) != result.shape:
            raise RuntimeError(f"{name}: input of shape {tuple(input.shape)} does not expand to {tuple(result.shape)}")
        total = result if alpha == 1 else result * alpha
        if beta != 0:
            total = total + (input if beta == 1 else input * beta)
        if dtype in HALF:
            total = total.to(dtype)
        return total if out is None else out.copy_(total)

    @handler(*spellings(f"{name}_"), name=f"{name}_")
    def answer_in_place(func: Any, input: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
        with switched_off(input.device.type):  # autocast leaves in-place products alone
            return input.copy_(answer(func, input, a, b, beta=beta, alpha=alpha))


_added("addmm", torch.mm)
_added("addmv", torch.mv)
_added("baddbmm", torch.bmm)
_added("addbmm", lambda a, b: torch.bmm(a, b).sum(0))
_added("addr", lambda a, b: a.unsqueeze(-1) * b)


@handler(*spellings("outer", "ger"), name="outer")
def outer(func: Any, input: Tensor, vec2: Tensor, *, out: Any = None) -> Any:
    """Outer product of two vectors."""
    if input.ndim != 1 or vec2.ndim != 1 or out is not None:
        return gather_call(func, (), (input, vec2), {} if out is None else {"out": out})
    return input.unsqueeze(-1) * vec2


@handler(*spellings("inner"), name="inner")
def inner(func: Any, input: Tensor, other: Tensor, *, out: Any = None) -> Any:
    """Contract the last dims."""
    if out is not None:
        return gather_call(func, (), (input, other), {"out": out})
    if input.ndim == 0 or other.ndim == 0:
        return input * other
    return torch.tensordot(input, other, ([-1], [-1]))


# ---------------------------------------------------------------------- einsum
def _einsum_labels(equation: str, ndims: list[int]) -> tuple[list[list[str]], list[str]] | None:
    """One letter per dim; the dims of an ellipsis get letters of their own. None for what the rule leaves to torch."""
    equation = equation.replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(ndims):
        return None
    spare = [c for c in string.ascii_letters if c not in equation]
    lead = max((n - len(t.replace("...", "")) for t, n in zip(terms, ndims, strict=True) if "..." in t), default=0)
    dots = spare[:lead]

    def expand(term: str, n: int) -> list[str]:
        if "..." not in term:
            return list(term)
        k = n - len(term.replace("...", ""))
        before, _, after = term.partition("...")
        return [*before, *dots[lead - k :], *after]

    operands = [expand(t, n) for t, n in zip(terms, ndims, strict=True)]
    if any(len(o) != n for o, n in zip(operands, ndims, strict=True)):
        return None
    if arrow:
        return operands, expand(right, len(right.replace("...", "")) + lead)
    flat = [c for o in operands for c in o]
    return operands, dots + sorted(c for c in set(flat) if flat.count(c) == 1 and c not in dots)


@rule(torch.functional.einsum, torch.einsum)
def einsum(equation: Any, *operands: Any) -> Dims | None:
    """Letters are labels; a letter that is summed may be cut."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str):
        return None
    probe(torch.einsum, equation, *operands)
    found = _einsum_labels(equation, [t.ndim for t in operands])
    if found is None:
        return None
    labels, out = found
    sizes: dict[str, int] = {}
    for t, names in zip(operands, labels, strict=True):
        for c, n in zip(names, t.shape, strict=True):
            sizes[c] = max(sizes.get(c, 1), n)
    cut_names: list[Labels] = [
        tuple(c if n == sizes[c] else None for c, n in zip(names, t.shape, strict=True))
        for t, names in zip(operands, labels, strict=True)
    ]
    repeated = frozenset(c for names in labels for c in names if names.count(c) > 1)
    alone = frozenset(c for c in sizes if c not in out)
    text = ",".join("".join(n) for n in labels) + "->" + "".join(out)
    return Dims(cut_names, [tuple(out)], lambda *ts: torch.einsum(text, *ts), whole=repeated, sums=alone - repeated)


@handler(*spellings("tensordot"), torch.functional.tensordot, name="tensordot")
def tensordot(func: Any, a: Tensor, b: Tensor, dims: Any = 2, out: Any = None) -> Any:
    """Contract given dims, as an einsum."""
    if isinstance(dims, Tensor) or out is not None:
        return gather_call(func, (), (a, b, dims), {} if out is None else {"out": out})
    if isinstance(dims, int):
        left, right = list(range(a.ndim - dims, a.ndim)), list(range(dims))
    else:
        left, right = [d % a.ndim for d in dims[0]], [d % b.ndim for d in dims[1]]
    names = string.ascii_letters
    x = list(names[: a.ndim])
    y = list(names[a.ndim : a.ndim + b.ndim])
    for i, j in zip(left, right, strict=True):
        y[j] = x[i]
    kept = [c for d, c in enumerate(x) if d not in left] + [c for d, c in enumerate(y) if d not in right]
    equation = f"{''.join(x)},{''.join(y)}->{''.join(kept)}"
    if is_on() and _is_one_number(a, left) and _is_one_number(b, right):  # a dot product, which autocast leaves alone
        with switched_off(a.device.type):
            return torch.einsum(equation, a, b)
    return torch.einsum(equation, a, b)


def _is_one_number(t: Tensor, contracted: list[int]) -> bool:
    """Nothing is left of the tensor but dims of size 1."""
    return all(n == 1 for d, n in enumerate(t.shape) if d not in contracted)


# ---------------------------------------------------------------------- products of vectors
@handler(torch.linalg.vecdot, name="vecdot")
def vecdot(func: Any, x: Tensor, y: Tensor, *, dim: int = -1, out: Any = None) -> Any:
    """Sum of `conj(x) * y` over a dim."""
    product = (x.conj() * y).sum(dim)
    if is_on() and product.dtype is torch.float32 and autocasts(product.device.type):  # torch takes a matmul for it
        product = product.to(torch.get_autocast_dtype(product.device.type))
    return product if out is None else out.copy_(product)


@rule(*spellings("cross"), name="cross")
def cross(input: Tensor, other: Tensor, dim: int | None = None) -> Dims | None:
    """Vectors of length 3 along `dim`, whole on each rank."""
    n = max(input.ndim, other.ndim)
    if input.ndim != other.ndim:
        return None
    if dim is None:  # torch.cross takes the first dim of size 3, torch.linalg.cross the last dim
        return None
    probe(torch.linalg.cross, input, other, dim=dim)
    labels, out = broadcast_labels([tuple(input.shape), tuple(other.shape)])
    return Dims(labels, [out], lambda a, b: torch.linalg.cross(a, b, dim=dim), whole=frozenset([dim % n]))


@rule(torch.functional.cdist, name="cdist")
def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: Any = None) -> Dims | None:
    """Distances between the rows of two sets; the channels are whole on each rank."""
    mode = "use_mm_for_euclid_dist_if_necessary" if compute_mode is None else compute_mode
    probe(torch.cdist, x1, x2, p)
    lead, out = broadcast_labels([tuple(x1.shape[:-2]), tuple(x2.shape[:-2])])
    labels: list[Labels] = [(*lead[0], "p", "c"), (*lead[1], "r", "c")]

    def local(a: Tensor, b: Tensor) -> Tensor:
        return torch.cdist(a, b, p, mode)

    return Dims(labels, [(*out, "p", "r")], local, whole=frozenset("c"))


@handler(F.bilinear, name="bilinear")
def bilinear(func: Any, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """`input1^T W_o input2` for every output o."""
    with switched_off(weight.device.type):  # not one of the products that autocast knows
        out = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return out if bias is None else out + bias
