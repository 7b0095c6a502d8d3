"""Rotary embeddings on sharded tokens, in the spellings that people write: values, gradients, and no gather.

Tokens are cut; the tables of cosines and sines are plain and whole, and are sliced like the tokens they meet.
"""

from __future__ import annotations

import torch
from einops import rearrange
from timm.layers.pos_embed_sincos import apply_rot_embed, apply_rot_embed_cat, rot
from torch import Tensor

from dpzoo.testing import OpCase, op_test

N, D = 11, 8  # tokens, channels of a head
SHAPE = (2, 3, N, D)


def angles(positions: Tensor, channels: int = D) -> Tensor:
    """(n, channels / 2)"""
    return positions[:, None] * 0.7 ** torch.arange(channels // 2, dtype=torch.float64)


def tables(n: int = N, channels: int = D) -> tuple[Tensor, Tensor]:
    """Cosines and sines of n positions, (n, channels / 2) each."""
    a = angles(torch.arange(n, dtype=torch.float64), channels)
    return a.cos(), a.sin()


def rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def halves_by_chunk(x):
    cos, sin = (torch.cat([t, t], -1) for t in tables())
    return x * cos + rotate_half(x) * sin


def halves_by_slices(x):
    cos, sin = tables()
    a, b = x[..., : D // 2], x[..., D // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def halves_by_split(x):
    cos, sin = tables()
    a, b = torch.split(x, D // 2, dim=-1)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-2).flatten(-2)


def pairs_by_steps(x):
    cos, sin = tables()
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


def pairs_by_select(x):
    cos, sin = tables()
    pairs = x.unflatten(-1, (-1, 2))
    a, b = pairs[..., 0], pairs.select(-1, 1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)


def pairs_by_unbind(x):
    cos, sin = (t.repeat_interleave(2, -1) for t in tables())
    a, b = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return x * cos + torch.stack([-b, a], dim=-1).flatten(3) * sin


def pairs_by_einops(x):
    cos, sin = (t.repeat_interleave(2, -1) for t in tables())
    a, b = rearrange(x, "... (d r) -> ... d r", r=2).unbind(dim=-1)
    return x * cos + rearrange(torch.stack((-b, a), dim=-1), "... d r -> ... (d r)") * sin


def pairs_written_in_place(x):
    cos, sin = tables()
    out = torch.empty_like(x)
    out[..., ::2] = x[..., ::2] * cos - x[..., 1::2] * sin
    out[..., 1::2] = x[..., ::2] * sin + x[..., 1::2] * cos
    return out


def complex_numbers(x):
    turn = torch.polar(torch.ones(N, D // 2, dtype=torch.float64), angles(torch.arange(N, dtype=torch.float64)))
    z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(z * turn).flatten(3).type_as(x)


def complex_rebuilt(x):
    cos, sin = tables()
    z = torch.complex(x[..., ::2].contiguous(), x[..., 1::2].contiguous()) * torch.complex(cos, sin)
    return torch.stack((z.real, z.imag), -1).flatten(-2)


def by_timm(x):
    cos, sin = (t.repeat_interleave(2, -1) for t in tables())
    both = torch.cat((sin, cos), -1)
    return rot(x), apply_rot_embed(x, sin, cos), apply_rot_embed_cat(x, both), apply_rot_embed_cat(x, both, half=True)


def tokens_before_heads(x):
    """(B, N, heads, d)"""
    cos, sin = (torch.cat([t, t], -1)[None, :, None] for t in tables())
    return x * cos + rotate_half(x) * sin


def part_of_the_channels(x):
    """Only the first channels turn."""
    cos, sin = (torch.cat([t, t], -1) for t in tables(channels=4))
    turned, passed = x[..., :4], x[..., 4:]
    return torch.cat((turned * cos + rotate_half(turned) * sin, passed), -1)


def after_prefix_tokens(x):
    """Class and register tokens have no place."""
    cos, sin = (torch.cat([t, t], -1) for t in tables(N - 2))
    prefix, patches = x[:, :, :2], x[:, :, 2:]
    return torch.cat([prefix, patches * cos + rotate_half(patches) * sin], dim=2)


def positions_from_the_tensor(x):
    """Angles made from the shape of the sharded tensor, on the fly."""
    a = torch.outer(torch.arange(x.shape[-2], device=x.device, dtype=x.dtype), x.new_ones(D // 2).cumsum(0))
    a = torch.cat((a, a), -1)
    return x * a.cos() + rotate_half(x) * a.sin()


def given_positions(x, positions):
    """Positions that are data, cut like the tokens: (B, N)."""
    a = positions[:, None, :, None] * 0.7 ** torch.arange(D // 2, dtype=torch.float64)
    return torch.cat([x[..., :4] * a.cos() - x[..., 4:] * a.sin(), x[..., 4:] * a.cos() + x[..., :4] * a.sin()], -1)


def learned_frequencies(x, frequencies):
    a = torch.arange(N, dtype=torch.float64)[:, None] * frequencies
    a = torch.cat((a, a), -1)
    return x * a.cos() + rotate_half(x) * a.sin()


def axial_on_a_grid(x):
    """(B, H, W, heads, d): half the channels turn with the row, half with the column."""
    (rc, rs), (cc, cs) = tables(x.shape[1], 4), tables(x.shape[2], 4)
    rc, rs, cc, cs = (torch.cat([t, t], -1) for t in (rc, rs, cc, cs))
    of_row, of_column = x.chunk(2, -1)
    of_row = of_row * rc[:, None, None] + rotate_half(of_row) * rs[:, None, None]
    of_column = of_column * cc[:, None] + rotate_half(of_column) * cs[:, None]
    return torch.cat([of_row, of_column], -1)


def axial_flattened(x):
    """(B, H, W, heads, d) with one table of the whole grid, over tokens in a row."""
    rows, columns = x.shape[1:3]
    grid = torch.cat([
        angles(torch.arange(rows, dtype=torch.float64), 4)[:, None].expand(-1, columns, -1),
        angles(torch.arange(columns, dtype=torch.float64), 4).expand(rows, -1, -1),
    ], -1).flatten(0, 1).repeat_interleave(2, -1)  # fmt: skip
    tokens = x.flatten(1, 2).transpose(1, 2)
    turned = torch.stack((-tokens[..., 1::2], tokens[..., ::2]), -1).flatten(-2)
    return (tokens * grid.cos() + turned * grid.sin()).transpose(1, 2).unflatten(1, (rows, columns))


def second_order(x):
    y = pairs_by_steps(x) + halves_by_chunk(x)
    (g,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    return g


def case(name, fn, shape=SHAPE, shard=2, **options):
    options = {"ranks": (2, 3), "subgroups": False} | options
    return OpCase(name, fn=fn, shape=shape, shard=shard, **options)


SPELLINGS = [
    halves_by_chunk, halves_by_slices, halves_by_split, pairs_by_steps, pairs_by_select, pairs_by_unbind,
    pairs_by_einops, pairs_written_in_place, complex_numbers, complex_rebuilt, by_timm, part_of_the_channels,
    after_prefix_tokens, positions_from_the_tensor,
]  # fmt: skip
GRID = (2, 5, 6, 3, 8)

CASES = [
    *[case(f.__name__.replace("_", " "), f) for f in SPELLINGS],
    *[case(f"{f.__name__.replace('_', ' ')}, heads cut", f, shard=1, ranks=(2,)) for f in SPELLINGS[:8]],
    case("heads and tokens cut", lambda x: [f(x) for f in SPELLINGS], ranks=(), mesh2d=(1, 2)),
    case("halves, channels cut", halves_by_chunk, shard=3, ranks=(2,)),
    case("pairs, channels cut", pairs_by_steps, shard=3, ranks=(2,)),
    case("tokens before heads", tokens_before_heads, (2, N, 3, D), 1, ranks=(1, 2, 3, 4), subgroups=True),
    case("given positions", given_positions, [SHAPE, (2, N)], [2, 1], layouts=("uneven", "misaligned")),
    case("learned frequencies", learned_frequencies, plain=[(D // 2,)], ranks=(2, 3)),
    case("axial on a grid", axial_on_a_grid, GRID, 1, mesh2d=(1, 2)),
    case("axial on a grid, columns cut", axial_on_a_grid, GRID, 2),
    case("axial flattened", axial_flattened, GRID, 1),
    case("second order", second_order, ranks=(2,)),
]

test_rotary = op_test(CASES)
