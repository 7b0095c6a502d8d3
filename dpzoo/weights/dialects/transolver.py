"""Files of Transolvers: the authors' (our names), and PhysicsNeMo's."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dpzoo.weights.dialects.frequencies import with_frequencies
from dpzoo.weights.dialects.lazy import Computed, Lazy, summed
from dpzoo.weights.dialects.rule import Rule, dropped, parted, permuted, refused, rename, same, with_zeros
from dpzoo.weights.dialects.steps import Features, Unused
from dpzoo.weights.dialects.upstream import Context, Shapes, Upstream
from dpzoo.weights.source import WeightsMismatchError

FEATURES = {
    "time_fc.{i}.{p}": "a time (build it with time=True)",
    "embedding.{p}": "a condition (build it with condition_dim=...)",
    "blocks.{i}.Attn.proj_temperature.{j}.{p}": "a temperature for each point (build it with plus=True)",
    "blocks.{i}.Attn.in_project_fx.{p}": "the attention of the first Transolver (build it with plus=False)",
}
STEPS = (Features(FEATURES), Unused(("placeholder",), "never used by a structured model with an input function"))

TEMPERATURE, BIAS = "blocks.{i}.Attn.temperature", "blocks.{i}.Attn.bias"
SHARED = ("in_project_x.{p}", "in_project_fx.{p}", "in_project_slice.{p}", "proj_temperature.{j}.{p}")
SLICE_EPS = 0.01  # what PhysicsNeMo adds to the sum of a slice's weights
CLAMP = (0.5, 5.0)  # PhysicsNeMo's limits of the temperature, which are no limits of ours


def _authors(_: Context) -> tuple[Rule, ...]:
    """(1, heads, 1, 1) there, (1, 1, heads, 1) here."""
    return permuted(TEMPERATURE, TEMPERATURE, (0, 2, 1, 3)), permuted(BIAS, BIAS, (0, 2, 1, 3))


def _is_the_authors(theirs: Shapes) -> bool:
    shape = theirs.get("blocks.0.Attn.temperature", theirs.get("blocks.0.Attn.bias", ()))
    return len(shape) == 4 and shape[2] == 1 and shape[1] > 1


def _clamped(temperature: Lazy) -> Sequence[Lazy]:
    return (Computed(temperature.shape, (temperature,), lambda t: t.clamp(*CLAMP)),)


def _within_limits(temperature: Lazy) -> Sequence[Lazy]:
    def checked(t: torch.Tensor) -> torch.Tensor:
        if bool(((t < CLAMP[0]) | (t > CLAMP[1])).any()):
            raise WeightsMismatchError(
                f"PhysicsNeMo limits the temperature to {CLAMP}; the model has {t.min():.3g} to {t.max():.3g}"
            )
        return t

    return (Computed(temperature.shape, (temperature,), checked),)


def _limited_temperature() -> Rule:
    detail = f"limited to {CLAMP[0]} ... {CLAMP[1]}, as PhysicsNeMo does when it is used"
    return Rule((TEMPERATURE,), (TEMPERATURE,), _clamped, _within_limits, detail=detail)


def _grid_distances(context: Context) -> tuple[Rule, ...]:
    """They keep the distances of all grid points to the reference points, which our model computes."""
    kept = dropped("embedding", "distances on the grid, which the model computes")
    network = context.network
    reference, grid = getattr(network, "reference", None), getattr(network, "grid", None)
    if reference is None or grid is None:
        return (kept,)
    count = math.prod(grid)

    def distances(_: torch.Tensor) -> torch.Tensor:
        axes = [torch.linspace(0, 1, n) for n in grid]
        points = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(count, -1)
        return torch.cdist(points, reference.detach().cpu().float())[None]

    def add_distances(weight: Lazy) -> Sequence[Lazy]:
        return weight, Computed((1, count, reference.shape[0]), (weight,), distances)

    first = ("preprocess.layers.0.weight", "preprocess.linear_pre.0.weight")
    both = Rule((first[0], "embedding"), first[1:], lambda weight, _: (weight,), add_distances, "merged", kept.detail)
    return both, kept


def _physicsnemo(context: Context) -> tuple[Rule, ...]:
    last = ("preprocess.layers.2.bias", "preprocess.linear_post.bias")
    placeholder = with_zeros(*last, "placeholder", lambda t: t.shape, lambda bias, own: (summed(bias, own),))
    plus = context.has(BIAS)
    eps = SLICE_EPS if context.network is None else context.network.get_submodule("blocks.0.Attn").slice_eps
    told = (
        ""
        if eps == SLICE_EPS
        else f"built with slice_eps={SLICE_EPS} the model would give PhysicsNeMo's numbers exactly"
    )
    # What adds to the temperature of each point is called a bias by the authors.
    temperature = rename(TEMPERATURE, BIAS) if plus else _limited_temperature()
    return (
        *((placeholder,) if context.has("placeholder") else ()),
        *_grid_distances(context),
        rename("preprocess.layers.0.{p}", "preprocess.linear_pre.0.{p}"),
        rename("preprocess.layers.2.{p}", "preprocess.linear_post.{p}"),
        temperature,
        parted(
            "blocks.{i}.Attn.qkv_project.weight", [f"blocks.{{i}}.Attn.to_{part}.weight" for part in "qkv"], detail=told
        ),
        rename("blocks.{i}.Attn.out_linear.{p}", "blocks.{i}.Attn.to_out.0.{p}"),
        rename("blocks.{i}.ln_mlp1.0.{p}", "blocks.{i}.ln_2.{p}"),
        rename("blocks.{i}.ln_mlp1.1.layers.0.{p}", "blocks.{i}.mlp.linear_pre.0.{p}"),
        rename("blocks.{i}.ln_mlp1.1.layers.2.{p}", "blocks.{i}.mlp.linear_post.{p}"),
        rename("blocks.{i}.ln_mlp2.0.{p}", "blocks.{i}.ln_3.{p}"),
        rename("blocks.{i}.ln_mlp2.1.{p}", "blocks.{i}.mlp2.{p}"),
        with_frequencies("time_fc.0.weight", "time_fc.0.weight", "time_embed.freqs"),
        *same("time_fc.{i}.{p}", "blocks.{i}.ln_1.{p}", *(f"blocks.{{i}}.Attn.{part}" for part in SHARED)),
        refused("blocks.{i}.Attn.q_global", "global queries (FLARE)"),
        refused("context_builder.{rest}", "a geometry context (GeoTransolver)"),
        refused("blocks.{i}.Attn.{rest}.layer_norm_weight", "layers of Transformer Engine (use_te=True)"),
    )


UPSTREAMS = (
    Upstream(
        "thuml Transolver",
        "Transolver",
        present=("preprocess.linear_pre.0.weight", "blocks.{i}.Attn.to_q.weight"),
        rules=_authors,
        own_names=True,
        tells=_is_the_authors,
    ),
    Upstream(
        "physicsnemo Transolver",
        "Transolver",
        present=("preprocess.layers.0.weight", "blocks.{i}.Attn.in_project_slice.weight"),
        rules=_physicsnemo,
    ),
)
