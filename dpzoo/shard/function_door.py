"""What `__torch_function__` does with a function that has no rule of its own: pointwise, native, or the fallback.

*Native* functions go on to C++ autograd and arrive again, op by op, at the dispatch door.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpzoo.shard import fallback
from dpzoo.shard.bridges import from_shard, plain_to_shard, relayout
from dpzoo.shard.plan import Dims
from dpzoo.shard.registry import check_promotion, run_rule
from dpzoo.shard.tensor import ShardTensor

native = torch._C._disabled_torch_function_impl

# Metadata, autograd bookkeeping, casts and views: right as C++ does them, given the dispatch door below.
NATIVE_NAMES = frozenset(
    ["__get__", "__set__", "__delete__", "is_contiguous", "stride", "storage_offset", "is_floating_point", "is_complex", "is_signed", "is_sparse", "element_size", "nelement", "ndimension", "get_device", "is_conj", "is_neg", "is_inference", "is_nonzero_meta", "is_same_size", "has_names", "retain_grad", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "detach", "clone", "contiguous", "to", "float", "double", "half", "bfloat16", "int", "long", "short", "bool", "char", "byte", "cfloat", "cdouble", "type", "type_as", "cpu", "cuda", "zeros_like", "ones_like", "empty_like", "full_like", "resolve_conj", "resolve_neg", "alias", "view_as_real", "view_as_complex", "expand", "expand_as", "broadcast_to", "permute", "transpose", "t", "swapaxes", "swapdims", "movedim", "moveaxis", "unsqueeze", "mT", "mH", "T", "H", "adjoint", "is_set_to", "_is_view", "get_device", "__dlpack_device__", "can_cast", "result_type", "promote_types", "is_cpu", "is_cuda", "squeeze", "copy_", "zero_", "fill_", "__dir__", "is_pinned", "lift_fresh", "numpy_T", "_version", "is_shared", "_dirty"]
)

# Pointwise ops that torch builds from others, or whose aten op lacks the tag.
POINTWISE_NAMES = frozenset(
    ["square", "float_power", "true_divide", "multiply", "subtract", "divide", "greater", "greater_equal", "less", "less_equal", "not_equal", "eq", "ne", "lt", "le", "gt", "ge", "clip", "absolute", "negative", "fix", "positive", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctan2", "arctanh", "isfinite", "isinf", "isnan", "isreal", "isposinf", "isneginf", "relu", "relu6", "relu_", "softsign", "tanhshrink", "logsigmoid", "mish", "hardswish", "hardsigmoid", "silu", "gelu", "elu", "selu", "celu", "leaky_relu", "threshold", "hardtanh", "softplus", "hardshrink", "softshrink", "sigmoid", "tanh", "rsub", "ldexp", "logical_and", "logical_or", "logical_xor", "logical_not", "where", "masked_fill", "clamp", "clamp_min", "clamp_max", "lerp", "addcmul", "addcdiv", "nan_to_num", "isclose", "xlogy", "bitwise_not", "floor_divide", "remainder", "fmod", "expit", "logit", "erf", "erfc", "erfcx", "erfinv", "ndtr", "log_ndtr", "i0", "i0e", "i1", "i1e", "digamma", "psi", "gammaln", "multigammaln", "mvlgamma", "entr", "sinc", "round", "exp2", "expm1", "log1p", "xlog1py", "zeta", "gammainc", "gammaincc", "polygamma", "bessel_j0", "bessel_j1", "deg2rad", "rad2deg", "angle", "sgn", "sign", "signbit", "copysign", "frexp", "real", "imag", "conj", "conj_physical", "complex", "polar", "heaviside", "hypot", "nextafter", "gcd", "lcm", "maximum", "minimum", "fmax", "fmin", "pow", "rpow", "frac", "trunc", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "and", "rand", "or", "ror", "xor", "rxor", "invert", "neg", "pos", "abs", "add", "radd", "sub", "mul", "rmul", "lshift", "rshift", "rlshift", "rrshift", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "iand", "ior", "ixor", "ipow", "ilshift", "irshift", "prelu_scalar"]
)
# Not elementwise in every argument, random, or shape-changing although tagged or named alike.
NOT_POINTWISE = frozenset(["rand", "rrelu", "dropout", "native_dropout", "bernoulli", "normal", "prelu", "rand_", "multinomial", "glu"])


def base_name(func: Any) -> str:
    """`__radd__` -> `radd`, `add_` -> `add`, `torch.add` -> `add`."""
    name = getattr(func, "__name__", "") or ""
    return name.strip("_") if name.startswith("__") else name.rstrip("_")


def is_pointwise(func: Any) -> bool:
    """Every output element depends on the elements at the same (broadcast) place of the operands."""
    name, raw = base_name(func), getattr(func, "__name__", "") or ""
    dunder = raw.startswith("__") or getattr(func, "__module__", "") in ("_operator", "operator")
    if name in NOT_POINTWISE and not (dunder and name == "rand"):
        return False
    if name in POINTWISE_NAMES:
        return True
    packet = getattr(torch.ops.aten, name, None) or getattr(
        torch.ops.aten, "special_" + name.removeprefix("special_"), None
    )
    if packet is None:
        return False
    ops = [getattr(packet, o) for o in packet.overloads()]
    return any(torch.Tag.pointwise in o.tags for o in ops) and not any(
        torch.Tag.nondeterministic_seeded in o.tags for o in ops
    )


def classify(func: Any) -> Callable[..., Any]:
    """The handler of a function met for the first time."""
    name = getattr(func, "__name__", "") or ""
    if base_name(func).startswith("foreach_") or name.startswith("_foreach_"):
        return foreach
    if is_pointwise(func):
        return pointwise_inplace if _is_inplace(func, name) else pointwise
    if name in NATIVE_NAMES:
        return native
    if name in REFUSED:
        return fallback.refuse
    return fallback.gather_call


# They would hand out the storage of a shard as if it were the global tensor, or change the metadata of one rank.
REFUSED = frozenset(
    ["data_ptr", "storage", "untyped_storage", "storage_type", "_typed_storage", "numpy", "__array__", "__dlpack__", "share_memory_", "resize_", "resize_as_", "set_", "as_strided", "as_strided_", "pin_memory", "apply_", "map_", "map2_", "sparse_resize_", "to_sparse", "to_mkldnn", "swap_tensors"]
)


def _is_inplace(func: Any, name: str) -> bool:
    if name.startswith("__"):
        return name.startswith("__i") and base_name(func) not in ("invert", "int", "index")
    return name.endswith("_") or func in _INPLACE_OPERATORS


_INPLACE_OPERATORS = frozenset(
    getattr(operator, n) for n in ["iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "ilshift", "irshift"]
)


# ---------------------------------------------------------------------- pointwise
def pointwise(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Operands of one layout go straight on; others are aligned first, so that each gradient has its own layout."""
    if kwargs:
        return _pointwise_keywords(func, types, args, kwargs)
    spec = None
    for a in args:
        if isinstance(a, ShardTensor):
            if spec is None:
                spec = a._spec
            elif a._spec is not spec:
                return _aligned(func, types, args, kwargs)
        elif isinstance(a, Tensor):
            return _aligned(func, types, args, kwargs)
    if spec is None or spec.is_partial:
        return _aligned(func, types, args, kwargs)
    return native(func, types, args, kwargs)


def _pointwise_keywords(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if isinstance(kwargs.get("out"), Tensor):
        kwargs = dict(kwargs)
        out = kwargs.pop("out")
        result = pointwise(func, types, args, kwargs)
        if tuple(out.shape) != tuple(result.shape):
            raise fallback.ShardError(
                f"{func.__name__}: out has shape {tuple(out.shape)}, the result {tuple(result.shape)}; out cannot be resized"
            )
        out.copy_(result if isinstance(out, ShardTensor) else fallback._whole(result))
        return out
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    first = tensors[0]
    alike = all(isinstance(t, ShardTensor) and t._spec is first._spec for t in tensors)  # type: ignore[attr-defined]
    if kwargs.get("inplace") and isinstance(args[0], ShardTensor):
        return native(func, types, args, kwargs) if alike else pointwise_inplace(func, types, args, kwargs)
    return (
        native(func, types, args, kwargs)
        if alike and not first._spec.is_partial
        else _aligned(func, types, args, kwargs)
    )  # type: ignore[attr-defined]


def _aligned(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    plan_rule = _BROADCAST.get(func)
    if plan_rule is None:
        plan_rule = _BROADCAST[func] = _BroadcastRule(func)
    return run_rule(plan_rule, _ANY_SIGNATURE, func, types, args, kwargs)


def broadcast_labels(shapes: list[tuple[int, ...]]) -> tuple[list[tuple[int | None, ...]], tuple[int | None, ...]]:
    """Labels of operands that broadcast together (right-aligned), and of the result."""
    out = torch.broadcast_shapes(*shapes)
    n = len(out)
    labels = [
        tuple(
            (n - len(s) + i) if size == out[n - len(s) + i] and not (size == 1 and out[n - len(s) + i] != 1) else None
            for i, size in enumerate(s)
        )
        for s in shapes
    ]
    return labels, tuple(range(n))


class _AnySignature(inspect.Signature):
    """Binds everything by position: the rule sees the call as it was written."""

    def bind(self, *args: Any, **kwargs: Any) -> Any:
        return _Bound(args, kwargs)


class _Bound:
    def __init__(self, args: Any, kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self.arguments = {**dict(enumerate(args)), **kwargs}

    def apply_defaults(self) -> None:
        pass


class _BroadcastRule:
    """The rule of every pointwise function: broadcast dims, the function itself as the local op."""

    def __init__(self, func: Any) -> None:
        self.func = func

    def __call__(self, *args: Any, **kwargs: Any) -> Dims | None:
        values = [*args, *kwargs.values()]
        slots = [i for i, v in enumerate(values) if isinstance(v, Tensor)]
        if any(isinstance(v, (list, tuple)) and any(isinstance(x, Tensor) for x in v) for v in values):
            return None
        operands, out = broadcast_labels([tuple(values[i].shape) for i in slots])
        func, n, names = self.func, len(args), tuple(kwargs)
        template = [None if i in slots else v for i, v in enumerate(values)]
        outputs = (out, out) if base_name(func) == "frexp" else (out,)

        def local(*tensors: Tensor) -> Any:
            call = list(template)
            for slot, t in zip(slots, tensors, strict=True):
                call[slot] = t
            return func(*call[:n], **dict(zip(names, call[n:], strict=True)))

        return Dims(operands, outputs, local)


_ANY_SIGNATURE = _AnySignature()
_BROADCAST: dict[Any, _BroadcastRule] = {}


def pointwise_inplace(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The target keeps its layout; the other operands come to it."""
    target = args[0]
    if not isinstance(target, ShardTensor):  # a plain target: it takes whole values
        whole = [fallback._whole(a) for a in args]
        return func(*whole, **{k: fallback._whole(v) for k, v in kwargs.items()})
    if target._spec.is_partial:
        raise fallback.ShardError(
            f"{func.__name__} on the partial value {target._spec.describe()}: redistribute it to Replicate or Shard first"
        )
    if isinstance(kwargs.get("out"), Tensor):
        raise fallback.ShardError(f"{func.__name__}: an in-place op takes no out=")
    rest = [_to_layout_of(a, target, func) for a in args[1:]]
    return native(func, types, (target, *rest), {k: _to_layout_of(v, target, func) for k, v in kwargs.items()})


def _to_layout_of(a: Any, target: ShardTensor, func: Any) -> Any:
    """An operand of an in-place op, brought to the cuts of the target where it has the cut dim."""
    if not isinstance(a, Tensor):
        return a
    spec = target._spec
    shift = target.ndim - a.ndim
    cuts, sizes = [], []
    for axis, cut in enumerate(spec.cuts):
        dim = cut - shift if isinstance(cut, int) and cut >= 0 else -1
        fits = dim >= 0 and a.shape[dim] == target.shape[dim + shift]
        cuts.append(dim if fits else -1)
        sizes.append(spec.sizes[axis] if fits else ())
    if isinstance(a, ShardTensor):
        from dpzoo.shard.execute import same_mesh

        same_mesh(func, (target, a))
        return relayout(a, a._spec.like(cuts=cuts, sizes=sizes))
    check_promotion(a, func)
    if isinstance(a, torch.distributed.tensor.DTensor):
        return _to_layout_of(ShardTensor.from_dtensor(a), target, func)
    from dpzoo.shard.spec import ShardTensorSpec

    goal = ShardTensorSpec.make(spec.layout, cuts, sizes, a.shape, a.dtype)
    local = plain_to_shard(a, goal, tuple(x for x, c in enumerate(cuts) if c == -1 and spec.cuts[x] != -1))
    return from_shard(local, goal.for_local(local))


# ---------------------------------------------------------------------- foreach
def foreach(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A `torch._foreach_*` op as the loop it stands for: each element takes its own rule."""
    name = func.__name__.removeprefix("_foreach_")
    lists = [a for a in args if isinstance(a, (list, tuple)) and a]
    count = len(args[0])
    if any(len(a) != count for a in lists):
        return fallback.refuse(func, types, args, kwargs)
    single = (
        torch.linalg.vector_norm
        if name == "norm"
        else getattr(torch.Tensor, "clone" if name == "clone" else name, None)
    )
    if single is None:
        return fallback.refuse(func, types, args, kwargs)
    out = []
    for i in range(count):
        call = [a[i] if isinstance(a, (list, tuple)) else a for a in args]
        keywords = {k: v[i] if isinstance(v, (list, tuple)) else v for k, v in kwargs.items()}
        out.append(_one(single, name, call, keywords))
    return None if name.endswith("_") else out


def _one(single: Any, name: str, call: list[Any], keywords: dict[str, Any]) -> Any:
    base = name.rstrip("_")
    if base in ("addcmul", "addcdiv") and len(call) == 4:
        return single(*call[:3], value=call[3])
    if base in ("add", "sub") and len(call) == 3:
        return single(call[0], call[1], alpha=call[2])
    if base in ("maximum", "minimum"):
        bound = "min" if base == "maximum" else "max"
        return getattr(torch.Tensor, "clamp_" if name.endswith("_") else "clamp")(call[0], **{bound: call[1]})
    if base == "norm":
        return single(call[0], *call[1:], **keywords)
    return single(*call, **keywords)
