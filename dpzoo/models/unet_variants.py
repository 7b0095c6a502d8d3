"""The named U-Net variants.

- ``unet_{small,base,large}[_3d]``: :class:`~dpzoo.models.unet.UNet` with strided convolutions, 32 to 64 base channels.
- ``unet_ronneberger``: the 2015 paper's widths, depth, pools and rectifiers (arXiv:1505.04597), with padded
  convolutions and a batch norm.
- ``unet_nnunet[_3d]``: nnU-Net's usual full-resolution plan (arXiv:1809.10486); ``unet_monai_basic[_3d]`` and
  ``unet_monai_residual[_3d]``: the default widths of MONAI's ``BasicUNet`` and of its ``UNet`` tutorials.
- ``diffusion_unet_ddpmpp``, ``diffusion_unet_ncsnpp``: :class:`~dpzoo.models.unet_diffusion.DiffusionUNet` as EDM
  (arXiv:2206.00364) trains them on 32-pixel pictures; ``..._64`` on 64-pixel ones.
- ``*_nano*``: small siblings that train on a CPU in seconds, for tests and demos.

Every argument of the classes can be overridden, as in ``create_model("unet_small", in_chans=7, out_chans=7)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from dpzoo.models.registry import register_model
from dpzoo.models.unet import UNet
from dpzoo.models.unet_diffusion import DiffusionUNet
from dpzoo.models.unet_residual import ResidualUNet

PLAIN: dict[str, dict[str, Any]] = {
    "nano": {"channels": (8, 16, 32)},
    "small": {"channels": (32, 64, 128, 256)},
    "base": {"channels": (32, 64, 128, 256, 512)},
    "large": {"channels": (64, 128, 256, 512, 1024)},
    "nnunet": {"channels": (32, 64, 128, 256, 512, 512)},
    "monai_basic": {
        "channels": (32, 32, 64, 128, 256),
        "down": "max",
        "negative_slope": 0.1,
        "odd_sizes": "fit",
        "skip_first": True,
    },
}
NNUNET_3D: dict[str, Any] = {"channels": (32, 64, 128, 256, 320, 320)}  # its memory limit of 320 channels in 3-D
RONNEBERGER: dict[str, Any] = {
    "channels": (64, 128, 256, 512, 1024),
    "down": "max",
    "norm": "batch",
    "act": "relu",
    "negative_slope": 0.0,
}
RESIDUAL: dict[str, dict[str, Any]] = {
    "nano": {"channels": (8, 16, 32)},
    "monai": {"channels": (16, 32, 64, 128, 256)},
}
DDPMPP: dict[str, Any] = {"model_channels": 128, "channel_mult": (2, 2, 2), "attn_levels": (1,)}
NCSNPP: dict[str, Any] = {
    "embedding": "fourier",
    "encoder": "residual",
    "resample_filter": (1, 3, 3, 1),
    "channel_mult_noise": 2,
}
LARGER: dict[str, Any] = {"channel_mult": (1, 2, 2, 2), "attn_levels": (2,)}
NANO_DIFFUSION: dict[str, Any] = {
    "model_channels": 16,
    "channel_mult": (1, 2),
    "num_blocks": 1,
    "attn_levels": (1,),
    "dropout": 0.0,
}
TINY: dict[type[nn.Module], dict[str, Any]] = {
    UNet: {"channels": (4, 6, 8)},
    ResidualUNet: {"channels": (4, 6, 8)},
    DiffusionUNet: {"model_channels": 4, "num_blocks": 1, "channel_mult": (1, 2), "attn_levels": (1,), "dropout": 0.0},
}


def _register(name: str, family: type[nn.Module], *parts: Mapping[str, Any]) -> None:
    variant = {key: value for part in parts for key, value in part.items()}

    def build(**kwargs: Any) -> nn.Module:
        return family(**{**variant, **kwargs})

    build.__name__ = build.__qualname__ = name
    build.__doc__ = f"{family.__name__}({', '.join(f'{k}={v!r}' for k, v in variant.items())})"
    register_model(tiny=TINY[family])(build)


for _size, _variant in PLAIN.items():
    _register(f"unet_{_size}", UNet, _variant)
    _register(f"unet_{_size}_3d", UNet, _variant, NNUNET_3D if _size == "nnunet" else {}, {"ndim": 3})
_register("unet_ronneberger", UNet, RONNEBERGER)

for _size, _variant in RESIDUAL.items():
    _name = f"unet_{_size}_residual"
    _register(_name, ResidualUNet, _variant)
    _register(f"{_name}_3d", ResidualUNet, _variant, {"ndim": 3})

for _name, _style in {"ddpmpp": {}, "ncsnpp": NCSNPP}.items():
    _register(f"diffusion_unet_{_name}", DiffusionUNet, DDPMPP, _style)
    _register(f"diffusion_unet_{_name}_64", DiffusionUNet, DDPMPP, LARGER, _style)
_register("diffusion_unet_nano", DiffusionUNet, NANO_DIFFUSION)
_register("diffusion_unet_nano_ncsnpp", DiffusionUNet, NANO_DIFFUSION, NCSNPP)
_register("diffusion_unet_nano_3d", DiffusionUNet, NANO_DIFFUSION, {"ndim": 3, "model_channels": 8})
