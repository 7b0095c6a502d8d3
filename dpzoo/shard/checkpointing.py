"""How `torch.distributed.checkpoint` sees a ShardTensor: this rank's shard, at its true place in the global tensor.

The three methods are those by which torch asks its own DTensors. They need no communication, since a spec holds the
sizes of all shards. Ranks that hold the same shard name the same place, by which torch writes it once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dpzoo.shard.errors import LayoutError

if TYPE_CHECKING:  # the package takes a second to import, which those who save pay
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class Checkpointable:
    """The part of ShardTensor that `torch.distributed.checkpoint` calls, to save and to load in place."""

    __slots__ = ()

    def __create_write_items__(self: Any, fqn: str, object: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self: Any) -> list[ChunkStorageMetadata]:
        """The box that this rank holds: where it begins and how large it is; none if it holds no element.

        An empty shard begins where its neighbour does. Torch, which knows a shard by its beginning, would take the two
        for copies and write one of them. A tensor without any element is one box, so that its name is not lost.
        """
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        spec = self._spec
        if spec.is_partial:
            raise LayoutError(
                f"{spec.describe()} cannot be checkpointed: each rank holds a summand. Redistribute it to Shard or "
                "Replicate first"
            )
        if spec.shape.numel() == 0:
            return [ChunkStorageMetadata(torch.Size([0] * spec.ndim), spec.shape)]
        if spec.local_shape.numel() == 0:
            return []
        return [ChunkStorageMetadata(torch.Size(spec.offsets()), spec.local_shape)]

    def __get_tensor_shard__(self: Any, index: MetadataIndex) -> Tensor:
        if self._spec.shape.numel() == 0:
            return self._local_tensor.new_empty(self._spec.shape)
        return self._local_tensor
