"""Physics attention: points are softly assigned to a few slices, and attention runs among the slices only.

Papers: Wu et al. 2024, "Transolver" (arXiv:2402.02366); Luo et al. 2025, "Transolver++" (arXiv:2502.02414).
Parameter names are those of the authors' code (MIT, https://github.com/thuml/Transolver); the code is written anew.

All that happens per point is pointwise; points meet in one place, the sum over points of (slice weight x features).
The sum of the weights themselves rides along as one more feature, so that this is one contraction: with points cut
over ranks it costs one small all-reduce forward, (B, heads, slices, head_dim + 1) numbers, and one backward.

Shape suffixes: B batch, P all dims of points (N, or H W, or H W D), H heads, G slices, D features of a head.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-5  # keeps the mean of a slice that no point belongs to at zero
CLAMP = (0.1, 5.0)  # of the temperature on grids
PLUS_MIN_TEMPERATURE = 0.01
SLICE_NOISE = ("train", "always", "never")
_DIMS = "xyz"


class PhysicsAttention(nn.Module):
    """Slice, attend, deslice.

    Args:
        dim: Channels.
        num_heads: Heads; each has its own slices.
        num_slices: Slices of a head.
        head_dim: Channels of a head; ``dim // num_heads`` by default.
        dropout: Of the attention among slices and of the output.
        grid_ndim: 0 for points without order (projections are linear layers); 2 or 3 for points on a grid (projections
            are convolutions of kernel 3, the temperature is clamped).
        plus: The attention of Transolver++: a temperature for each point, Gumbel noise on the slice logits, and one
            projection for both assignment and features.
        slice_noise: When the noise is drawn: "train", "always" (also in evaluation, as the authors' code does) or
            "never".
        slice_eps: Added to the sum of a slice's weights before it divides (PhysicsNeMo adds 0.01).

    Shape: ``(B, N, dim)``, or ``(B, *grid, dim)`` with ``grid_ndim`` grid dims -> the same.

    Raises:
        ValueError: heads do not divide ``dim``; ``plus`` on a grid; a ``grid_ndim`` other than 0, 2 and 3; an
            unknown ``slice_noise``.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        num_slices: int = 64,
        *,
        head_dim: int | None = None,
        dropout: float = 0.0,
        grid_ndim: int = 0,
        plus: bool = False,
        slice_noise: str = "train",
        slice_eps: float = EPS,
    ) -> None:
        super().__init__()
        if head_dim is None and dim % num_heads:
            raise ValueError(f"{num_heads} heads do not divide {dim} channels; give head_dim, or other numbers")
        if grid_ndim not in (0, 2, 3):
            raise ValueError(f"grid_ndim is 0 (points without order), 2 or 3, got {grid_ndim}")
        if plus and grid_ndim:
            raise ValueError("the attention of Transolver++ is defined for points without order: grid_ndim must be 0")
        if slice_noise not in SLICE_NOISE:
            raise ValueError(f"slice_noise must be one of {SLICE_NOISE}, got {slice_noise!r}")
        self.num_heads, self.num_slices = num_heads, num_slices
        self.head_dim = dim // num_heads if head_dim is None else head_dim
        self.grid_ndim, self.plus, self.slice_noise, self.dropout = grid_ndim, plus, slice_noise, dropout
        self.slice_eps = slice_eps
        inner = num_heads * self.head_dim
        self.in_project_x = self._projection(dim, inner)
        self.in_project_slice = nn.Linear(self.head_dim, num_slices)
        if plus:
            self.proj_temperature = nn.Sequential(
                nn.Linear(self.head_dim, num_slices), nn.GELU(), nn.Linear(num_slices, 1), nn.GELU()
            )
            self.bias = nn.Parameter(torch.full((1, 1, num_heads, 1), 0.5))
        else:
            self.in_project_fx = self._projection(dim, inner)
            self.temperature = nn.Parameter(torch.full((1, 1, num_heads, 1), 0.5))
        self.to_q = nn.Linear(self.head_dim, self.head_dim, bias=False)
        self.to_k = nn.Linear(self.head_dim, self.head_dim, bias=False)
        self.to_v = nn.Linear(self.head_dim, self.head_dim, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner, dim), nn.Dropout(dropout))
        self.register_load_state_dict_pre_hook(_accept_head_dim_elsewhere)

    @property
    def is_noisy(self) -> bool:
        """Is noise drawn now?"""
        return self.plus and (self.slice_noise == "always" or (self.slice_noise == "train" and self.training))

    def _projection(self, dim: int, inner: int) -> nn.Module:
        if self.grid_ndim:
            return (nn.Conv2d, nn.Conv3d)[self.grid_ndim - 2](dim, inner, 3, padding=1)
        return nn.Linear(dim, inner)

    def _project(self, projection: nn.Module, x: Tensor) -> Tensor:
        """(B, P, C) -> (B, P, H, D)."""
        out = projection(x.movedim(-1, 1)).movedim(1, -1) if self.grid_ndim else projection(x)
        return out.unflatten(-1, (self.num_heads, self.head_dim))

    # ------------------------------------------------------------------ (1) slice
    def assign(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Points (B, P, C) -> their weights for the slices (B, P, H, G), which sum to 1, and features (B, P, H, D)."""
        x_BPHD = self._project(self.in_project_x, x)
        logits_BPHG = self.in_project_slice(x_BPHD)
        weights = torch.softmax(self._scaled(logits_BPHG, x_BPHD), dim=-1)
        return weights, x_BPHD if self.plus else self._project(self.in_project_fx, x)

    def _scaled(self, logits: Tensor, x: Tensor) -> Tensor:
        if self.plus:
            temperature = (self.proj_temperature(x) + self.bias).clamp(min=PLUS_MIN_TEMPERATURE)
            return (logits + _gumbel_like(logits) if self.is_noisy else logits) / temperature
        if self.grid_ndim:
            # Spread over the points before it is clamped: the gradient of a weight that meets the points directly
            # joins those of the other weights, while that of a function of weights would be reduced by itself.
            return logits / (torch.zeros_like(logits[..., :1]) + self.temperature).clamp(*CLAMP)
        return logits / self.temperature

    def gather_slices(self, weights: Tensor, features: Tensor) -> Tensor:
        """Sums over all points, (B, H, G, D + 1): of weight x features and, last, of the weights. In float32 or wider.

        Sums of parts of the points add up to the sums of all of them.
        """
        dims = _DIMS[: max(1, self.grid_ndim)]
        with _without_autocast(weights.device.type):
            wide = F.pad(_at_least_float32(features), (0, 1), value=1.0)
            return torch.einsum(f"b{dims}hg,b{dims}hd->bhgd", _at_least_float32(weights), wide)

    # ------------------------------------------------------------------ (2) attention among slices
    def attend(self, sums: Tensor) -> Tensor:
        """Sums of :meth:`gather_slices` -> the slices' new tokens (B, H, G, D)."""
        weight = self.to_q.weight
        tokens = (sums[..., :-1] / (sums[..., -1:] + self.slice_eps)).to(weight.dtype)
        q, k, v = self.to_q(tokens), self.to_k(tokens), self.to_v(tokens)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)

    # ------------------------------------------------------------------ (3) deslice
    def spread(self, weights: Tensor, tokens: Tensor) -> Tensor:
        """Every point gets the tokens of its slices, by its weights: (B, P, H, G), (B, H, G, D) -> (B, P, C)."""
        dims = _DIMS[: max(1, self.grid_ndim)]
        out = torch.einsum(f"b{dims}hg,bhgd->b{dims}hd", weights.to(tokens.dtype), tokens)
        return self.to_out(out.flatten(-2))

    def forward(self, x: Tensor) -> Tensor:
        """Mix the points; shapes as in the class."""
        weights, features = self.assign(x)
        return self.spread(weights, self.attend(self.gather_slices(weights, features)))


def _at_least_float32(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    if not torch.amp.is_autocast_available(device_type):  # a tensor without data
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def _gumbel_like(t: Tensor) -> Tensor:
    """Standard Gumbel noise; both logarithms are kept from infinity."""
    eps = 1e-8
    return -torch.log(-torch.log(torch.rand_like(t) + eps) + eps)


def _accept_head_dim_elsewhere(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """The authors' code works on (B, H, N, D) and keeps its temperature as (1, H, 1, 1): the same numbers."""
    for name in ("temperature", "bias"):
        present, own = state.get(prefix + name), getattr(module, name, None)
        if present is not None and own is not None and present.numel() == own.numel():
            state[prefix + name] = present.reshape(own.shape)
