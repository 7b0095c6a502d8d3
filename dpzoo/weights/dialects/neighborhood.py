"""Files of NAT and DiNAT: our names are those of the authors' checkpoints."""

from __future__ import annotations

from dpzoo.weights.dialects.rule import Rule, dropped, dropped_if_zero
from dpzoo.weights.dialects.steps import BiasTables, Features, Head, PatchKernel, Unused
from dpzoo.weights.dialects.upstream import Context, Upstream

RPB = "levels.{l}.blocks.{i}.attn.rpb"
FEATURES = {
    "levels.{l}.blocks.{i}.gamma1": "a learned factor for each branch (build it with layer_scale=1e-5)",
    "levels.{l}.blocks.{i}.attn.qkv.bias": "a bias of queries, keys and values (build it with qkv_bias=True)",
}
STEPS = (
    Features(FEATURES),
    BiasTables(RPB),
    PatchKernel("patch_embed.proj.0.weight", resize=False),
    Head(),
    Unused(("norm.weight", "norm.bias"), "the dense head has norms of its own"),
)


def _rules(context: Context) -> tuple[Rule, ...]:
    index = "levels.{l}.blocks.{i}.attn.relative_position_index"
    biases = dropped_if_zero(RPB, "relative position biases (build it with rel_pos_bias=True)")
    return (
        dropped(index, "computed"),
        *(() if context.has(RPB) else (biases,)),
    )


UPSTREAMS = (
    Upstream(
        "SHI-Labs NAT",
        "NeighborhoodTransformer",
        present=("levels.{l}.blocks.{i}.attn.qkv.weight", "patch_embed.proj.{i}.weight"),
        rules=_rules,
        own_names=True,
    ),
)
