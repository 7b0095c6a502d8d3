"""The public methods that make, leave and re-lay ShardTensors; the work is in `from_local.py` and `construct.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

if TYPE_CHECKING:
    from dpzoo.shard.tensor import ShardTensor


class Layouts:
    """The part of ShardTensor that leads from shards to a tensor, from one layout to another, and back."""

    __slots__ = ()

    @staticmethod
    def from_local(
        local: Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        sharding_shapes: str | dict[int, Sequence[Sequence[int]]] = "infer",
        global_shape: Sequence[int] | None = None,
        run_check: bool | str | None = None,
    ) -> ShardTensor:
        """Wrap this rank's shard; differentiable.

        Args:
            local: the shard on this rank.
            placements: one of `Shard(dim)`, `Replicate()`, `Partial()` per mesh axis.
            sharding_shapes: "infer" asks the other ranks for their sizes (one small exchange, checked on all ranks).
                "chunk" stands for the sizes of `torch.chunk`; with `global_shape` it needs no exchange.
                `{mesh_dim: (shape_of_rank_0, ...)}`, of which the size along the cut dim is used, needs none either.
            global_shape: the global shape; checked.
            run_check: True, the default, lets the ranks agree that all of them passed the same layout and a shard that
                fits, by one reduction of three numbers per mesh axis. False leaves that out, in a hot loop whose layout
                is known to be right; so does the default inside registered handlers, whose layouts come from operands,
                and while torch.compile traces. "values" also compares replicated data, which sends it.

        Raises:
            LayoutError, UndeterminedShardingError: on every rank, when the shapes, dtypes, placements and mesh do not
                fit together. With `run_check=False` and given shapes a rank can only tell that its own does not fit.
        """
        from dpzoo.shard.from_local import from_local

        return from_local(local, device_mesh, placements, sharding_shapes, global_shape, run_check)

    def to_local(self: Any, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
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

    def full_tensor(self: Any, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The global tensor, plain, on every rank; differentiable. Its gradient must be the same on every rank."""
        from dpzoo.shard import construct

        return construct.full_tensor(self, grad_placements)

    def redistribute(
        self: Any,
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
        """The same data as a ShardTensor; differentiable.

        No copy and no communication, unless it is a norm or another result whose parts only DTensor can add up.
        """
        from dpzoo.shard import construct

        return construct.from_dtensor(dtensor)

    def to_dtensor(self: Any) -> DTensor:
        """The same data as a DTensor, for layouts a DTensor can express (the sizes of `torch.chunk`); differentiable.

        Raises:
            LayoutError: for other sizes; redistribute first.
        """
        from dpzoo.shard import construct

        return construct.to_dtensor(self)
