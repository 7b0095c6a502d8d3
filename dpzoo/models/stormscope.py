"""StormScope: a diffusion transformer that forecasts the next state of a continental weather grid.

Paper: "StormScope", arXiv:2601.17268. A DiT with neighborhood attention is preconditioned as EDM (arXiv:2206.00364) and
conditioned on fields: the states before, a background forecast, and what never changes (terrain, latitude, longitude).
Written from the paper's description; see :mod:`dpzoo.models.stormscope_variants` for the sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dpzoo.models.diffusion.joined_field import join_fields
from dpzoo.models.diffusion.precondition import EDMPreconditioner
from dpzoo.models.dit import DiT

CONDITIONS = ("state", "background", "invariant")


class StormScope(EDMPreconditioner):
    """Estimate the clean next state from a noised one, given fields of conditions.

    Args:
        img_size: Grid, rows and columns.
        in_chans: Channels of a state, which is forecast.
        state_chans: Channels of the states before, all times together; ``in_chans`` without it (one time before).
        background_chans, invariant_chans: Channels of the two other conditions; 0: there is none.
        sigma_data: Deviation of the normalised state, for all channels or for each.
        patch_size, **network: Of :class:`~dpzoo.models.dit.DiT`, e.g. ``kernel_size``, ``depth``, ``mask_token``.

    Shape: ``forward(x, sigma, state, background, invariant, invalid)`` with ``x (B, in_chans, *img_size)``, ``sigma``
    a number, ``()`` or ``(B,)``, each condition ``(B or 1, its channels, *img_size)``, ``invalid (B or 1, 1,
    *img_size)`` bool, True where there is no data (only with ``mask_token``), or None -> ``(B, in_chans, *img_size)``.
    Keys: ``network.*`` (those of DiT), ``sigma_data``.

    Raises:
        ValueError: a condition that is missing, was not expected, or has another shape.
    """

    network: DiT

    def __init__(
        self,
        img_size: int | Sequence[int] = (1024, 1792),
        in_chans: int = 8,
        *,
        state_chans: int | None = None,
        background_chans: int = 0,
        invariant_chans: int = 0,
        sigma_data: float | Sequence[float] = 0.5,
        patch_size: int | Sequence[int] = 4,
        **network: Any,
    ) -> None:
        counts = (in_chans if state_chans is None else state_chans, background_chans, invariant_chans)
        if min(counts) < 0:
            raise ValueError(f"StormScope: channels of {CONDITIONS} must be >= 0, got {counts}")
        super().__init__(DiT(img_size, patch_size, in_chans, field_chans=sum(counts), **network), sigma_data)
        self.channels = dict(zip(CONDITIONS, counts, strict=True))

    def forward(  # type: ignore[override]  # the conditions have names here
        self,
        x: Tensor,
        sigma: Tensor | float,
        state: Tensor | None = None,
        background: Tensor | None = None,
        invariant: Tensor | None = None,
        invalid: Tensor | None = None,
    ) -> Tensor:
        """Denoise ``x``; shapes as in the class."""
        given = (state, background, invariant)
        for (name, wanted), tensor in zip(self.channels.items(), given, strict=True):
            found = 0 if tensor is None else tensor.shape[1]
            if found != wanted:
                raise ValueError(f"StormScope: built for {wanted} channels of {name}, got {found}")
        field = join_fields(x.shape[0], *given)
        weight = self.network.x_embedder.proj.weight
        return super().forward(x, sigma, field=None if field is None else field.to(weight.dtype), invalid=invalid)

    def example_inputs(self, batch_size: int = 1) -> tuple[Tensor | None, ...]:
        """Random inputs that ``forward`` accepts, on the weights' device and in their dtype; None for no input."""
        weight, size = self.network.x_embedder.proj.weight, self.network.x_embedder.img_size

        def normal(batch: int, channels: int) -> Tensor | None:
            return weight.new_empty(batch, channels, *size).normal_() if channels else None

        inputs = [
            normal(batch_size, self.network.in_chans),
            weight.new_empty(batch_size).uniform_(0.1, 10.0),
            normal(batch_size, self.channels["state"]),
            normal(batch_size, self.channels["background"]),
            normal(1, self.channels["invariant"]),
            weight.new_empty(batch_size, 1, *size).uniform_() > 0.98 if self.network.mask_token else None,
        ]
        while inputs[-1] is None:
            inputs.pop()
        return tuple(inputs)
