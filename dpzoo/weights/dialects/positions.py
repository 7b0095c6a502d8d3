"""Position embeddings made to fit: another grid, other prefix tokens, or a fixed table in place of a stored one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from dpzoo.weights.dialects.fitting import Job
from dpzoo.weights.dialects.lazy import Computed, Lazy, Part, summed
from dpzoo.weights.dialects.noted import grid_of_config
from dpzoo.weights.resampling import resample_positions
from dpzoo.weights.source import WeightsMismatchError


@dataclass(frozen=True)
class _Layout:
    """How the rows of a position embedding are laid out: prefix tokens, then a grid."""

    grid: tuple[int, ...]
    prefix: int
    assumed: bool = False


@dataclass(frozen=True)
class Positions:
    """``pos_embed (1, prefix + N, D)`` of a model with a patch embedding.

    The file's grid is taken from ``old_grid``, else from its config; else it is the model's if the shapes are equal,
    and a square for nets of square pictures (as timm assumes). Otherwise it is an error: rows do not tell their grid.

    Attributes:
        embedder: The model's patch embedding, which has ``grid_size`` and ``proj.weight``.
        name: The embedding.
        prefix_tokens: Names of tensors ``(1, tokens, D)`` that stand before the patches.
    """

    embedder: str
    name: str = "pos_embed"
    prefix_tokens: tuple[str, ...] = ()

    def apply(self, job: Job) -> None:
        tensor, here = job.file(self.name), job.here(self.name)
        if here is None:
            return
        network = job.network
        fixed = self.name in dict(network.named_buffers(recurse=False))
        if tensor is None:
            if fixed:
                job.drop((), (job.root + self.name,), "the model's own fixed table")
            return
        if len(tensor.shape) != 3 or tensor.shape[2] != here[2]:
            return  # another width: the shapes are reported as they are
        grid = tuple(network.get_submodule(self.embedder).grid_size)  # type: ignore[arg-type]
        new = _Layout(grid, here[1] - math.prod(grid))
        old = self._old_layout(job, tensor, new, fixed)
        if (old.grid, old.prefix) == (new.grid, new.prefix):
            return
        if len(old.grid) != len(new.grid):
            raise WeightsMismatchError(f"{self.name}: a grid of {old.grid} in the file, {new.grid} in the model")
        if fixed and self._is_the_models_table(tensor, network, old, new):
            full = job.root + self.name
            job.drop((full,), (full,), f"sines and cosines, rebuilt for {_sizes(new.grid)} from {_sizes(old.grid)}")
            return
        if new.prefix == 0 < old.prefix:
            self._fold_prefix(job, old)
        moved = Computed(here, (tensor,), partial(_moved, old=old, new=new))
        job.replace(self.name, moved, _detail(old, new))

    def _old_layout(self, job: Job, tensor: Lazy, new: _Layout, fixed: bool) -> _Layout:
        rows = tensor.shape[1]
        counts = [t.shape[1] for t in map(job.file, self.prefix_tokens) if t is not None]
        # Registers often have no position; a class token alone has one, unless our model says otherwise.
        without = {0} if len(counts) != 1 or new.prefix == 0 else set()
        prefixes = sorted({*without, sum(counts), *counts[:1]}, reverse=True)
        kernel = job.file(f"{self.embedder}.proj.weight")
        shape = () if kernel is None else kernel.shape
        given = job.old_grid or grid_of_config(job.config, shape[2:])
        if given is not None:
            return self._told(tuple(given), rows, prefixes, "old_grid" if job.old_grid else "the config")
        square = _square(rows, prefixes) if len(new.grid) == 2 else None
        like_square = fixed and square is not None and self._is_the_models_table(tensor, job.network, square, new)
        here = job.here(f"{self.embedder}.proj.weight") or ()
        if rows == new.prefix + math.prod(new.grid) and shape[2:] == here[2:]:
            another = like_square and not self._is_the_models_table(tensor, job.network, new, new)
            return square if another and square is not None else new
        pictures = len(shape) == 4 and shape[1] == 3 and shape[2] == shape[3]
        if square is not None and (pictures or like_square):
            return square
        raise WeightsMismatchError(
            f"{self.name} has {rows} rows, the model a grid of {_sizes(new.grid)} and {new.prefix} prefix tokens; "
            "rows do not tell the grid they were learned on: pass it as old_grid=(patches along each dim)"
        )

    def _told(self, grid: tuple[int, ...], rows: int, prefixes: Sequence[int], source: str) -> _Layout:
        old = _Layout(grid, rows - math.prod(grid))
        if old.prefix not in prefixes:
            raise WeightsMismatchError(
                f"{self.name} has {rows} rows, which are not a grid of {old.grid} (from {source}) with "
                f"{' or '.join(map(str, prefixes))} prefix tokens; pass the right old_grid="
            )
        return old

    def _is_the_models_table(self, theirs: Lazy, network: nn.Module, old: _Layout, new: _Layout) -> bool:
        """Do a stored and a fixed table agree at all places that both grids have?"""
        table = getattr(network, self.name)
        if type(table) not in (Tensor, nn.Parameter) or table.is_meta:
            return True  # the values are not at hand; a fixed table is what the model asks for
        if old.prefix or new.prefix:
            return False
        both = tuple(slice(min(a, b)) for a, b in zip(old.grid, new.grid, strict=True))
        pairs = ((theirs.read(), old), (table.detach(), new))
        one, other = (t[0].unflatten(0, layout.grid)[both].cpu().double() for t, layout in pairs)
        return torch.allclose(one, other, rtol=0, atol=1e-2)

    def _fold_prefix(self, job: Job, old: _Layout) -> None:
        """Prefix tokens without position embedding: theirs is added to the tokens, which is the same."""
        start, positions = 0, job.file(self.name)
        for name in self.prefix_tokens:
            token = job.file(name)
            if token is None or start >= old.prefix or positions is None:
                continue
            size = token.shape[1]
            if job.here(name) is not None:
                job.replace(name, summed(token, Part(positions, 1, start, size)), "position added", kind="merged")
            start += size


def _square(rows: int, prefixes: Sequence[int]) -> _Layout | None:
    """The square grid that rows may be, if there is one way to see them so."""
    found = [p for p in prefixes if math.isqrt(rows - p) ** 2 == rows - p > 0]
    return _Layout((math.isqrt(rows - found[0]),) * 2, found[0], assumed=True) if len(found) == 1 else None


def _moved(positions: Tensor, old: _Layout, new: _Layout) -> Tensor:
    moved = resample_positions(positions, old.grid, new.grid, prefix_tokens=old.prefix)
    prefix, places = moved[:, : old.prefix], moved[:, old.prefix :]
    rows = prefix[:, : new.prefix]
    missing = places.new_zeros(1, new.prefix - rows.shape[1], places.shape[2])  # tokens without position embedding
    return torch.cat([rows, missing, places], dim=1)


def _detail(old: _Layout, new: _Layout) -> str:
    said = [] if old.grid == new.grid else [f"grid {_sizes(old.grid)} -> {_sizes(new.grid)}, bicubic, antialiased"]
    if old.assumed:
        said.append("a square grid is assumed: pass old_grid= if it is not")
    if old.prefix != new.prefix:
        said.append(f"prefix tokens with a position {old.prefix} -> {new.prefix}")
    return "; ".join(said)


def _sizes(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))
