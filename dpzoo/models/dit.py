"""Diffusion transformer, for pictures, weather grids and volumes.

Paper: Peebles & Xie 2023, "Scalable Diffusion Models with Transformers" (arXiv:2212.09748), its adaLN-zero variant.
Options: neighborhood attention (arXiv:2204.07143), rotary positions (arXiv:2104.09864), query-key norm
(arXiv:2302.05442), stochastic depth (arXiv:1603.09382), condition fields and a mask token for regions without data.
Written from the paper; state-dict keys are those of the authors' release.

Single-device code: it runs domain-parallel when its fields are ``ShardTensor``s; times and conditions per sample stay
plain. With neighborhood attention any spatial dims may be cut, two of them too. With full attention cut the *first*
one if there is a choice: its shards stay contiguous in the token sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpzoo.models.dit_block import DiTBlock, FinalLayer
from dpzoo.models.hub import HubMixin
from dpzoo.models.layers import PatchEmbed
from dpzoo.models.layers.condition import ClassEmbedder, NumberEmbedder
from dpzoo.models.layers.pos_embed import sincos_positions
from dpzoo.models.layers.rotary import RotaryEmbedding

POSITIONS = ("sincos", "learned", "rotary", "none")
CONDITIONS = ("none", "class", "scalar", "vector")
_MAX_POOL = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


class DiT(HubMixin, nn.Module):
    """Patch embedding, positions, transformer blocks modulated by time and condition, and a field on the input's grid.

    Args:
        img_size: Spatial sizes of the input, in 1, 2 or 3 dims; one int stands for a square (cube).
        patch_size: Patch size, likewise.
        in_chans: Channels of the noised field.
        out_chans: Channels of the result; ``in_chans`` without it (a release that learns the variance has twice that).
        field_chans: Channels of a field of conditions on the same grid, joined to the input.
        condition: What else a sample is conditioned on: ``"none"``, ``"class"``, ``"scalar"`` (numbers, each as sines
            and cosines) or ``"vector"`` (one linear layer).
        condition_size: Number of classes, numbers, or entries of the vector.
        condition_drop: Probability of leaving the class out in training, for classifier-free guidance; if it is
            positive, ``forward`` may be called without a class.
        time: Take a diffusion time (or noise level) per sample.
        time_freq_dim, time_hidden_dim: Sines and cosines of the time, and channels between the two layers that follow
            (``embed_dim`` without it).
        time_endpoint: Let its lowest frequency be 1 / 10000 itself, as diffusers does, instead of a step above.
        embed_dim, depth, num_heads, mlp_ratio, qkv_bias, qk_norm: Of the blocks.
        kernel_size, dilation: Window of neighborhood attention; without ``kernel_size`` all tokens attend to all.
        pos_embed: ``"sincos"`` (fixed), ``"learned"``, ``"rotary"`` (inside the attention), or ``"none"``.
        rope_theta, rope_interleaved: See :class:`~dpzoo.models.layers.rotary.RotaryEmbedding`.
        mask_token: Accept regions without valid data: a patch with an invalid point is replaced, before every
            attention, by a token that the block has learned.
        proj_drop_rate, attn_drop_rate: Dropout in the blocks' projections, and of attention weights.
        drop_path_rate: Stochastic depth of the last block; grows linearly from 0 at the first.
        norm_eps: Epsilon of every LayerNorm.
        ndim: Number of spatial dims, needed only when ``img_size`` and ``patch_size`` are both ints and it is not 2.

    Shape: ``forward(x, t, condition, field, invalid)`` with ``x (B, in_chans, *img_size)``, ``t (B,)``, ``condition
    (B,)`` of integers, ``(B, condition_size)`` (one scalar: also ``(B,)``) or None, ``field (B, field_chans,
    *img_size)`` or None, ``invalid (B or 1, 1, *img_size)``, True where there is no data, or None ->
    ``(B, out_chans, *img_size)``.

    Raises:
        ValueError: arguments that contradict each other; in ``forward``, an input that is missing, or one that the
            model was not built for.
    """

    pos_embed: Tensor | None

    def __init__(
        self,
        img_size: int | Sequence[int] = 32,
        patch_size: int | Sequence[int] = 2,
        in_chans: int = 4,
        out_chans: int | None = None,
        *,
        field_chans: int = 0,
        condition: str = "none",
        condition_size: int = 0,
        condition_drop: float = 0.0,
        time: bool = True,
        time_freq_dim: int = 256,
        time_hidden_dim: int | None = None,
        time_endpoint: bool = False,
        embed_dim: int = 1152,
        depth: int = 28,
        num_heads: int = 16,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        kernel_size: int | Sequence[int] | None = None,
        dilation: int | Sequence[int] = 1,
        pos_embed: str = "sincos",
        rope_theta: float = 10000.0,
        rope_interleaved: bool = True,
        mask_token: bool = False,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        norm_eps: float = 1e-6,
        ndim: int | None = None,
    ) -> None:
        super().__init__()
        _check_condition(condition, condition_size, condition_drop)
        self.in_chans, self.field_chans, self.embed_dim = in_chans, field_chans, embed_dim
        self.out_chans = in_chans if out_chans is None else out_chans
        self.condition, self.condition_size = condition, condition_size
        self.mask_token = mask_token
        self.x_embedder = PatchEmbed(img_size, patch_size, in_chans + field_chans, embed_dim, ndim)
        grid, patch = self.x_embedder.grid_size, self.x_embedder.patch_size
        self.t_embedder = (
            NumberEmbedder(embed_dim, freq_dim=time_freq_dim, hidden_dim=time_hidden_dim, endpoint=time_endpoint)
            if time
            else None
        )
        self.y_embedder = _condition_embedder(condition, condition_size, condition_drop, embed_dim, time_freq_dim)
        self._register_positions(pos_embed)
        self.rotary = (
            RotaryEmbedding(grid, embed_dim // num_heads, theta=rope_theta, interleaved=rope_interleaved)
            if pos_embed == "rotary"
            else None
        )
        self.blocks = nn.ModuleList(
            DiTBlock(
                embed_dim,
                num_heads,
                mlp_ratio=mlp_ratio,
                proj_drop=proj_drop_rate,
                drop_path=drop_path,
                norm_eps=norm_eps,
                grid_size=grid,
                kernel_size=kernel_size,
                dilation=dilation,
                mask_token=mask_token,
                qkv_bias=qkv_bias,
                qk_norm=qk_norm,
                attn_drop=attn_drop_rate,
            )
            for drop_path in torch.linspace(0, drop_path_rate, depth, device="cpu").tolist()
        )
        self.final_layer = FinalLayer(embed_dim, self.out_chans, patch, norm_eps)
        self.reset_parameters()

    def _register_positions(self, kind: str) -> None:
        """``pos_embed``, which is added to the tokens: ``(1, N, embed_dim)``, learned or fixed, or None."""
        if kind not in POSITIONS:
            raise ValueError(f"pos_embed must be one of {POSITIONS}, got {kind!r}")
        if kind == "learned":
            self.pos_embed = nn.Parameter(torch.empty(1, self.x_embedder.num_patches, self.embed_dim))
        else:
            fixed = sincos_positions(self.x_embedder.grid_size, self.embed_dim)[None] if kind == "sincos" else None
            self.register_buffer("pos_embed", fixed)

    def reset_parameters(self) -> None:
        """Glorot-uniform linear layers, normal embeddings (std 0.02), zero for what adaLN-zero starts at zero."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.xavier_uniform_(self.x_embedder.proj.weight.flatten(1))
        embedders = [m for m in (self.t_embedder, self.y_embedder) if m is not None]
        for weight in [p for m in embedders for p in m.parameters() if p.ndim > 1]:
            nn.init.normal_(weight, std=0.02)
        if isinstance(self.pos_embed, nn.Parameter):
            nn.init.normal_(self.pos_embed, std=0.02)
        start_at_zero = ("adaLN_modulation.1.weight", "final_layer.linear.weight", "x_embedder.proj.bias")
        for name, weight in self.named_parameters():
            if name.endswith(start_at_zero):
                nn.init.zeros_(weight)

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that optimizers usually leave undecayed, besides biases."""
        return {name for name, _ in self.named_parameters() if name.endswith(("pos_embed", "mask_token"))}

    def example_inputs(self, batch_size: int = 1) -> tuple[Tensor | None, ...]:
        """Random inputs that ``forward`` accepts, on the weights' device and in their dtype; None for no input."""
        weight, size = self.x_embedder.proj.weight, self.x_embedder.img_size
        kinds = {
            "none": None,
            "class": torch.arange(batch_size, device=weight.device) % max(1, self.condition_size),
            "scalar": weight.new_empty(batch_size, self.condition_size).normal_(),
            "vector": weight.new_empty(batch_size, self.condition_size).normal_(),
        }
        inputs = [
            weight.new_empty(batch_size, self.in_chans, *size).normal_(),
            None if self.t_embedder is None else weight.new_empty(batch_size).uniform_(0, 1000),
            kinds[self.condition],
            weight.new_empty(batch_size, self.field_chans, *size).normal_() if self.field_chans else None,
            weight.new_empty(batch_size, 1, *size).uniform_() > 0.98 if self.mask_token else None,
        ]
        while inputs[-1] is None:
            inputs.pop()
        return tuple(inputs)

    def forward(
        self,
        x: Tensor,
        t: Tensor | None = None,
        condition: Tensor | None = None,
        field: Tensor | None = None,
        invalid: Tensor | None = None,
    ) -> Tensor:
        """Run the whole model; shapes as in the class."""
        c = self._embed(x, t, condition)
        tokens = self.x_embedder.on_grid(self._joined(x, field, invalid))
        if self.pos_embed is not None:
            tokens = tokens + self.pos_embed.view(1, *self.x_embedder.grid_size, -1)
        masked = None if invalid is None else self._invalid_tokens(invalid)
        for block in self.blocks:
            tokens = block(tokens, c, self.rotary, masked)
        return self.final_layer(tokens, c)

    def _embed(self, x: Tensor, t: Tensor | None, condition: Tensor | None) -> Tensor:
        """Time and condition as one vector per sample, ``(B, embed_dim)``."""
        if (t is None) == (self.t_embedder is not None):
            raise ValueError(
                f"DiT: t is {'missing' if t is None else 'given, but the model was built with time=False'}"
            )
        parts = [] if t is None or self.t_embedder is None else [self.t_embedder(t)]
        if self.y_embedder is None:
            if condition is not None:
                raise ValueError("DiT: a condition is given, but the model was built with condition='none'")
        elif isinstance(self.y_embedder, ClassEmbedder):
            y = self.y_embedder.no_class(x.shape[0]) if condition is None else self.y_embedder(condition, x)
            parts.append(y)
        elif condition is None:
            raise ValueError(f"DiT: the condition is missing, ({self.condition}, size {self.condition_size})")
        else:
            parts.append(self.y_embedder(condition))
        if not parts:
            weight = self.x_embedder.proj.weight
            return weight.new_zeros(x.shape[0], self.embed_dim)
        return sum(parts[1:], parts[0])

    def _joined(self, x: Tensor, field: Tensor | None, invalid: Tensor | None) -> Tensor:
        """The noised field and the field of conditions on one grid; zero where there is no data."""
        if (field is None) == (self.field_chans > 0):
            found = "missing" if field is None else "given"
            raise ValueError(f"DiT: built with field_chans={self.field_chans}, but the field is {found}")
        if field is not None:
            x = torch.cat([x, field], dim=1)
        if invalid is None:
            return x
        if not self.mask_token:
            raise ValueError("DiT: invalid is given, but the model was built with mask_token=False")
        if tuple(invalid.shape[1:]) != (1, *self.x_embedder.img_size) or invalid.dtype is not torch.bool:
            raise ValueError(
                f"DiT: invalid must be bool of shape (B or 1, 1, {', '.join(map(str, self.x_embedder.img_size))}), got "
                f"{invalid.dtype} {tuple(invalid.shape)}"
            )
        return x.masked_fill(invalid, 0.0)

    def _invalid_tokens(self, invalid: Tensor) -> Tensor:
        """``(B, 1, *img_size)`` -> ``(B, *grid, 1)``: patches with any invalid point."""
        patch = self.x_embedder.patch_size
        dtype = self.x_embedder.proj.weight.dtype
        return _MAX_POOL[len(patch)](invalid.to(dtype), patch, patch).movedim(1, -1) > 0


def _check_condition(kind: str, size: int, drop: float) -> None:
    if kind not in CONDITIONS:
        raise ValueError(f"condition must be one of {CONDITIONS}, got {kind!r}")
    if (kind == "none") != (size == 0):
        raise ValueError(f"condition={kind!r} with condition_size={size}: give both, or neither")
    if drop and kind != "class":
        raise ValueError(f"condition_drop={drop} belongs to condition='class', got {kind!r}")


def _condition_embedder(kind: str, size: int, drop: float, dim: int, freq_dim: int) -> nn.Module | None:
    if kind == "class":
        return ClassEmbedder(size, dim, drop)
    if kind == "scalar":
        return NumberEmbedder(dim, size, freq_dim=freq_dim)
    return nn.Linear(size, dim) if kind == "vector" else None
