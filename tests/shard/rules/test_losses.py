"""Losses: every reduction, weights, and a gradient that does not grow with the number of ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.testing import OpCase, distributed, domain_mesh, expect_error, op_test
from dpzoo.testing.cutting import cut_tensor, plan_cut
from tests.shard.rules.inputs import FEW

SHAPES = [(3, 9, 2), (3, 9, 2)]


def _unit(shape: tuple[int, ...]) -> Tensor:
    return torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1


def _signs(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(0, 2, shape).double() * 2 - 1


def _classes(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(0, 4, shape)


def _some_ignored(shape: tuple[int, ...]) -> Tensor:
    return torch.where(torch.rand(shape) < 0.3, -100, torch.randint(0, 4, shape))


def _some_ended(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(-1, 4, shape)


def _all(loss, **options):
    """The three reductions together."""

    def call(*tensors):
        return tuple(loss(*tensors, reduction=r, **options) for r in ("mean", "sum", "none"))

    return call


def _elementwise(loss, *, fill=None, **options) -> OpCase:
    return OpCase(
        loss.__name__,
        fn=_all(loss, **options),
        shape=SHAPES,
        shard=1,
        fill=fill,
        mesh2d=(0, 1),
        layouts=("even", "misaligned", "empty"),
        ranks=(1, 2, 3),
        subgroups=loss is F.mse_loss,
        covers=(loss.__name__, f"{loss.__name__} per element"),
    )


CASES = [
    _elementwise(F.mse_loss),
    _elementwise(F.l1_loss),
    _elementwise(F.smooth_l1_loss, beta=0.5),
    _elementwise(F.huber_loss, delta=0.5),
    _elementwise(F.binary_cross_entropy, fill=_unit),
    _elementwise(F.binary_cross_entropy_with_logits, fill=_unit),
    _elementwise(F.poisson_nll_loss, fill=_unit, full=True),
    OpCase(
        "soft_margin_loss",
        fn=lambda x, y: _all(F.soft_margin_loss)(x, y.detach()),
        shape=SHAPES,
        shard=1,
        fill=[torch.randn, _signs],
        covers=("soft_margin_loss", "soft_margin_loss per element"),
        **FEW,
    ),
    _elementwise(F.hinge_embedding_loss, fill=[torch.randn, _signs], margin=0.5),
    OpCase("smooth_l1 beta 0", fn=_all(F.smooth_l1_loss, beta=0.0), shape=SHAPES, shard=1, **FEW),
    OpCase("mse plain target", fn=_all(F.mse_loss), shape=(3, 9), shard=1, plain=[(3, 9)], **FEW),
    OpCase("mse target on another dim", fn=_all(F.mse_loss), shape=SHAPES, shard=[1, 0], **FEW),
    OpCase(
        "mse weighted",
        fn=lambda x, y, w: _all(F.mse_loss, weight=w)(x, y),
        shape=[*SHAPES, (3, 9, 2)],
        shard=[1, 1, 1],
        fill=_unit,
        **FEW,
    ),
    OpCase(
        "l1 weighted",
        fn=lambda x, y, w: _all(F.l1_loss, weight=w)(x, y),
        shape=SHAPES,
        shard=1,
        plain=[(3, 9, 2)],
        fill=_unit,
        **FEW,
    ),
    OpCase(
        "huber weighted",
        fn=lambda x, y, w: _all(F.huber_loss, weight=w)(x, y),
        shape=SHAPES,
        shard=1,
        plain=[(3, 9, 2)],
        fill=_unit,
        **FEW,
    ),
    OpCase(
        "bce weighted",
        fn=lambda x, y, w: _all(F.binary_cross_entropy, weight=w.detach())(x, y),
        shape=[*SHAPES, (3, 9, 2)],
        shard=[1, 1, 1],
        fill=_unit,
        **FEW,
    ),
    OpCase(
        "bce_with_logits weights",
        fn=lambda x, y, w, p: _all(F.binary_cross_entropy_with_logits, weight=w.detach(), pos_weight=p.detach())(x, y),
        shape=SHAPES,
        shard=1,
        plain=[(9, 1), (2,)],
        fill=_unit,
        **FEW,
    ),
    OpCase(
        "kl_div",
        fn=lambda x, y: (
            *(F.kl_div(x, y, reduction=r) for r in ("batchmean", "sum", "none")),
            F.kl_div(x, y.log(), reduction="batchmean", log_target=True),
        ),
        shape=SHAPES,
        shard=1,
        fill=_unit,
        covers=("kl_div", "kl_div per element"),
    ),
    OpCase(
        "kl_div batch cut",
        fn=lambda x, y: F.kl_div(x, y, reduction="batchmean"),
        shape=[(9, 4), (9, 4)],
        shard=0,
        fill=_unit,
    ),
    OpCase(
        "poisson_nll of rates", fn=_all(F.poisson_nll_loss, log_input=False), shape=SHAPES, shard=1, fill=_unit, **FEW
    ),
    OpCase(
        "margin_ranking",
        fn=_all(F.margin_ranking_loss, margin=0.1),
        shape=[(9,), (9,), (9,)],
        shard=0,
        fill=[torch.randn, torch.randn, _signs],
        covers=("margin_ranking_loss", "margin_ranking_loss per element"),
    ),
    OpCase(
        "gaussian_nll",
        fn=_all(F.gaussian_nll_loss, full=True),
        shape=[*SHAPES, (3, 9, 2)],
        shard=1,
        fill=_unit,
        covers=("gaussian_nll_loss",),
    ),
    OpCase(
        "gaussian_nll one variance", fn=_all(F.gaussian_nll_loss), shape=[*SHAPES, (3, 9)], shard=1, fill=_unit, **FEW
    ),
    OpCase(
        "pairwise_distance",
        fn=lambda x, y: (F.pairwise_distance(x, y), F.pairwise_distance(x, y, p=1, keepdim=True)),
        shape=[(4, 9), (4, 9)],
        shard=1,
        covers=("pairwise_distance",),
        **FEW,
    ),
    OpCase(
        "triplet",
        fn=_all(F.triplet_margin_loss, swap=True),
        shape=[(9, 4), (9, 4), (9, 4)],
        shard=0,
        covers=("triplet_margin_loss",),
    ),
    OpCase(
        "triplet features cut", fn=_all(F.triplet_margin_loss, p=1.0), shape=[(3, 9), (3, 9), (3, 9)], shard=1, **FEW
    ),
    OpCase(
        "triplet with distance",
        fn=lambda x, y, z: F.triplet_margin_with_distance_loss(x, y, z, swap=True),
        shape=[(9, 4), (9, 4), (9, 4)],
        shard=0,
        covers=("triplet_margin_with_distance_loss",),
        **FEW,
    ),
    OpCase(
        "cosine_embedding",
        fn=_all(F.cosine_embedding_loss, margin=0.1),
        shape=[(9, 4), (9, 4), (9,)],
        shard=0,
        fill=[torch.randn, torch.randn, _signs],
        covers=("cosine_embedding_loss",),
    ),
    OpCase(
        "cosine_embedding features cut",
        fn=_all(F.cosine_embedding_loss),
        shape=[(3, 9), (3, 9), (3,)],
        shard=[1, 1, None],
        fill=[torch.randn, torch.randn, _signs],
        **FEW,
    ),
    OpCase(
        "multilabel_soft_margin",
        fn=lambda x, y, w: _all(F.multilabel_soft_margin_loss, weight=w)(x, y),
        shape=[(9, 4), (9, 4)],
        shard=0,
        plain=[(4,)],
        fill=_unit,
        covers=("multilabel_soft_margin_loss",),
        **FEW,
    ),
    OpCase(
        "multi_margin",
        fn=_all(F.multi_margin_loss),
        shape=[(9, 4), (9,)],
        shard=0,
        fill=[torch.randn, _classes],
        covers=("multi_margin_loss", "multi_margin_loss per sample"),
        **FEW,
    ),
    OpCase(
        "multi_margin weighted",
        fn=_all(F.multi_margin_loss, weight=torch.arange(1.0, 5.0).double(), p=2),
        shape=[(9, 4), (9,)],
        shard=0,
        fill=[torch.randn, _classes],
        **FEW,
    ),
    OpCase(
        "multilabel_margin",
        fn=_all(F.multilabel_margin_loss),
        shape=[(9, 4), (9, 4)],
        shard=[1, 0],
        fill=[torch.randn, _some_ended],
        covers=("multilabel_margin_loss", "multilabel_margin_loss per sample"),
        **FEW,
    ),
    # ------------------------------------------------------------------ classes
    OpCase(
        "cross_entropy samples cut",
        fn=_all(F.cross_entropy),
        shape=[(9, 4), (9,)],
        shard=0,
        fill=[torch.randn, _some_ignored],
        layouts=("even", "misaligned", "empty"),
        covers=("cross_entropy", "cross_entropy per sample"),
    ),
    OpCase(
        "cross_entropy images",
        fn=_all(F.cross_entropy, label_smoothing=0.1),
        shape=[(2, 4, 9, 3), (2, 9, 3)],
        shard=[2, 1],
        fill=[torch.randn, _some_ignored],
        mesh2d=[(2, 3), (1, 2)],
    ),
    OpCase(
        "cross_entropy classes cut",
        fn=_all(F.cross_entropy),
        shape=[(6, 4), (6,)],
        shard=[1, 0],
        fill=[torch.randn, _classes],
        **FEW,
    ),
    OpCase(
        "cross_entropy weighted",
        fn=lambda x, t: _all(F.cross_entropy, weight=torch.arange(1.0, 5.0).double(), label_smoothing=0.2)(x, t),
        shape=[(9, 4), (9,)],
        shard=0,
        fill=[torch.randn, _some_ignored],
        **FEW,
    ),
    OpCase(
        "cross_entropy ignored",
        fn=_all(F.cross_entropy, ignore_index=2),
        shape=[(9, 4), (9,)],
        shard=0,
        fill=[torch.randn, _classes],
        **FEW,
    ),
    OpCase(
        "cross_entropy probabilities",
        fn=_all(F.cross_entropy, label_smoothing=0.1),
        shape=[(2, 4, 9), (2, 4, 9)],
        shard=2,
        fill=_unit,
        **FEW,
    ),
    OpCase(
        "cross_entropy one sample",
        fn=lambda x: F.cross_entropy(x, torch.tensor(2)),
        shape=(9,),
        shard=0,
        gathers=True,
        **FEW,
    ),
    OpCase(
        "cross_entropy plain target", fn=lambda x: F.cross_entropy(x, torch.arange(9) % 4), shape=(9, 4), shard=0, **FEW
    ),
    OpCase(
        "nll_loss",
        fn=_all(F.nll_loss),
        shape=[(2, 4, 9), (2, 9)],
        shard=[2, 1],
        fill=[torch.randn, _some_ignored],
        covers=("nll_loss", "nll_loss per sample"),
    ),
    OpCase(
        "nll_loss weighted",
        fn=lambda x, t: _all(F.nll_loss, weight=torch.arange(1.0, 5.0).double())(x, t),
        shape=[(9, 4), (9,)],
        shard=0,
        fill=[torch.randn, _some_ignored],
        **FEW,
    ),
    OpCase(
        "linear_cross_entropy",
        fn=lambda x, t, w: F.linear_cross_entropy(x, w, t),
        shape=[(9, 5), (9,)],
        shard=0,
        plain=[(4, 5)],
        fill=[torch.randn, _classes, torch.randn],
        covers=("linear_cross_entropy",),
        **FEW,
    ),
    OpCase(
        "ctc",
        fn=lambda x: F.ctc_loss(
            x.log_softmax(-1), torch.ones(2, 3, dtype=torch.long), torch.full((2,), 9), torch.full((2,), 3)
        ),
        shape=(9, 2, 5),
        shard=0,
        gathers=True,
        **FEW,
    ),
]

test_losses = op_test(CASES)


@distributed(ranks=3)
def test_bad_arguments_raise_as_in_torch_on_every_rank():
    mesh = domain_mesh()
    x = torch.randn(9, 4)
    sharded = cut_tensor(x, mesh, plan_cut(x.shape, (3,), 0, "uneven"))
    classes = torch.zeros(9, dtype=torch.long)
    expect_error(lambda: F.mse_loss(sharded, sharded, reduction="most"), ValueError)
    expect_error(lambda: F.cross_entropy(sharded, classes, reduction="most"), ValueError)
    expect_error(lambda: F.cross_entropy(sharded, classes[:8]), ValueError)
    expect_error(lambda: F.binary_cross_entropy(sharded.sigmoid(), torch.rand(9, 1)), ValueError)
    expect_error(lambda: F.margin_ranking_loss(sharded, sharded, sharded[0]), RuntimeError)
    expect_error(lambda: F.nll_loss(sharded, classes.float()), RuntimeError)


@distributed(ranks=2)
def test_gradient_is_that_of_one_device_not_times_ranks():
    mesh = domain_mesh()
    x = torch.randn(1, 10, dtype=torch.float64)
    sharded = cut_tensor(x, mesh, plan_cut(x.shape, (2,), 1, (7, 3))).requires_grad_(True)
    F.mse_loss(sharded, torch.zeros_like(sharded)).backward()
    torch.testing.assert_close(sharded.grad.full_tensor(), x * 2 / 10)
