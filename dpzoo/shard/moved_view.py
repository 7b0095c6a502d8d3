"""Views whose elements had to move: what torch promises of memory shared with a base, kept by hand.

`MovedView`: autograd knows it as a view (a row of a cut dim that every rank learns). What is written into it is
written home into its base; when the base has been written since, it is fetched again before it is read.
`CopiedView`: autograd knows it as a tensor of its own (a reshape that shifts borders first). Writes can not go home
with their gradient, so that after a write of one side the other side may not be read any more. In a model that goes on
with the view alone, as most do, nothing is refused.
All ranks make the same writes, so that all of them fetch, or raise, alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as _NoTorchFunction

from dpzoo.shard.bridges import relayout
from dpzoo.shard.errors import ShardError
from dpzoo.shard.spec import ShardTensorSpec
from dpzoo.shard.tensor import ShardTensor

_slot: Any = ShardTensor.__dict__["_local_tensor"]
_version_of: Any = torch.Tensor._version.__get__  # type: ignore[attr-defined]
_base_of: Any = torch.Tensor._base.__get__  # type: ignore[attr-defined, union-attr]
_COUNTING = torch._C.DispatchKey.ADInplaceOrView
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded
_writes = 0  # in-place writes so far; stands in for the version where inference mode keeps none


def _version(t: Tensor) -> int | None:
    """torch's counter of in-place writes, shared by the views of a base; None in inference mode."""
    try:
        with _NoTorchFunction():
            return _version_of(t)
    except RuntimeError:
        return None


def counted(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a local op below autograd so that views share torch's version counter and writes count.

    Then a graph on the shards notices, as any graph does, that a tensor it has saved was changed in place.
    """
    before = _is_excluded(_COUNTING)
    _set_excluded(_COUNTING, False)
    try:
        return op(*args, **kwargs)
    finally:
        _set_excluded(_COUNTING, before)


def _set_local(self: ShardTensor, local: Tensor) -> None:
    _slot.__set__(self, local)


# ---------------------------------------------------------------------- known to autograd
class MovedView(ShardTensor):
    """A view apart from its base; made by `moved_view` and `alias_of`."""

    _viewed: ShardTensor
    _read: Callable[[], Tensor]
    _write: Callable[[Tensor], None]
    _stamp: tuple[int | None, int]

    def _local(self) -> Tensor:
        local = _slot.__get__(self)
        now = (_version(self), _writes)
        if now != self._stamp and (now[0] is None or now[0] != self._stamp[0]):
            fresh = self._read()
            if fresh is not local:
                counted(local.copy_, fresh)
        self._stamp = now
        return local

    _local_tensor = property(_local, _set_local)  # type: ignore[assignment]


def moved_view(
    out: ShardTensor, base: ShardTensor, read: Callable[[], Tensor], write: Callable[[Tensor], None]
) -> ShardTensor:
    """Make `out`, which is no view in memory, behave as a view of `base`.

    Args:
        read: this rank's part of the view, taken from the base anew.
        write: puts this rank's part of the view into the local tensor of the base; called on every rank.
    """
    out.__class__ = MovedView
    assert isinstance(out, MovedView)
    out._viewed, out._read, out._write, out._stamp = base, read, write, (_version(base), _writes)
    return out


def alias_of(base: ShardTensor, out: ShardTensor) -> ShardTensor:
    """`out` shares the local memory of `base`; where that one is apart from its own base, so is `out`."""
    if base.__class__ is ShardTensor:
        return out
    if isinstance(base, MovedView):
        local = _slot.__get__(out)

        def read() -> Tensor:
            base._local()  # if stale, fetched anew into the memory that `out` shares
            return local

        return moved_view(out, base, read, lambda _: wrote(base))
    if isinstance(base, CopiedView):
        _copy_of(out, base._link)
    return out


# ---------------------------------------------------------------------- a tensor of its own to autograd
class _Link:
    """What a `CopiedView`, and the views of it, have in common: what they would share memory with, and since when.

    That is the tensor the view was taken of, and the one autograd knows that to be a view of (none in inference mode).
    """

    def __init__(self, viewed: ShardTensor) -> None:
        with _NoTorchFunction():
            above = _base_of(viewed)
        self.version = _version(viewed)
        self._refs = [weakref.ref(t) for t in (viewed, above) if t is not None]
        self._above = viewed._link if isinstance(viewed, CopiedView) else None

    def alive(self) -> list[ShardTensor]:
        """Those of them that are still in use."""
        return [t for ref in self._refs if (t := ref()) is not None]

    def changed(self) -> bool:
        """Whether one was written since, other than through this view."""
        return any(t._by is not self if isinstance(t, Outdated) else _version(t) != self.version for t in self.alive())

    def outdate(self) -> None:
        """They can not be read any more."""
        for t in self.alive():
            if not isinstance(t, Outdated):
                t.__class__ = Outdated
                t._by = self  # type: ignore[attr-defined]
        if self._above is not None:
            self._above.outdate()


class CopiedView(ShardTensor):
    """What torch would return as a view of another tensor; made by `copied_view`."""

    _link: _Link

    def _local(self) -> Tensor:
        if self._link.changed():
            base = self._link.alive()[0]
            raise ShardError(
                f"{self._spec.describe()} is a view of a ShardTensor of shape {tuple(base.shape)} that was changed in "
                "place after the view was taken. Its elements had to move to other ranks, so that it can not follow: "
                "take the view after the change"
            )
        return _slot.__get__(self)

    _local_tensor = property(_local, _set_local)  # type: ignore[assignment]


class Outdated(ShardTensor):
    """A tensor of which a `CopiedView` was written: its own values are those from before."""

    _by: _Link

    def _local(self) -> Tensor:
        raise ShardError(
            f"a view of {self._spec.describe()} was changed in place. The elements of that view had to move to other "
            "ranks, so that the change did not arrive here: clone() the view before the change, or use the "
            "out-of-place op"
        )

    _local_tensor = property(_local, _set_local)  # type: ignore[assignment]


def copied_view(out: Any, base: Any) -> Any:
    """Mark `out` as what torch would return as a view of `base`."""
    if isinstance(out, ShardTensor) and isinstance(base, ShardTensor) and out is not base:
        _copy_of(out, _Link(base))
    return out


def _copy_of(out: ShardTensor, link: _Link) -> None:
    out.__class__ = CopiedView
    assert isinstance(out, CopiedView)
    out._link = link


def relaid_view(x: ShardTensor, spec: ShardTensorSpec) -> ShardTensor:
    """`x` in another layout, from which a view of `x` will be taken; differentiable."""
    return copied_view(relayout(x, spec), x)


def wrote(t: Tensor) -> None:
    """To be called after every in-place write of a ShardTensor's local tensor."""
    global _writes
    _writes += 1
    if isinstance(t, MovedView):
        t._write(_slot.__get__(t))
        wrote(t._viewed)
    elif isinstance(t, CopiedView):
        t._link.outdate()
