"""Diffusion for fields: preconditioning, noise levels, loss, samplers and experts per noise level.

After Karras et al. 2022, "Elucidating the Design Space of Diffusion-Based Generative Models" (EDM, arXiv:2206.00364);
written from the paper. A *denoiser* here is anything called as ``denoiser(x, sigma, *conditions, **conditions)`` that
returns its estimate of the clean field: ``x`` is ``(B, C, *grid)``, ``sigma`` one standard deviation of the noise per
sample. :class:`EDMPreconditioner` makes a denoiser of any network.

Single-device code. With fields that are ``ShardTensor``s the noise is drawn for each point by its place in the whole
field, so that after ``dpzoo.shard.manual_seed`` the forecast is the same for any number of ranks, and every rank of a
domain group has the noise level of the sample it shares.
"""

from dpzoo.models.diffusion.experts import StagedExperts as StagedExperts
from dpzoo.models.diffusion.joined_field import JoinedField as JoinedField
from dpzoo.models.diffusion.joined_field import join_fields as join_fields
from dpzoo.models.diffusion.loss import EDMLoss as EDMLoss
from dpzoo.models.diffusion.noise_levels import LogNormal as LogNormal
from dpzoo.models.diffusion.noise_levels import LogUniform as LogUniform
from dpzoo.models.diffusion.noise_levels import NoiseLevels as NoiseLevels
from dpzoo.models.diffusion.noise_levels import edm_sigmas as edm_sigmas
from dpzoo.models.diffusion.precondition import EDMPreconditioner as EDMPreconditioner
from dpzoo.models.diffusion.sampler import EDMSampler as EDMSampler
