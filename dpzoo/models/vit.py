"""Vision Transformer, for pictures, weather grids and volumes.

Paper: Dosovitskiy et al. 2020, "An Image is Worth 16x16 Words" (arXiv:2010.11929).
Options: register tokens (arXiv:2309.16588), LayerScale (arXiv:2103.17239), query-key norm (arXiv:2302.05442),
stochastic depth (arXiv:1603.09382).
State-dict keys, argument names and outputs are those of timm's ``VisionTransformer`` (Apache-2.0,
https://github.com/huggingface/pytorch-image-models); the code is written anew.

Single-device code: it runs domain-parallel when its input is a ``ShardTensor``. Two habits make that possible and
are kept in every change: shapes are read from ``x.shape``, and batch is never flattened together with tokens.
Cut the *first* spatial dim if there is a choice: its shards stay contiguous in the token sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dpzoo.models.hub import HubMixin
from dpzoo.models.layers import Block, DenseHead, PatchEmbed

HEADS = ("classification", "dense")
POOLS = ("token", "avg", "")


class ViT(HubMixin, nn.Module):
    """Patch embedding, learned positions, pre-norm transformer blocks, and a classification or dense head.

    Args:
        img_size: Spatial sizes of the input, in 1, 2 or 3 dims; one int stands for a square (cube). H and W may differ.
        patch_size: Patch size, likewise.
        in_chans: Input channels.
        num_classes: Outputs of the classification head; 0 returns the pooled features. The dense head has none.
        head: ``"classification"``, or ``"dense"`` for a field on the input's grid (one linear layer per patch, then
            un-patchify).
        out_chans: Channels of the dense head's field; ``in_chans`` without it.
        global_pool: ``"token"`` (class token), ``"avg"`` (mean over patches), or ``""`` (no pooling: the head acts on
            every token). Default: ``"token"`` if there is a class token, else ``"avg"``. Classification only.
        fc_norm: Put the last LayerNorm behind the pooling (key ``fc_norm``) instead of before it (key ``norm``).
            Default: exactly when ``global_pool == "avg"``.
        embed_dim, depth, num_heads, mlp_ratio, qkv_bias, qk_norm, init_values: Of the blocks;
            see :class:`~dpzoo.models.layers.block.Block`.
        class_token: Prepend a class token. Default: only for classification.
        reg_tokens: Number of register tokens between class token and patches.
        no_embed_class: Class and register tokens get no position embedding.
        drop_rate, pos_drop_rate, proj_drop_rate, attn_drop_rate: Dropout before the head, after the position
            embedding, in the blocks' projections, of attention weights.
        drop_path_rate: Stochastic depth of the last block; grows linearly from 0 at the first.
        norm_eps: Epsilon of every LayerNorm.
        ndim: Number of spatial dims, needed only when ``img_size`` and ``patch_size`` are both ints and it is not 2.

    Shape: ``(B, in_chans, *img_size)`` -> ``(B, num_classes)``, ``(B, N, num_classes)`` without pooling, or
    ``(B, out_chans, *img_size)`` with the dense head.

    Raises:
        ValueError: arguments that contradict each other or sizes that do not divide; in ``forward``, an input of
            another shape than the model was built for.
    """

    def __init__(
        self,
        img_size: int | Sequence[int] = 224,
        patch_size: int | Sequence[int] = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        *,
        head: str = "classification",
        out_chans: int | None = None,
        global_pool: str | None = None,
        fc_norm: bool | None = None,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        init_values: float | None = None,
        class_token: bool | None = None,
        reg_tokens: int = 0,
        no_embed_class: bool = False,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        norm_eps: float = 1e-6,
        ndim: int | None = None,
    ) -> None:
        super().__init__()
        if class_token is None:
            class_token = head == "classification"
        self.global_pool = _resolve_pool(head, out_chans, global_pool, fc_norm, class_token)
        norm_after_pool = (self.global_pool == "avg") if fc_norm is None else fc_norm
        self.in_chans, self.embed_dim = in_chans, embed_dim
        self.num_classes = num_classes if head == "classification" else 0
        self.no_embed_class = no_embed_class
        self.num_prefix_tokens = int(class_token) + reg_tokens

        self.patch_embed = PatchEmbed(img_size, patch_size, in_chans, embed_dim, ndim)
        num_positions = self.patch_embed.num_patches + (0 if no_embed_class else self.num_prefix_tokens)
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim)) if class_token else None
        self.reg_token = nn.Parameter(torch.empty(1, reg_tokens, embed_dim)) if reg_tokens else None
        self.pos_embed = nn.Parameter(torch.empty(1, num_positions, embed_dim))
        self.pos_drop = nn.Dropout(pos_drop_rate)
        # Rates rounded to float32 as timm's are, so that one seed gives one result in both.
        drop_paths = torch.linspace(0, drop_path_rate, depth, device="cpu").tolist()
        self.blocks = nn.Sequential(
            *(
                Block(
                    embed_dim,
                    num_heads,
                    mlp_ratio=mlp_ratio,
                    qkv_bias=qkv_bias,
                    qk_norm=qk_norm,
                    proj_drop=proj_drop_rate,
                    attn_drop=attn_drop_rate,
                    init_values=init_values,
                    drop_path=drop_path,
                    norm_eps=norm_eps,
                )
                for drop_path in drop_paths
            )
        )
        self.norm = nn.Identity() if norm_after_pool else nn.LayerNorm(embed_dim, eps=norm_eps)
        self.fc_norm = nn.LayerNorm(embed_dim, eps=norm_eps) if norm_after_pool else nn.Identity()
        self.head_drop = nn.Dropout(drop_rate)
        self.head = self._build_head(head, out_chans)
        self.reset_parameters()

    def _build_head(self, head: str, out_chans: int | None) -> nn.Module:
        if head == "dense":
            channels = self.in_chans if out_chans is None else out_chans
            return DenseHead(self.embed_dim, channels, self.patch_embed.grid_size, self.patch_embed.patch_size)
        return nn.Linear(self.embed_dim, self.num_classes) if self.num_classes else nn.Identity()

    def reset_parameters(self) -> None:
        """Initialise as timm does: linear layers and positions truncated normal (std 0.02), prefix tokens near 0."""
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for token in (self.cls_token, self.reg_token):
            if token is not None:
                nn.init.normal_(token, std=1e-6)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that optimizers usually leave undecayed, besides biases and norms."""
        return {"pos_embed", "cls_token", "reg_token"}

    def example_inputs(self, batch_size: int = 1) -> tuple[Tensor, ...]:
        """Random inputs that ``forward`` accepts, on the weights' device and in their dtype."""
        return (self.pos_embed.new_empty(batch_size, self.in_chans, *self.patch_embed.img_size).normal_(),)

    def _add_positions(self, x: Tensor) -> Tensor:
        """Patch tokens ``(B, N, D)`` -> prefix and patch tokens ``(B, prefix + N, D)`` with position embedding."""
        prefix = [t.expand(x.shape[0], -1, -1) for t in (self.cls_token, self.reg_token) if t is not None]
        if self.no_embed_class:
            x = x + self.pos_embed
        if prefix:
            x = torch.cat([*prefix, x], dim=1)
        if not self.no_embed_class:
            x = x + self.pos_embed
        return self.pos_drop(x)

    def forward_features(self, x: Tensor) -> Tensor:
        """``(B, in_chans, *img_size)`` -> normed tokens ``(B, prefix + N, embed_dim)``."""
        return self.norm(self.blocks(self._add_positions(self.patch_embed(x))))

    def pool(self, x: Tensor) -> Tensor:
        """Tokens ``(B, prefix + N, D)`` -> what the head acts on: ``(B, D)``, or ``(B, N, D)`` for the dense head."""
        if self.global_pool == "token":
            return x[:, 0]
        if self.global_pool == "":
            return x
        if self.num_prefix_tokens:
            x = x[:, self.num_prefix_tokens :]
        return x.mean(dim=1) if self.global_pool == "avg" else x

    def forward_head(self, x: Tensor) -> Tensor:
        """Tokens ``(B, prefix + N, D)`` -> the model's output."""
        return self.head(self.head_drop(self.fc_norm(self.pool(x))))

    def forward(self, x: Tensor) -> Tensor:
        """Run the whole model; shapes as in the class."""
        return self.forward_head(self.forward_features(x))


def _resolve_pool(
    head: str, out_chans: int | None, global_pool: str | None, fc_norm: bool | None, class_token: bool
) -> str:
    """The pooling to use (``"patches"`` for the dense head), or a ValueError for options that contradict each other."""
    if head not in HEADS:
        raise ValueError(f"head must be one of {HEADS}, got {head!r}")
    if head == "dense":
        if global_pool is not None or fc_norm is not None:
            raise ValueError(
                f"the dense head does not pool: leave out global_pool={global_pool!r} and fc_norm={fc_norm!r}"
            )
        return "patches"
    if out_chans is not None:
        raise ValueError(f"out_chans={out_chans} belongs to head='dense'; a classification head has num_classes")
    if global_pool is None:
        return "token" if class_token else "avg"
    if global_pool not in POOLS:
        raise ValueError(f"global_pool must be one of {POOLS}, got {global_pool!r}")
    if global_pool == "token" and not class_token:
        raise ValueError("global_pool='token' needs class_token=True; use global_pool='avg' without a class token")
    return global_pool
