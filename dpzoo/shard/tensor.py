"""`ShardTensor`: one global tensor, of which this rank holds a shard.

A wrapper subclass of `torch.Tensor`: autograd sees the global tensor, `_local_tensor` is this rank's data (never part
of a graph), `_spec` says where everything else lives. Calls arrive at two doors: `__torch_function__` (ops that need a
rule with its own gradient) and `__torch_dispatch__` (pointwise ops and views, with torch's native autograd above).
What happens behind the doors is in `function_door.py` and `dispatch_door.py`.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as _NoTorchFunction
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from dpzoo.shard.checkpointing import Checkpointable
from dpzoo.shard.spec import ShardTensorSpec
from dpzoo.shard.tables import DISPATCH, FUNCTIONS, NAMED, Registering, resolve, resolve_op
from dpzoo.shard.tensor_layouts import Layouts
from dpzoo.shard.tensor_values import Values
from dpzoo.shard.tracing import is_tracing, make_known

__all__ = ["DISPATCH", "FUNCTIONS", "NAMED", "ShardTensor", "TensorPromotionMode", "wrap"]

_in_inference_mode = torch.is_inference_mode_enabled
_make_wrapper = torch.Tensor._make_wrapper_subclass
_requires_grad, _set_requires_grad = torch.Tensor.requires_grad.__get__, torch.Tensor.requires_grad.__set__
_grad, _set_grad = torch.Tensor.grad.__get__, torch.Tensor.grad.__set__
_grad_fn, _output_nr = torch.Tensor.grad_fn.__get__, torch.Tensor.output_nr.__get__
_set_data = torch.Tensor.data.__set__


class TensorPromotionMode(Enum):
    """What happens when a plain tensor (not a Parameter, not a scalar) meets a ShardTensor in an op."""

    SILENT = "silent"
    WARN = "warn"
    DISABLED = "disabled"


class ShardTensor(Layouts, Values, Checkpointable, Registering, torch.Tensor):
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
        answer = FUNCTIONS.get(func) or resolve(func)
        if ShardTensor._promotion_mode is not TensorPromotionMode.SILENT:
            from dpzoo.shard.promotion import checked_call

            return checked_call(answer, func, types, args, kwargs or {})
        return answer(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        answer = DISPATCH.get(op) or resolve_op(op)
        if _in_inference_mode() and op.is_view and not args[0].is_inference():
            # As in torch, a view of a tensor from outside shares its version counter; an inference tensor has none.
            with torch.inference_mode(False), torch.no_grad():
                return answer(op, types, args, kwargs or {})
        return answer(op, types, args, kwargs or {})

    # ------------------------------------------------------------------ promotion
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
    def grad_fn(self) -> Any:
        """The node of autograd that made it, or None."""
        with _NoTorchFunction():
            return _grad_fn(self)

    @property
    def output_nr(self) -> int:  # type: ignore[override]
        """Which of the results of that node it is."""
        with _NoTorchFunction():
            return _output_nr(self)

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
        if type(self._local_tensor) is FakeTensor:  # an input: one that the graph writes must not have another name
            return self._local_tensor.untyped_storage()
        with _NoTorchFunction():
            return super().untyped_storage()

    def _stable_hash_for_caching(self) -> str:
        spec = self._spec
        key = (spec.describe(), spec.stride, spec.layout.coords, spec.layout.groups, spec.layout.ranks)
        return hashlib.sha256(repr((key, str(self.device), self.requires_grad)).encode()).hexdigest()

    def __tensor_flatten__(self) -> tuple[list[str], ShardTensorSpec]:
        make_known(self)
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
    # By position, which is faster: storage offset, memory format, dtype, layout, device, pinned, requires_grad.
    t = _make_wrapper(
        ShardTensor, spec.shape, spec.stride, None, None, spec.dtype, torch.strided, local.device, False, requires_grad
    )
    t._local_tensor = local
    t._spec = spec
    return t


def _plain_tangent(g: Tensor, expected: Any, expected_type: Any = None) -> Tensor | None:
    """The zeros that autograd makes, as plain ones, for an output that nothing was computed from."""
    from dpzoo.shard import construct

    return construct.plain_tangent(g, expected) if expected_type is ShardTensor else None


# torch asks the gradient, and a plain one has no answer: https://github.com/pytorch/pytorch/issues/172556
if not hasattr(torch.Tensor, "__coerce_same_metadata_as_tangent__"):
    torch.Tensor.__coerce_same_metadata_as_tangent__ = _plain_tangent  # type: ignore[attr-defined]

torch.serialization.add_safe_globals([ShardTensor, _rebuild])
