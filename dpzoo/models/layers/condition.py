"""What a sample is conditioned on, as one vector: a time, other numbers, a class, a vector."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def sinusoids(t: Tensor, dim: int, max_period: float = 10000.0, endpoint: bool = False) -> Tensor:
    """Cosines, then sines, of geometrically spaced frequencies from 1 down to ``1 / max_period``.

    Without ``endpoint`` the last one is a step above that.

    As in Vaswani et al. 2017 (arXiv:1706.03762), in the order of DiT. In float32, or t's own dtype if that is finer.

    Shape: ``(...)`` -> ``(..., dim)``.
    """
    t = t.to(torch.promote_types(t.dtype, torch.float32))
    steps = torch.arange(dim // 2, dtype=t.dtype, device=t.device)
    angles = t[..., None] * torch.exp(steps * (-math.log(max_period) / max(dim // 2 - endpoint, 1)))
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class NumberEmbedder(nn.Module):
    """Numbers as sines and cosines, then a two-layer perceptron: DiT's embedding of the diffusion time.

    Args:
        dim: Channels of the result.
        count: Numbers per sample.
        freq_dim: Sines and cosines per number, even.
        hidden_dim: Channels between the two layers; ``dim`` without it.
        endpoint: Let the lowest frequency be 1 / 10000 itself, as diffusers does, instead of a step above.

    Shape: ``(B,)`` (for one number) or ``(B, count)`` -> ``(B, dim)``. Keys: ``mlp.0.*``, ``mlp.2.*``.

    Raises:
        ValueError: an odd ``freq_dim``; in ``forward``, another count of numbers.
    """

    def __init__(
        self, dim: int, count: int = 1, *, freq_dim: int = 256, hidden_dim: int | None = None, endpoint: bool = False
    ) -> None:
        super().__init__()
        if freq_dim < 2 or freq_dim % 2:
            raise ValueError(f"sines and cosines come in pairs: freq_dim must be even, got {freq_dim}")
        self.count, self.freq_dim, self.endpoint = count, freq_dim, endpoint
        hidden = dim if hidden_dim is None else hidden_dim
        self.mlp = nn.Sequential(nn.Linear(count * freq_dim, hidden), nn.SiLU(), nn.Linear(hidden, dim))

    def forward(self, t: Tensor) -> Tensor:
        """Embed each sample's numbers."""
        if t.ndim == 1:
            t = t[:, None]
        if t.shape[1:] != (self.count,):
            raise ValueError(
                f"expected {self.count} number(s) per sample, shape (B, {self.count}), got {tuple(t.shape)}"
            )
        weight = next(self.parameters())
        return self.mlp(sinusoids(t, self.freq_dim, endpoint=self.endpoint).flatten(1).to(weight.dtype))


class ClassEmbedder(nn.Module):
    """A learned vector per class, and one for "no class" when samples are dropped or may come without a class.

    Dropping the class in training is what classifier-free guidance needs (Ho & Salimans 2022, arXiv:2207.12598).

    Args:
        num_classes: Number of classes.
        dim: Channels of the result.
        drop_prob: Probability of replacing a sample's class by "no class" in training. If it is positive, the table
            has a last row for that.

    Shape: ``(B,)`` of integers -> ``(B, dim)``. Keys: ``embedding_table.weight``.
    """

    def __init__(self, num_classes: int, dim: int, drop_prob: float = 0.0) -> None:
        super().__init__()
        if not 0.0 <= drop_prob < 1.0:
            raise ValueError(f"drop_prob must lie in [0, 1), got {drop_prob}")
        self.num_classes, self.drop_prob = num_classes, drop_prob
        self.embedding_table = nn.Embedding(num_classes + (drop_prob > 0), dim)

    def forward(self, y: Tensor, draw_like: Tensor) -> Tensor:
        """Embed each class.

        Args:
            draw_like: A tensor (the sample's field) on whose device and with whose kind the random draws are made: so
                that processes that share one sample drop the same classes.
        """
        if self.training and self.drop_prob > 0:
            dropped = draw_like.new_empty(y.shape).bernoulli_(self.drop_prob).bool()
            y = torch.where(dropped, self.num_classes, y)
        return self.embedding_table(y)

    def no_class(self, batch_size: int) -> Tensor:
        """The vector of "no class" for each sample, ``(B, dim)``.

        Raises:
            ValueError: the table has no row for it.
        """
        if self.embedding_table.num_embeddings == self.num_classes:
            raise ValueError(
                "this model was built without a vector for 'no class': pass a class for every sample, or build it "
                "with a positive condition_drop"
            )
        return self.embedding_table.weight[-1].expand(batch_size, -1)
