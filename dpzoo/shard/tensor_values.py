"""Values of a ShardTensor that leave for Python: the global ones, equal on all ranks, or an error with a way out."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Values:
    """The part of ShardTensor that answers `item()`, `float()`, `bool()`, f-strings and the like."""

    __slots__ = ()

    def item(self: Any) -> Any:
        """The global value of a one-element tensor, equal on all ranks (reduced or gathered first if need be)."""
        if self.numel() != 1:
            raise RuntimeError(f"a Tensor with {self.numel()} elements cannot be converted to Scalar")
        return self.detach().full_tensor().item()

    def tolist(self: Any) -> Any:
        """The global values as nested lists."""
        return self.detach().full_tensor().tolist()

    def __bool__(self: Any) -> bool:
        if self.numel() != 1:
            many = "more than one value" if self.numel() else "no values"
            raise RuntimeError(f"Boolean value of Tensor with {many} is ambiguous")
        return bool(self.item())

    def __float__(self: Any) -> float:
        return float(self._scalar())

    def __int__(self: Any) -> int:
        return int(self._scalar())

    def __complex__(self: Any) -> complex:
        return complex(self._scalar())

    def _scalar(self: Any) -> Any:
        if self.numel() != 1:
            raise ValueError("only one element tensors can be converted to Python scalars")
        return self.item()

    def __index__(self: Any) -> int:
        if self.numel() != 1 or self.dtype.is_floating_point or self.dtype.is_complex:
            raise TypeError("only integer tensors of a single element can be converted to an index")
        return int(self.item())

    def __contains__(self: Any, value: Any) -> bool:
        if not isinstance(value, (Tensor, bool, int, float, complex)):
            raise RuntimeError(
                f"Tensor.__contains__ only supports Tensor or scalar, but you passed in a {type(value)}."
            )
        return bool((self == value).any())

    def __format__(self: Any, spec: str) -> str:
        return format(self.item(), spec) if self.ndim == 0 else object.__format__(self, spec)

    def numpy(self: Any, *, force: bool = False) -> Any:
        """Refused: a NumPy array cannot be cut; use `full_tensor().numpy()` or `to_local().numpy()`."""
        raise TypeError(
            "numpy() of a ShardTensor is ambiguous: call full_tensor().numpy() for the global array, or "
            "to_local().numpy() for this rank's shard"
        )

    def __array__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.numpy()
