"""`ShardTensor`: one global tensor, of which this rank holds a shard.

A wrapper subclass of `torch.Tensor`: autograd sees the global tensor, `_local_tensor` is this rank's data (never part
of a graph), `_spec` says where everything else lives. Calls arrive at two doors: `__torch_function__` (ops that need a
rule with its own gradient) and `__torch_dispatch__` (pointwise ops and views, with torch's native autograd above).
What happens behind the doors is in `function_door.py` and `dispatch_door.py`.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as _NoTorchFunction
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from dpzoo.shard.errors import ShardError
from dpzoo.shard.spec import ShardTensorSpec
from dpzoo.shard.tracing import is_tracing

_make_wrapper = torch.Tensor._make_wrapper_subclass
_requires_grad, _set_requires_grad = torch.Tensor.requires_grad.__get__, torch.Tensor.requires_grad.__set__
_grad, _set_grad = torch.Tensor.grad.__get__, torch.Tensor.grad.__set__
_set_data = torch.Tensor.data.__set__


class TensorPromotionMode(Enum):
    """What happens when a plain tensor (not a Parameter, not a scalar) meets a ShardTensor in an op."""

    SILENT = "silent"
    WARN = "warn"
    DISABLED = "disabled"


class ShardTensor(torch.Tensor):
    """A tensor cut over a device mesh in shards of any size; runs in ordinary torch code.

    Make one with `scatter_tensor`, `ShardTensor.from_local` or a datapipe, not with the constructor.
    """

    __slots__ = ("_local_tensor", "_spec")

    _local_tensor: Tensor
    _spec: ShardTensorSpec
    _promotion_mode = TensorPromotionMode.SILENT

    @staticmethod
    def __new__(cls, local_tensor: Tensor, spec: ShardTensorSpec, *, requires_grad: bool = False) -> ShardTensor:
        return wrap(local_tensor.detach(), spec, requires_grad)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass  # all is done in __new__

    # ------------------------------------------------------------------ the two doors
    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_dynamo_compiling():  # the graph holds the call itself; the rules run when it is traced through autograd
            with _NoTorchFunction():
                return func(*args, **(kwargs or {}))
        try:
            answer = FUNCTIONS.get(func) or resolve(func)
            if ShardTensor._promotion_mode is not TensorPromotionMode.SILENT:
                from dpzoo.shard.promotion import checked_call

                return checked_call(answer, func, types, args, kwargs or {})
            return answer(func, types, args, kwargs or {})
        except TypeError as error:
            # From `x + y`, torch would turn it into "unsupported operand type(s)": the cause would be lost.
            if len(args) == 2 and not kwargs and all(isinstance(a, Tensor) for a in args):
                raise ShardError(f"{getattr(func, '__name__', func)}: {error}") from error
            raise

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        return (DISPATCH.get(op) or resolve_op(op))(op, types, args, kwargs or {})

    # ------------------------------------------------------------------ making and leaving
    @staticmethod
    def from_local(
        local: Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        sharding_shapes: str | dict[int, Sequence[Sequence[int]]] = "infer",
        global_shape: Sequence[int] | None = None,
        run_check: bool = False,
    ) -> ShardTensor:
        """Wrap this rank's shard; differentiable.

        Args:
            local: the shard on this rank.
            placements: one of `Shard(dim)`, `Replicate()`, `Partial()` per mesh axis.
            sharding_shapes: "infer" asks the other ranks for their sizes (one small exchange, checked on all ranks).
                "chunk" stands for the sizes of `torch.chunk`; with `global_shape` it needs no exchange.
                `{mesh_dim: (shape_of_rank_0, ...)}`, of which the size along the cut dim is used, needs none either.
            global_shape: the global shape; checked.
            run_check: compare everything between the ranks, also where no exchange is needed, and the values of
                replicated data too.

        Raises:
            LayoutError, UndeterminedShardingError: when shapes, placements and mesh do not fit together; on every rank,
                if there was an exchange. Without one a rank can only tell that its own shard does not fit.
        """
        from dpzoo.shard import construct

        return construct.from_local(local, device_mesh, placements, sharding_shapes, global_shape, run_check)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """This rank's shard as a plain tensor; differentiable.

        Args:
            grad_placements: what the gradient that comes back will be. For a sharded axis the default is the same
                `Shard`. For a replicated axis it must be told: `Replicate()` if every rank does the same with
                the value, `Partial()` if each rank uses it for its own part.

        Raises:
            UndeterminedShardingError: a replicated value that needs a gradient leaves without `grad_placements`.
        """
        from dpzoo.shard import construct

        return construct.to_local(self, grad_placements)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The global tensor, plain, on every rank; differentiable. Its gradient must be the same on every rank."""
        from dpzoo.shard import construct

        return construct.full_tensor(self, grad_placements)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        sizes: dict[int, Sequence[int]] | None = None,
    ) -> ShardTensor:
        """The same values in another layout; differentiable.

        Args:
            placements: one per mesh axis.
            sizes: `{mesh_dim: shard sizes}` for cuts that should not have the default sizes. A dim that stays where
                it is keeps its sizes; a new cut gets the sizes of `torch.chunk`.
        """
        from dpzoo.shard import construct

        return construct.redistribute(self, device_mesh, placements, sizes)

    @staticmethod
    def from_dtensor(dtensor: DTensor) -> ShardTensor:
        """The same data as a ShardTensor (no copy, no communication); differentiable."""
        from dpzoo.shard import construct

        return construct.from_dtensor(dtensor)

    def to_dtensor(self) -> DTensor:
        """The same data as a DTensor, for layouts a DTensor can express (the sizes of `torch.chunk`); differentiable.

        Raises:
            LayoutError: for other sizes; redistribute first.
        """
        from dpzoo.shard import construct

        return construct.to_dtensor(self)

    # ------------------------------------------------------------------ extension
    @staticmethod
    def register_function_handler(func: Callable[..., Any], handler: Callable[..., Any]) -> None:
        """Let `handler(func, types, args, kwargs)` answer calls of `func`; it wins over built-in rules."""
        FUNCTIONS[func] = handler

    @staticmethod
    def register_dispatch_handler(op: Any, handler: Callable[..., Any]) -> None:
        """Let `handler(op, types, args, kwargs)` answer an aten op below autograd; it wins over built-in rules."""
        DISPATCH[op] = handler

    @staticmethod
    def register_named_function_handler(name: str, handler: Callable[..., Any]) -> None:
        """As `register_function_handler`, for a function named by "module.qualname" or an op named "namespace::op"."""
        NAMED[name] = handler
        for table in (FUNCTIONS, DISPATCH):
            for func in [f for f in table if name in names_of(f)]:
                table[func] = handler

    @classmethod
    def get_promotion_mode(cls) -> TensorPromotionMode:
        """The present promotion mode."""
        return ShardTensor._promotion_mode

    @classmethod
    def set_promotion_mode(cls, mode: TensorPromotionMode) -> None:
        """Set the promotion mode for the process."""
        ShardTensor._promotion_mode = TensorPromotionMode(mode)

    @classmethod
    @contextmanager
    def promotion_mode(cls, mode: TensorPromotionMode) -> Iterator[None]:
        """Use another promotion mode inside a `with` block."""
        before = ShardTensor._promotion_mode
        cls.set_promotion_mode(mode)
        try:
            yield
        finally:
            ShardTensor._promotion_mode = before

    # ------------------------------------------------------------------ properties that need no round trip
    @property
    def spec(self) -> ShardTensorSpec:
        """The layout."""
        return self._spec

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh this tensor is cut over."""
        return self._spec.layout.device_mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis."""
        return self._spec.placements

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Global shape."""
        return self._spec.shape

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """Number of dims."""
        return len(self._spec.shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Element type."""
        return self._spec.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Device of the local shard."""
        return self._local_tensor.device

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """As for a plain tensor."""
        with _NoTorchFunction():
            return _requires_grad(self)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        with _NoTorchFunction():
            _set_requires_grad(self, value)

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """The gradient, a ShardTensor in the layout of this one."""
        with _NoTorchFunction():
            return _grad(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None and value.shape == self.shape:
            from dpzoo.shard import construct

            value = construct.as_gradient_of(self, value)
        with _NoTorchFunction():
            _set_grad(self, value)

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The tensor without its graph."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, ShardTensor):
            raise TypeError(f"the data of a ShardTensor is a ShardTensor, got {type(value).__name__}")
        with _NoTorchFunction():
            _set_data(self, value)
        self._local_tensor, self._spec = value._local_tensor, value._spec

    def size(self, dim: int | None = None) -> Any:  # type: ignore[override]
        """Global size."""
        return self._spec.shape if dim is None else self._spec.shape[dim]

    def dim(self) -> int:
        """Number of dims."""
        return len(self._spec.shape)

    def numel(self) -> int:
        """Number of global elements."""
        return self._spec.shape.numel()

    def __len__(self) -> int:
        if not self._spec.shape:
            raise TypeError("len() of a 0-d tensor")
        return self._spec.shape[0]

    def __iter__(self) -> Iterator[Any]:
        if not self._spec.shape:
            raise TypeError("iteration over a 0-d tensor")
        return iter(self.unbind(0))

    # ------------------------------------------------------------------ values that leave for Python
    def item(self) -> Any:
        """The global value of a one-element tensor, equal on all ranks (reduced or gathered first if need be)."""
        if self.numel() != 1:
            raise RuntimeError(f"a Tensor with {self.numel()} elements cannot be converted to Scalar")
        return self.detach().full_tensor().item()

    def tolist(self) -> Any:
        """The global values as nested lists."""
        return self.detach().full_tensor().tolist()

    def __bool__(self) -> bool:
        if self.numel() != 1:
            many = "more than one value" if self.numel() else "no values"
            raise RuntimeError(f"Boolean value of Tensor with {many} is ambiguous")
        return bool(self.item())

    def __float__(self) -> float:
        return float(self._scalar())

    def __int__(self) -> int:
        return int(self._scalar())

    def __complex__(self) -> complex:
        return complex(self._scalar())

    def _scalar(self) -> Any:
        if self.numel() != 1:
            raise ValueError("only one element tensors can be converted to Python scalars")
        return self.item()

    def __index__(self) -> int:
        if self.numel() != 1 or self.dtype.is_floating_point or self.dtype.is_complex:
            raise TypeError("only integer tensors of a single element can be converted to an index")
        return int(self.item())

    def __contains__(self, value: Any) -> bool:
        if not isinstance(value, (Tensor, bool, int, float, complex)):
            raise RuntimeError(
                f"Tensor.__contains__ only supports Tensor or scalar, but you passed in a {type(value)}."
            )
        return bool((self == value).any())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.ndim == 0 else object.__format__(self, spec)

    def numpy(self, *, force: bool = False) -> Any:
        """Refused: a NumPy array cannot be cut; use `full_tensor().numpy()` or `to_local().numpy()`."""
        raise TypeError(
            "numpy() of a ShardTensor is ambiguous: call full_tensor().numpy() for the global array, or "
            "to_local().numpy() for this rank's shard"
        )

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.numpy()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """The layout and this rank's shard; no communication, so that one rank alone may print."""
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"ShardTensor({self._spec.describe()} on {self._spec.layout}{grad}, local={self._local_tensor})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardTensor:
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the "
                "moment."
            )
        if id(self) in memo:
            return memo[id(self)]
        made = memo[id(self)] = wrap(self._local_tensor.clone(), self._spec, self.requires_grad)
        if self.grad is not None:
            made.grad = self.grad.__deepcopy__(memo)
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (_rebuild, (self._local_tensor, self._spec, self.requires_grad, self.__dict__))

    # ------------------------------------------------------------------ torch.compile
    def untyped_storage(self) -> torch.UntypedStorage:
        """Refused, as every way to the memory of a global tensor; torch.compile asks for it to tell tensors apart."""
        if not is_tracing():
            return super().untyped_storage()
        with _NoTorchFunction():
            return super().untyped_storage()

    def _stable_hash_for_caching(self) -> str:
        spec = self._spec
        key = (spec.describe(), spec.stride, spec.layout.coords, spec.layout.groups, spec.layout.ranks)
        return hashlib.sha256(repr((key, str(self.device), self.requires_grad)).encode()).hexdigest()

    def __tensor_flatten__(self) -> tuple[list[str], ShardTensorSpec]:
        return ["_local_tensor"], self._spec

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], spec: ShardTensorSpec, size: Any, stride: Any) -> ShardTensor:
        return wrap(inner["_local_tensor"], spec)

    def __coerce_tangent_metadata__(self) -> ShardTensor:
        """The layout that a gradient of this output will be brought to: whole where it is a sum, contiguous."""
        from dpzoo.shard import construct

        return construct.as_tangent(self, self._spec)

    def __coerce_same_metadata_as_tangent__(self, expected: Any, expected_type: Any = None) -> ShardTensor | None:
        """This gradient in the layout that the graph was made for."""
        from dpzoo.shard import construct

        return construct.as_tangent(self, expected) if expected_type in (None, ShardTensor) else None


def _rebuild(local: Tensor, spec: ShardTensorSpec, requires_grad: bool, attributes: dict[str, Any]) -> ShardTensor:
    made = wrap(local, spec, requires_grad)
    made.__dict__.update(attributes)
    return made


def wrap(local: Tensor, spec: ShardTensorSpec, requires_grad: bool = False) -> ShardTensor:
    """The global tensor whose shard on this rank is `local` (not part of any graph).

    Every result of the core passes here: a local shape that is not the one of the spec is a bug of a rule.
    """
    if local.shape != spec.local_shape or local.dtype is not spec.dtype:
        raise AssertionError(
            f"local {local.dtype}{tuple(local.shape)} is not the shard {tuple(spec.local_shape)} of {spec}"
        )
    if spec.dtype.is_complex and local.is_conj():  # the wrapper would not know of the lazy conjugation
        local = local.resolve_conj()
    t = _make_wrapper(
        ShardTensor, spec.shape, spec.stride, dtype=spec.dtype, device=local.device, requires_grad=requires_grad
    )
    t._local_tensor = local
    t._spec = spec
    return t


# Filled by registry.py and the rules; kept here so that the doors are one dict lookup away.
FUNCTIONS: dict[Any, Callable[..., Any]] = {}
DISPATCH: dict[Any, Callable[..., Any]] = {}
NAMED: dict[str, Callable[..., Any]] = {}


def names_of(func: Any) -> tuple[str, ...]:
    """The names under which `register_named_function_handler` finds a function or an op."""
    if hasattr(func, "_schema"):
        name = func._schema.name
        return (name, name.replace("::", "."), f"{name}.{func._overloadname}", str(func))
    qualname = getattr(func, "__qualname__", getattr(func, "__name__", ""))
    return (f"{getattr(func, '__module__', None)}.{qualname}", str(func))


def resolve(func: Any) -> Callable[..., Any]:
    """First call of `func`: find its handler (by name, by family, or the fallback) and remember it."""
    from dpzoo.shard import function_door

    named = next((NAMED[n] for n in names_of(func) if n in NAMED), None)
    handler = named or function_door.classify(func)
    FUNCTIONS[func] = handler
    return handler


def resolve_op(op: Any) -> Callable[..., Any]:
    """First arrival of an aten op below autograd: find its handler and remember it."""
    from dpzoo.shard import dispatch_door

    named = next((NAMED[n] for n in names_of(op) if n in NAMED), None)
    handler = named or dispatch_door.classify(op)
    DISPATCH[op] = handler
    return handler


torch.serialization.add_safe_globals([ShardTensor, _rebuild])
