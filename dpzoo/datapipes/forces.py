"""Drag, lift and side force of a body from pressure and wall shear stress on its surface.

Conventions of the data (OpenFOAM): normals point into the body, out of the fluid, so pressure pushes along them; the
stored wall shear stress points against the traction of the fluid on the wall. Hence

    F / rho = sum_i A_i (p_i n_i - tau_i),      C = F / (rho q A_ref),  q = U^2 / 2

with kinematic p and tau (m2/s2). Drag is along +x, lift along +z, side force along +y. Works on plain tensors and on
ShardTensors, whose sums are complete on every rank; differentiable.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Forces:
    """Force coefficients `(3,)` along x (drag), y (side) and z (lift), from pressure and from friction."""

    pressure: Tensor
    friction: Tensor

    @property
    def total(self) -> Tensor:
        """Both together, `(3,)`."""
        return self.pressure + self.friction

    @property
    def drag(self) -> Tensor:
        """Cd, 0-d."""
        return self.total[0]

    @property
    def side(self) -> Tensor:
        """Cs, 0-d."""
        return self.total[1]

    @property
    def lift(self) -> Tensor:
        """Cl, 0-d."""
        return self.total[2]


def integrated_forces(
    pressure: Tensor,
    wall_shear_stress: Tensor,
    normals: Tensor,
    areas: Tensor,
    *,
    speed: float,
    reference_area: float,
    outward_normals: bool = False,
) -> Forces:
    """Force coefficients of a body.

    Args:
        pressure: `(n,)`, kinematic (m2/s2); a constant offset cancels on a closed surface.
        wall_shear_stress: `(n, 3)`, kinematic (m2/s2), with OpenFOAM's sign.
        normals: `(n, 3)` unit vectors, into the body unless `outward_normals`.
        areas: `(n,)` in m2. Of a random sub-sample of n out of N faces, pass `areas * N / n`.
        speed: free stream in m/s.
        reference_area: frontal area in m2.

    Raises:
        ValueError: shapes that do not belong together, or a speed or area that is not positive.
    """
    n = areas.shape[0] if areas.ndim == 1 else -1
    shapes = [tuple(t.shape) for t in (pressure, wall_shear_stress, normals, areas)]
    if shapes != [(n,), (n, 3), (n, 3), (n,)]:
        raise ValueError(
            "integrated_forces: pressure, wall shear stress, normals, areas must be (n,), (n, 3), (n, 3), (n,), "
            f"got {shapes}"
        )
    if not (speed > 0 and reference_area > 0):
        raise ValueError(f"integrated_forces: speed {speed} and reference area {reference_area} must be positive")
    wide = torch.float64 if areas.device.type != "mps" else torch.float32
    weights = (areas.to(wide) / (0.5 * speed**2 * reference_area)).unsqueeze(-1)
    sign = -1.0 if outward_normals else 1.0
    pushed = (weights * pressure.to(wide).unsqueeze(-1) * normals.to(wide)).sum(0) * sign
    return Forces(pushed, -(weights * wall_shear_stress.to(wide)).sum(0))
