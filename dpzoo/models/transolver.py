"""Transolver: a transformer for fields on point clouds and grids, whose attention runs among slices of the points.

Papers: Wu et al. 2024, "Transolver: A Fast Transformer Solver for PDEs on General Geometries" (arXiv:2402.02366);
Luo et al. 2025, "Transolver++: An Accurate Neural Solver for PDEs on Million-Scale Geometries" (arXiv:2502.02414).
State-dict keys are those of the authors' code (MIT, https://github.com/thuml/Transolver); the code is written anew.

Single-device code: it runs domain-parallel when its input is a ``ShardTensor``. Cut the points: then the ranks meet
once in each block, in one small sum (see :mod:`dpzoo.models.layers.physics_attention`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpzoo.models.hub import HubMixin
from dpzoo.models.layers.physics_attention import EPS, PhysicsAttention


class Transolver(HubMixin, nn.Module):
    """Embed points, mix them by physics attention, read out a value at each.

    Args:
        space_dim: Numbers that say where a point is and how it lies (coordinates, normals, distance to the surface).
        out_dim: Fields to predict.
        fun_dim: Numbers of the input function, per point or the same for all points of a sample; 0 for none.
        embed_dim, depth, num_heads, mlp_ratio, num_slices, dropout: Of the blocks.
        grid: None for points without order. Sizes of a 2-D or 3-D grid for the structured model, whose projections are
            convolutions; they are only the default, any grid of that many dims is accepted.
        plus: Transolver++ (points without order only).
        slice_noise: When Transolver++ draws Gumbel noise: "train", "always" (as the authors' code does) or "never".
        slice_eps: Added to the sum of a slice's weights; 0.01 gives the outputs of PhysicsNeMo's weights exactly.
        time: Take a time per sample.
        condition_dim: Numbers per sample that are added to every point after one linear layer (Mach number, angle of
            attack, ...); 0 for none. Key ``embedding.*``.
        unified_pos: Replace ``x`` by the distances of its coordinates to a regular reference grid of ``ref`` points a
            dim.
        ref_bounds: (low, high) of the reference grid for each coordinate; its length says how many leading entries of
            ``x`` are coordinates. Unit intervals for the first ``min(space_dim, 3)`` by default.

    Shape: x ``(B, N, space_dim)``, fx ``(B, N, fun_dim)`` or ``(B, fun_dim)``, time ``(B,)``, condition
    ``(B, condition_dim)`` -> ``(B, N, out_dim)``. The structured model takes ``(B, *grid, channels)`` and also the
    flattened ``(B, prod(grid), channels)``.

    Raises:
        ValueError: arguments that contradict each other; in ``forward``, inputs of other shapes than the model has been
            built for, or an input that is missing or not expected.
    """

    reference: Tensor

    def __init__(
        self,
        space_dim: int = 3,
        out_dim: int = 1,
        fun_dim: int = 0,
        *,
        embed_dim: int = 256,
        depth: int = 8,
        num_heads: int = 8,
        mlp_ratio: float = 2.0,
        num_slices: int = 64,
        dropout: float = 0.0,
        grid: Sequence[int] | None = None,
        plus: bool = False,
        slice_noise: str = "train",
        slice_eps: float = EPS,
        time: bool = False,
        condition_dim: int = 0,
        unified_pos: bool = False,
        ref: int = 8,
        ref_bounds: Sequence[tuple[float, float]] | None = None,
    ) -> None:
        super().__init__()
        if grid is not None and len(grid) not in (2, 3):
            raise ValueError(f"grid gives 2 or 3 sizes, got {grid!r}; leave it out for points without order")
        if time and embed_dim % 2:
            raise ValueError(f"the time embedding needs an even embed_dim, got {embed_dim}")
        self.space_dim, self.out_dim, self.fun_dim, self.embed_dim = space_dim, out_dim, fun_dim, embed_dim
        self.grid = None if grid is None else tuple(grid)
        self.condition_dim, self.unified_pos = condition_dim, unified_pos
        in_dim = space_dim + fun_dim
        if unified_pos:
            bounds = ref_bounds if ref_bounds is not None else ((0.0, 1.0),) * min(space_dim, 3)
            self.register_buffer("reference", _reference_grid(ref, bounds), persistent=False)
            in_dim = len(self.reference) + fun_dim
        self.preprocess = PointMlp(in_dim, 2 * embed_dim, embed_dim)
        # The authors' structured model adds it only where there is no input function.
        needs_placeholder = grid is None or not fun_dim
        self.placeholder = nn.Parameter(torch.empty(embed_dim)) if needs_placeholder else None
        if time:
            self.time_fc = nn.Sequential(nn.Linear(embed_dim, embed_dim), nn.SiLU(), nn.Linear(embed_dim, embed_dim))
        self.takes_time = time
        if condition_dim:
            self.embedding = nn.Linear(condition_dim, embed_dim)
        attention: dict[str, Any] = {
            "num_heads": num_heads,
            "num_slices": num_slices,
            "dropout": dropout,
            "grid_ndim": 0 if grid is None else len(grid),
            "plus": plus,
            "slice_noise": slice_noise,
            "slice_eps": slice_eps,
        }
        self.blocks = nn.ModuleList(
            TransolverBlock(embed_dim, int(embed_dim * mlp_ratio), out_dim if last else None, attention)
            for last in (i == depth - 1 for i in range(depth))
        )
        self.register_load_state_dict_pre_hook(_drop_unused_placeholder)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as the authors do: linear layers truncated normal (std 0.02), convolutions as torch does."""
        if self.placeholder is not None:
            nn.init.uniform_(self.placeholder, 0.0, 1.0 / self.embed_dim)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that optimizers usually leave undecayed, besides biases and norms."""
        names = {name for name, _ in self.named_parameters()}
        return {n for n in names if n == "placeholder" or n.endswith((".temperature", ".Attn.bias"))}

    def example_inputs(self, batch_size: int = 1) -> tuple[Tensor | None, ...]:
        """Random inputs that ``forward`` accepts, on the weights' device and in their dtype."""
        weight = next(self.parameters())
        points = (96,) if self.grid is None else self.grid

        def random(*shape: int) -> Tensor:
            return weight.new_empty(batch_size, *shape).uniform_()

        return (
            random(*points, self.space_dim),
            random(*points, self.fun_dim) if self.fun_dim else None,
            random() if self.takes_time else None,
            random(self.condition_dim) if self.condition_dim else None,
        )

    # ------------------------------------------------------------------ inputs
    def _on_grid(self, t: Tensor) -> Tensor:
        """(B, prod(grid), C) as (B, *grid, C); anything else as it is."""
        if self.grid is None or t.ndim != 3 or t.shape[1] != math.prod(self.grid):
            return t
        return t.unflatten(1, self.grid)

    def _check(self, x: Tensor, fx: Tensor | None, time: Tensor | None, condition: Tensor | None) -> None:
        ndim = 3 if self.grid is None else len(self.grid) + 2
        if x.ndim != ndim or x.shape[-1] != self.space_dim:
            points = "N" if self.grid is None else ", ".join(map(str, self.grid))
            raise ValueError(f"Transolver: x should be (B, {points}, {self.space_dim}), got {tuple(x.shape)}")
        for name, given, wanted in (
            ("fx", fx is not None, self.fun_dim > 0),
            ("time", time is not None, self.takes_time),
            ("condition", condition is not None, self.condition_dim > 0),
        ):
            if given != wanted:
                raise ValueError(
                    f"Transolver: {name} is {'given' if given else 'missing'}; the model was built "
                    f"{'with' if wanted else 'without'} it (fun_dim={self.fun_dim}, time={self.takes_time}, "
                    f"condition_dim={self.condition_dim})"
                )
        if fx is not None and (fx.shape[-1] != self.fun_dim or fx.shape[:-1] not in (x.shape[:-1], x.shape[:1])):
            raise ValueError(
                f"Transolver: fx should be {(*x.shape[:-1], self.fun_dim)} or {(x.shape[0], self.fun_dim)}, "
                f"got {tuple(fx.shape)}"
            )

    def embed(
        self, x: Tensor, fx: Tensor | None = None, time: Tensor | None = None, condition: Tensor | None = None
    ) -> Tensor:
        """Inputs, as in the class -> features of the points before the first block, (B, P, embed_dim)."""
        x, fx = self._on_grid(x), None if fx is None else self._on_grid(fx)
        self._check(x, fx, time, condition)
        if self.unified_pos:
            x = torch.cdist(x[..., : self.reference.shape[1]], self.reference)
        if fx is not None:
            x = torch.cat([x, self._per_point(fx, x).expand(*x.shape[:-1], -1)], dim=-1)
        h = self.preprocess(x)
        if self.placeholder is not None:
            h = h + self.placeholder
        if time is not None:
            h = h + self._per_point(self.time_fc(_time_embedding(time, self.embed_dim).to(h.dtype)), h)
        if condition is not None:
            h = h + self._per_point(self.embedding(condition), h)
        return h

    @staticmethod
    def _per_point(t: Tensor, like: Tensor) -> Tensor:
        """(B, C) as (B, 1, ..., C), so that it broadcasts over the points of `like`; one value per point stays."""
        return t if t.ndim == like.ndim else t.unflatten(0, (-1,) + (1,) * (like.ndim - 2))

    def forward(
        self, x: Tensor, fx: Tensor | None = None, time: Tensor | None = None, condition: Tensor | None = None
    ) -> Tensor:
        """Run the whole model; shapes as in the class."""
        h = self.embed(x, fx, time, condition)
        for block in self.blocks:
            h = block(h)
        return h.flatten(1, -2) if x.ndim == 3 and self.grid is not None else h

    def predict_in_chunks(self, x: Tensor, *inputs: Tensor | None, chunk_size: int, **options: Any) -> Tensor:
        """``forward`` in pieces of the points; see :func:`dpzoo.models.transolver_chunks.predict_in_chunks`."""
        from dpzoo.models.transolver_chunks import predict_in_chunks

        return predict_in_chunks(self, x, *inputs, chunk_size=chunk_size, **options)


class TransolverBlock(nn.Module):
    """``x += Attn(ln_1(x)); x += mlp(ln_2(x))``, and in the last block the read-out ``mlp2(ln_3(x))``.

    Shape: ``(B, P, dim)`` -> the same, or ``(B, P, out_dim)``.
    """

    def __init__(self, dim: int, hidden_dim: int, out_dim: int | None, attention: dict[str, Any]) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(dim)
        self.Attn = PhysicsAttention(dim, **attention)
        self.ln_2 = nn.LayerNorm(dim)
        self.mlp = PointMlp(dim, hidden_dim, dim)
        self.is_last = out_dim is not None
        if out_dim is not None:
            self.ln_3 = nn.LayerNorm(dim)
            self.mlp2 = nn.Linear(dim, out_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Apply both residual branches, and the read-out where there is one."""
        return self._pointwise(x + self.Attn(self.ln_1(x)))

    def slice_sums(self, x: Tensor) -> Tensor:
        """What these points add to the slices: (B, H, G, D + 1)."""
        return self.Attn.gather_slices(*self.Attn.assign(self.ln_1(x)))

    def with_tokens(self, x: Tensor, tokens: Tensor) -> Tensor:
        """The block for these points, given the tokens that all points together lead to."""
        weights, _ = self.Attn.assign(self.ln_1(x))
        return self._pointwise(x + self.Attn.spread(weights, tokens))

    def _pointwise(self, x: Tensor) -> Tensor:
        x = x + self.mlp(self.ln_2(x))
        return self.mlp2(self.ln_3(x)) if self.is_last else x


class PointMlp(nn.Module):
    """Linear, GELU, linear.

    Shape: ``(..., dim)`` -> ``(..., out_dim)``. Keys: ``linear_pre.0.*``, ``linear_post.*``.
    """

    def __init__(self, dim: int, hidden_dim: int, out_dim: int) -> None:
        super().__init__()
        self.linear_pre = nn.Sequential(nn.Linear(dim, hidden_dim), nn.GELU())
        self.linear_post = nn.Linear(hidden_dim, out_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Act on each point by itself."""
        return self.linear_post(self.linear_pre(x))


def _reference_grid(ref: int, bounds: Sequence[tuple[float, float]]) -> Tensor:
    """(ref ** dims, dims) points of a regular grid, the last coordinate fastest."""
    axes = [torch.linspace(low, high, ref) for low, high in bounds]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, len(axes))


def _time_embedding(time: Tensor, dim: int, max_period: float = 10000.0) -> Tensor:
    """(B,) -> (B, dim): cosines, then sines, of frequencies from 1 down to almost 1 / max_period."""
    half = dim // 2
    freqs = torch.exp(-math.log(max_period) / half * torch.arange(half, dtype=torch.float32, device=time.device))
    angles = time.reshape(-1, 1) * freqs.to(torch.promote_types(time.dtype, torch.float32))
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _drop_unused_placeholder(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """The authors' structured model holds a placeholder also where it never uses it."""
    if getattr(module, "placeholder", None) is None:
        state.pop(prefix + "placeholder", None)
