"""Calls that torch refuses, over all window ops: torch's error, on every rank, and nothing was sent before it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.shard import ShardTensor
from dpzoo.shard.traffic import count_traffic
from dpzoo.testing import distributed, domain_mesh, expect_same_error
from dpzoo.testing.cutting import cut_tensor, plan_cut

HUGE = 2**62
LINE, IMAGE, VOLUME = (1, 3, 9), (1, 3, 9, 6), (1, 3, 9, 6, 4)


def _w(*shape: int) -> Tensor:
    return torch.ones(shape)


# name -> (shape of the input, call)
BAD: dict[str, tuple[tuple[int, ...], Callable[[Any], Any]]] = {
    # ------------------------------------------------------------------ the kernel is wider than the domain
    "conv1d, wide kernel": (LINE, lambda x: F.conv1d(x, _w(4, 3, 10))),
    "conv2d, wide kernel with padding": (IMAGE, lambda x: F.conv2d(x, _w(4, 3, 14, 1), padding=(2, 0))),
    "conv3d, wide kernel": (VOLUME, lambda x: F.conv3d(x, _w(4, 3, 10, 1, 1))),
    "conv3d, wide dilated kernel": (VOLUME, lambda x: F.conv3d(x, _w(4, 3, 3, 1, 1), dilation=(5, 1, 1))),
    "conv2d, wide along the uncut dim": (IMAGE, lambda x: F.conv2d(x, _w(4, 3, 1, 7))),
    "max_pool1d, wide kernel": (LINE, lambda x: F.max_pool1d(x, 10)),
    "max_pool3d, wide dilated kernel": (VOLUME, lambda x: F.max_pool3d(x, (5, 1, 1), 1, 0, (3, 1, 1))),
    "avg_pool3d, wide kernel": (VOLUME, lambda x: F.avg_pool3d(x, (10, 1, 1))),
    "lp_pool1d, wide kernel": (LINE, lambda x: F.lp_pool1d(x, 2.0, 10)),
    "Tensor.unfold, wide window": (LINE, lambda x: x.unfold(2, 10, 1)),
    "unfold, wide blocks": (IMAGE, lambda x: F.unfold(x, (10, 1))),
    # ------------------------------------------------------------------ nothing would be left
    "conv_transpose1d, nothing left": (LINE, lambda x: F.conv_transpose1d(x, _w(3, 4, 1), padding=5)),
    "conv_transpose3d, nothing left": (VOLUME, lambda x: F.conv_transpose3d(x, _w(3, 4, 1, 1, 1), padding=(5, 0, 0))),
    "interpolate, to nothing": (IMAGE, lambda x: F.interpolate(x, scale_factor=(0.01, 1.0))),
    "interpolate, to size 0": (LINE, lambda x: F.interpolate(x, size=0)),
    "pad, crops more than there is": (IMAGE, lambda x: F.pad(x, (0, 0, -5, -5))),
    "adaptive_avg_pool3d, negative": (VOLUME, lambda x: F.adaptive_avg_pool3d(x, (-2, 1, 1))),
    # ------------------------------------------------------------------ padding too large for its mode
    "pad, reflect the whole dim": (IMAGE, lambda x: F.pad(x, (0, 0, 9, 0), "reflect")),
    "pad, reflect at the end": (IMAGE, lambda x: F.pad(x, (0, 0, 0, 9), "reflect")),
    "pad, reflect the uncut dim": (IMAGE, lambda x: F.pad(x, (6, 0, 1, 0), "reflect")),
    "pad, reflect a volume": (VOLUME, lambda x: F.pad(x, (0, 0, 0, 0, 9, 9), "reflect")),
    "pad, circle longer than the dim": (IMAGE, lambda x: F.pad(x, (0, 0, 10, 0), "circular")),
    "pad, reflect the batch": (IMAGE, lambda x: F.pad(x, (0,) * 8, "reflect")),
    "pad, odd number": (IMAGE, lambda x: F.pad(x, (1, 2, 3))),
    "pad, more dims than there are": (IMAGE, lambda x: F.pad(x, (1,) * 10)),
    "pad, unknown mode": (IMAGE, lambda x: F.pad(x, (1, 1), "mirror")),
    "max_pool2d, padding over half the kernel": (IMAGE, lambda x: F.max_pool2d(x, 3, 1, 2)),
    "avg_pool1d, padding over half the kernel": (LINE, lambda x: F.avg_pool1d(x, 3, 1, 2)),
    # ------------------------------------------------------------------ sizes that no integer holds
    "conv2d, padding overflows": (IMAGE, lambda x: F.conv2d(x, _w(4, 3, 3, 3), padding=(HUGE * 2 - 1, 0))),
    "conv2d, dilation beyond an int": (IMAGE, lambda x: F.conv2d(x, _w(4, 3, 3, 3), dilation=(2**40, 1))),
    "conv_transpose2d, stride overflows": (IMAGE, lambda x: F.conv_transpose2d(x, _w(3, 4, 3, 3), stride=(HUGE, 1))),
    "interpolate, too large": (IMAGE, lambda x: F.interpolate(x, size=(HUGE, HUGE))),
    "interpolate, infinite": (IMAGE, lambda x: F.interpolate(x, scale_factor=float("inf"))),
    "adaptive_max_pool2d, too large": (IMAGE, lambda x: F.adaptive_max_pool2d(x, (HUGE, HUGE))),
    "pad, too large": (IMAGE, lambda x: F.pad(x, (0, 0, HUGE, HUGE))),
    "pixel_shuffle, factor overflows": (IMAGE, lambda x: F.pixel_shuffle(x, 2**33)),
    "max_pool2d, kernel beyond an int": (IMAGE, lambda x: F.max_pool2d(x, (2**40, 1))),
    # ------------------------------------------------------------------ arguments that mean nothing
    "conv1d, stride 0": (LINE, lambda x: F.conv1d(x, _w(4, 3, 3), stride=0)),
    "conv3d, groups 0": (VOLUME, lambda x: F.conv3d(x, _w(4, 3, 3, 3, 3), groups=0)),
    "conv3d, negative dilation": (VOLUME, lambda x: F.conv3d(x, _w(4, 3, 3, 3, 3), dilation=-1)),
    "conv_transpose1d, output padding too large": (
        LINE,
        lambda x: F.conv_transpose1d(x, _w(3, 4, 3), output_padding=1),
    ),
    "max_pool3d, stride 0": (VOLUME, lambda x: F.max_pool3d(x, 2, 0)),
    "avg_pool3d, divisor 0": (VOLUME, lambda x: F.avg_pool3d(x, 2, divisor_override=0)),
    "max_unpool2d, sizes of another length": (
        IMAGE,
        lambda x: F.max_unpool2d(x, torch.zeros(IMAGE, dtype=torch.int64), 2, output_size=(3,)),
    ),
    "fold, blocks that do not fit": (LINE, lambda x: F.fold(x, (9, 6), 2)),
    "group_norm, one value a group": ((1, 3, 1, 1), lambda x: F.group_norm(x, 3)),
    "instance_norm, one value": ((1, 3, 1), lambda x: F.instance_norm(x)),
}


@distributed(ranks=2)
@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str):
    shape, call = BAD[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expect_same_error(call, torch.randn(shape), 2)
        cut = plan_cut(torch.Size(shape), (2,), 2, "uneven")
        assert cut is not None
        x = cut_tensor(torch.randn(shape), domain_mesh(), cut)
        assert isinstance(x, ShardTensor)
        with count_traffic() as traffic, pytest.raises(Exception):  # noqa: B017  (which one: see above)
            call(x)
    assert traffic.calls == 0
