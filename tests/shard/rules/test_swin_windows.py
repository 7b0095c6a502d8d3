"""Window attention as Swin writes it, on cut rows: roll, partition by view and permute, bias, mask, and back.

Borders of shards move to multiples of the window, which costs a few rows between neighbours, and nothing is gathered.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpzoo
from dpzoo.shard import strict
from dpzoo.shard.traffic import count_traffic
from dpzoo.testing import OpCase, distributed, domain_mesh, op_test

ROWS, COLUMNS, CHANNELS, WINDOW, SHIFT, HEADS = 16, 8, 6, 4, 2, 2
SHAPE = (1, ROWS, COLUMNS, CHANNELS)


def partition(x: Tensor, w: int = WINDOW) -> Tensor:
    """(B, H, W, C) -> (B * windows, w, w, C)"""
    b, h, width, c = x.shape
    x = x.view(b, h // w, w, width // w, w, c)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, w, w, c)


def reverse(windows: Tensor, h: int, width: int, w: int = WINDOW) -> Tensor:
    """(B * windows, w, w, C) -> (B, H, W, C)"""
    b = int(windows.shape[0] / (h * width / w / w))
    x = windows.view(b, h // w, width // w, w, w, -1)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(b, h, width, -1)


def shift_mask(h: int, width: int) -> Tensor:
    """(windows, w * w, w * w): minus infinity between places that were not neighbours before the shift."""
    regions = torch.zeros(1, h, width, 1, dtype=torch.float64)
    for i, rows in enumerate((slice(0, -WINDOW), slice(-WINDOW, -SHIFT), slice(-SHIFT, None))):
        for j, columns in enumerate((slice(0, -WINDOW), slice(-WINDOW, -SHIFT), slice(-SHIFT, None))):
            regions[:, rows, columns] = 3 * i + j
    of_window = partition(regions).view(-1, WINDOW * WINDOW)
    return (of_window[:, None] != of_window[:, :, None]).double() * -100.0


class WindowAttention(nn.Module):
    """With the relative position bias, by explicit softmax or by torch's fused function."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.table = nn.Parameter(torch.randn((2 * WINDOW - 1) ** 2, HEADS))
        self.qkv, self.proj = nn.Linear(CHANNELS, 3 * CHANNELS), nn.Linear(CHANNELS, CHANNELS)
        at = torch.stack(torch.meshgrid(torch.arange(WINDOW), torch.arange(WINDOW), indexing="ij")).flatten(1)
        apart = at[:, :, None] - at[:, None] + WINDOW - 1
        self.register_buffer("index", apart[0] * (2 * WINDOW - 1) + apart[1])

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        bias = self.table[self.index.view(-1)].view(n, n, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
        if self.fused:
            if mask is not None:
                bias = bias + mask.unsqueeze(1).repeat(b // mask.shape[0], 1, 1, 1)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            attn = (q * (c // HEADS) ** -0.5) @ k.transpose(-2, -1) + bias
            if mask is not None:
                windows = mask.shape[0]
                attn = attn.view(b // windows, windows, HEADS, n, n) + mask.unsqueeze(1).unsqueeze(0)
                attn = attn.view(-1, HEADS, n, n)
            y = attn.softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(b, n, c))


class SwinBlock(nn.Module):
    """(B, H, W, C) -> the same; a grid that is no multiple of the window is padded."""

    def __init__(self, shift: int, fused: bool = True) -> None:
        super().__init__()
        self.shift, self.norm, self.attn = shift, nn.LayerNorm(CHANNELS), WindowAttention(fused)

    def forward(self, x: Tensor) -> Tensor:
        _, h, width, c = x.shape
        shortcut = x
        x = F.pad(self.norm(x), (0, 0, 0, -width % WINDOW, 0, -h % WINDOW))
        padded = x.shape[1:3]
        mask = None
        if self.shift:
            x = torch.roll(x, shifts=(-self.shift, -self.shift), dims=(1, 2))
            mask = shift_mask(*padded)
        windows = partition(x).view(-1, WINDOW * WINDOW, c)
        windows = self.attn(windows, mask).view(-1, WINDOW, WINDOW, c)
        x = reverse(windows, *padded)
        if self.shift:
            x = torch.roll(x, shifts=(self.shift, self.shift), dims=(1, 2))
        return shortcut + x[:, :h, :width, :].contiguous()


class Merging(nn.Module):
    """2 x 2 patches into one, as Swin's down-sampling does it by steps."""

    def __init__(self) -> None:
        super().__init__()
        self.reduction = nn.Linear(4 * CHANNELS, 2 * CHANNELS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.reduction(torch.cat([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1))


def stage() -> nn.Module:
    return nn.Sequential(SwinBlock(0), SwinBlock(SHIFT), Merging())


def case(name, build=None, shape=SHAPE, shard=1, **options):
    sizes = ((9, 7), (1, 15), (3, 6, 7), (16, 0), (0, 11, 5), (2, 3, 10, 1))
    options = {"layouts": ("even", "uneven", *sizes), "ranks": (2, 3), "subgroups": False} | options
    return OpCase(name, build=build, shape=shape, shard=shard, **options)


CASES = [
    case("partition and reverse", fn=lambda x: reverse(partition(x) * 2, ROWS, COLUMNS), ranks=(1, 2, 3, 4)),
    case("windows themselves", fn=partition),
    case("windows", lambda: SwinBlock(0)),
    case("shifted windows", lambda: SwinBlock(SHIFT), ranks=(1, 2, 3, 4), subgroups=True),
    case("shifted windows, softmax written out", lambda: SwinBlock(SHIFT, fused=False)),
    case("stage", stage),
    case("padded to windows", lambda: SwinBlock(SHIFT), (1, 14, 7, CHANNELS), layouts=("even", "uneven", "empty")),
    case("columns cut", lambda: SwinBlock(SHIFT), (1, 8, 16, CHANNELS), 2),
    case("two samples", lambda: SwinBlock(SHIFT), (2, *SHAPE[1:]), ranks=(2, 3, 4)),
    case("two samples, softmax written out", lambda: SwinBlock(SHIFT, fused=False), (2, *SHAPE[1:])),
    case("samples cut", lambda: SwinBlock(SHIFT), (5, 8, 8, CHANNELS), 0, layouts=("uneven", "empty")),
    case(  # of heads that a rank has no channels of, torch forgets that the bias took part
        "values without channels on a rank",
        fn=lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, attn_mask=bias),
        shape=[(6, 1, 4, 8)] * 3,
        shard=[None, None, 3],
        plain=[(1, 1, 4, 4)],
        layouts=((0, 8), (8, 0), (3, 0, 5)),
    ),
    case(  # as a field (B, C, H * W) gives them: the fused kernels do not look at the stride of the last dim
        "heads whose channels lie apart",
        fn=lambda q, k, v: F.scaled_dot_product_attention(q.mT, k.mT, v.mT),
        shape=[(2, 2, 4, 9), (2, 2, 4, 9), (2, 2, 3, 9)],
        shard=3,
        layouts=("uneven", "empty"),
    ),
    case("rows and columns cut", lambda: SwinBlock(SHIFT), ranks=(), mesh2d=(1, 2), layouts=("uneven",)),
]

test_swin = op_test(CASES)


@distributed(ranks=2)
@pytest.mark.parametrize(
    ("sizes", "rows_sent"),
    [
        ((8, 8), (2, 2)),  # the shift, there and back
        ((9, 7), (2 + 1, 2)),  # and one row over the border to the window's edge
        ((6, 10), (2, 2 + 2)),
    ],
)
def test_only_border_rows_travel(sizes, rows_sent):
    x = dpzoo.scatter(torch.randn(SHAPE), domain_mesh(), dim=1, sizes=sizes)
    row = COLUMNS * CHANNELS * x.dtype.itemsize
    me = domain_mesh().get_local_rank()
    with strict(), torch.no_grad():
        with count_traffic() as traffic:
            windows = partition(torch.roll(x, (-SHIFT, -SHIFT), (1, 2)))
        assert traffic.nbytes == rows_sent[me] * row
        with count_traffic() as traffic:
            back = torch.roll(reverse(windows, ROWS, COLUMNS), (SHIFT, SHIFT), (1, 2))
        assert traffic.nbytes == SHIFT * row
    assert back._spec.sizes == ((8, 8),)


@distributed(ranks=2)
def test_aligned_windows_do_not_communicate():
    x = dpzoo.scatter(torch.randn(SHAPE), domain_mesh(), dim=1, sizes=(4, 12)).requires_grad_()
    with strict(), count_traffic() as traffic:
        reverse(partition(x), ROWS, COLUMNS).sum(-1).backward(torch.ones(1, ROWS, COLUMNS))
    assert traffic.nbytes == 0
