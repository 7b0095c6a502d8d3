"""The zoo: ordinary single-device models and their names.

Nothing here imports ``dpzoo.shard`` or ``torch.distributed``; a model runs domain-parallel when its input is sharded.
"""

from dpzoo.models import unet_variants as _unet_variants  # noqa: F401  # registers the names
from dpzoo.models import vit_variants as _vit_variants  # noqa: F401  # registers the names
from dpzoo.models.registry import UnknownModelError as UnknownModelError
from dpzoo.models.registry import create_model as create_model
from dpzoo.models.registry import list_models as list_models
from dpzoo.models.registry import register_model as register_model
from dpzoo.models.unet import UNet as UNet
from dpzoo.models.unet_diffusion import DiffusionUNet as DiffusionUNet
from dpzoo.models.unet_residual import ResidualUNet as ResidualUNet
from dpzoo.models.vit import ViT as ViT
