"""What every container of weights looks like once it is open: named tensors that are read when asked for.

A source knows the names, shapes and dtypes without reading values, so that a checkpoint is judged as a whole before one
byte of a model is overwritten; ``read`` takes a slab, so that a rank reads only the part of a tensor it keeps.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

Slab = tuple[slice, ...]


@runtime_checkable
class WeightSource(Protocol):
    """Named tensors of one checkpoint.

    Attributes:
        origin: Where they come from, for messages: a path, a hub id, or that with what was chosen inside it.
        config: Parsed JSON beside or inside the file (``config.json``, ``args.json``), None where there is none.
    """

    @property
    def origin(self) -> str: ...

    @property
    def config(self) -> Mapping[str, Any] | None: ...

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, in the file's order."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Whole shape; KeyError for a name that is not there. No value is read."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Dtype as stored. No value is read."""
        ...

    def sliceable(self, name: str) -> bool:
        """Does reading a slab cost no more than the slab? False for a tensor that is computed as a whole (resampled,
        checked against others); such a one is read once, and before anything is written."""
        ...

    def read(self, name: str, slab: Slab | None = None) -> Tensor:
        """The tensor on the CPU, or only ``slab`` of it: one ``slice(start, stop)`` per leading dim, step 1.

        The result may share memory with the file: copy it, never write into it.

        Raises:
            KeyError: no such name.
            DamagedWeightsError: the bytes are not there.
            WeightsMismatchError: a dialect finds values that it cannot take (copies that should be equal are not).
        """
        ...


@dataclass(frozen=True)
class Change:
    """One thing that a dialect did on the way from their names to ours, for the report.

    Attributes:
        kind: What happened.
        theirs: Names in the file that took part.
        ours: Names in the model that came of it. For a dropped one those that therefore keep the values they have (the
            head of another number of classes), which strict loading then does not call missing; else empty.
        detail: For the reader: grids, the reason of a drop, how channels were adapted.
    """

    kind: Literal["renamed", "resampled", "dropped", "split", "merged"]
    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    detail: str = ""


class WeightsError(ValueError):
    """A checkpoint cannot be used; the model was not touched."""


class DamagedWeightsError(WeightsError):
    """The file is truncated, its parts do not fit, or its hash is another one."""


class UnsafeWeightsError(WeightsError):
    """Reading the file would run code of its author, or leave the folder it is read into."""


class WeightsMismatchError(WeightsError):
    """The file holds the weights of another architecture."""
