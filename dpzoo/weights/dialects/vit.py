"""Files of Vision Transformers: our names are timm's; what others add is renamed, dropped or refused."""

from __future__ import annotations

from dpzoo.weights.dialects.positions import Positions
from dpzoo.weights.dialects.rule import Rule, dropped, rename
from dpzoo.weights.dialects.steps import Features, Head, PatchKernel, Unused
from dpzoo.weights.dialects.upstream import Context, Upstream

PRETRAINING = "only used in pretraining"
DROPPED = {  # MAE's decoder, DINO's and iBOT's projection heads
    "mask_token": PRETRAINING,
    "decoder_{rest}": PRETRAINING,
    "decoder_blocks.{rest}": PRETRAINING,
    "head.mlp.{rest}": PRETRAINING,
    "head.last_layer.{rest}": PRETRAINING,
    "dino_head.{rest}": PRETRAINING,
    "ibot_head.{rest}": PRETRAINING,
}
FEATURES = {
    "blocks.{i}.ls1.gamma": "LayerScale (build it with init_values=1e-5)",
    "blocks.{i}.attn.q_norm.weight": "a norm of queries and keys (build it with qk_norm=True)",
    "blocks.{i}.attn.qkv.bias": "a bias of queries, keys and values (build it with qkv_bias=True)",
    "norm.{p}": "a norm before the pooling (build it with fc_norm=False)",
    "fc_norm.{p}": "a norm behind the pooling (build it with global_pool='avg' or fc_norm=True)",
    "dist_token": "a distillation token (DeiT)",
    "head_dist.{p}": "a distillation token (DeiT)",
    "blocks.{i}.mlp.w12.{p}": "gated perceptrons (SwiGLU)",
    "blocks.{i}.mlp.fc1_g.{p}": "gated perceptrons (SwiGLU)",
    "blocks.{i}.mlp.norm.{p}": "a norm inside the perceptron",
    "blocks.{i}.attn.norm.{p}": "a norm inside the attention",
    "blocks.{i}.attn.q_bias": "separate biases of queries and values (BEiT)",
    "blocks.{i}.attn.relative_position_bias_table": "relative position biases (BEiT)",
    "blocks.{i}.gamma_1": "BEiT's scales; timm's ls1.gamma are taken",
    "norm_pre.{p}": "a norm before the first block (CLIP)",
    "attn_pool.{rest}": "attention pooling",
}

STEPS = (
    Features(FEATURES),
    Positions("patch_embed", prefix_tokens=("cls_token", "reg_token")),
    Unused(("cls_token", "reg_token"), "the model is built without this token"),
    PatchKernel("patch_embed.proj.weight"),
    Head(),
)


def rules(context: Context) -> tuple[Rule, ...]:
    """timm's names are ours."""
    extras = [dropped(template, why) for template, why in DROPPED.items() if not context.has(template)]
    return (rename("register_tokens", "reg_token", both_ways=False), *extras)


UPSTREAMS = (
    Upstream(
        "timm ViT",
        "ViT",
        present=("blocks.{i}.attn.qkv.weight", "patch_embed.proj.weight"),
        absent=("blocks.{i}.adaLN_modulation.1.weight",),
        rules=rules,
        own_names=True,
    ),
)
