"""Load weights into a model on a single device."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpzoo.weights.containers import open_weights
from dpzoo.weights.pieces import pieces
from dpzoo.weights.places import check_sha256, locate
from dpzoo.weights.plan import plan_load, while_writing
from dpzoo.weights.report import LoadReport
from dpzoo.weights.source import WeightsError, WeightSource
from dpzoo.weights.tensors import TensorSource

Origin = str | Path | WeightSource | Mapping[str, Tensor]


def load_weights(
    model: nn.Module,
    source: Origin,
    *,
    key: str | None = None,
    ema: bool = True,
    dialect: str = "auto",
    strict: bool = True,
    old_grid: Sequence[int] | None = None,
    sha256: str | Mapping[str, str] | None = None,
    revision: str | None = None,
    download: bool = False,
) -> LoadReport:
    """Fill a model's parameters and buffers from a file, a folder, the hub or a state dict.

    Everything is checked before anything is written: after an error the model is what it was. Values are cast to the
    model's dtypes and put on its devices. Memory beside the model: one piece of 4 MB, and what a dialect computes.

    Args:
        source: What :func:`open_weights` opens; a hub id; a state dict; or an open source.
        key, ema: Which state dict of a training file; see :func:`open_weights`.
        dialect: Whose names the file uses; found out by ``"auto"``.
        strict: Refuse names that are missing or unexpected. Shapes always have to fit.
        old_grid: Patches per dim of the file's position embedding, needed to resample it when the grid is no square and
            the file's configuration does not tell.
        sha256: The hash that the file must have; for a folder ``{file name: hash}``.
        revision, download: Of a hub repository; see :func:`~dpzoo.weights.places.locate`.

    Returns:
        What became of each name.

    Raises:
        WeightsError: it cannot be used; the subclass says why: damaged, unsafe, or of another architecture.
    """
    plan = plan_load(
        bare(model),
        open_origin(source, key=key, ema=ema, sha256=sha256, revision=revision, download=download),
        dialect=dialect,
        strict=strict,
        old_grid=old_grid,
    )
    for name, target in plan.targets.items():
        if hasattr(target, "device_mesh"):
            raise WeightsError(f"{name} is sharded over ranks: use dpzoo.load_pretrained, on all of them")
    plan.compute(plan.targets)
    with torch.no_grad(), while_writing(plan.report.origin):
        for name, target in plan.targets.items():
            for slab in pieces([(0, n) for n in target.shape], target.dtype.itemsize):
                target.detach()[slab].copy_(plan.read(name, slab))
    return plan.report


def open_origin(
    source: Origin,
    *,
    key: str | None = None,
    ema: bool = True,
    sha256: str | Mapping[str, str] | None = None,
    revision: str | None = None,
    download: bool = False,
) -> WeightSource:
    """Whatever names weights, as an open source; arguments and errors as those of :func:`load_weights`."""
    if isinstance(source, (str, Path)):
        path = locate(source, revision=revision, download=download)
        if sha256 is not None:
            check_sha256(path, sha256)
        return open_weights(path, key=key, ema=ema)
    if sha256 is not None:
        raise WeightsError("sha256 is checked of files and folders, not of an open source or a state dict")
    if isinstance(source, Mapping):
        from dpzoo.weights.selection import select

        chosen = select(source, "the state dict", key, ema)
        return TensorSource(chosen.tensors, f"the state dict[{chosen.key}]" if chosen.key else "the state dict")
    if isinstance(source, WeightSource):
        return source
    raise WeightsError(
        f"weights come from a path, a hub id, a state dict or a WeightSource, not a {type(source).__name__}"
    )


def bare(model: nn.Module) -> nn.Module:
    """The module inside wrappers that put a prefix before its names (``torch.compile``, data parallelism)."""
    while True:
        inner: Any = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner
