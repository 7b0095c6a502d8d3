"""The zoo: ordinary single-device models and their names.

Nothing here imports ``dpzoo.shard`` or ``torch.distributed``; a model runs domain-parallel when its input is sharded.
"""

from dpzoo.models import dit_variants as _dit_variants  # noqa: F401  # registers the names
from dpzoo.models import neighborhood_variants as _neighborhood_variants  # noqa: F401  # registers the names
from dpzoo.models import stormscope_variants as _stormscope_variants  # noqa: F401  # registers the names
from dpzoo.models import transolver_variants as _transolver_variants  # noqa: F401  # registers the names
from dpzoo.models import unet_variants as _unet_variants  # noqa: F401  # registers the names
from dpzoo.models import vit_variants as _vit_variants  # noqa: F401  # registers the names
from dpzoo.models.dit import DiT as DiT
from dpzoo.models.neighborhood import NeighborhoodTransformer as NeighborhoodTransformer
from dpzoo.models.registry import UnknownModelError as UnknownModelError
from dpzoo.models.registry import create_model as create_model
from dpzoo.models.registry import list_models as list_models
from dpzoo.models.registry import register_model as register_model
from dpzoo.models.stormscope import StormScope as StormScope
from dpzoo.models.transolver import Transolver as Transolver
from dpzoo.models.unet import UNet as UNet
from dpzoo.models.unet_diffusion import DiffusionUNet as DiffusionUNet
from dpzoo.models.unet_residual import ResidualUNet as ResidualUNet
from dpzoo.models.vit import ViT as ViT
