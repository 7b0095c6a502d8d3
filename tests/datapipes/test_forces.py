from pathlib import Path

import pytest
import torch

from dpzoo.datapipes.forces import integrated_forces
from dpzoo.datapipes.points import GEOMETRY, SURFACE, VOLUME, PointDataset, PointLoader, find_cars
from dpzoo.shard import scatter
from dpzoo.testing import distributed, domain_mesh

DATA = Path(__file__).parents[2] / "examples" / "drivaer" / "data"


def forces_of(sample, **options):
    fields = sample["surface_fields"]
    return integrated_forces(
        fields[:, 0],
        fields[:, 1:],
        sample["surface_normals"],
        sample["surface_areas"],
        speed=sample.globals["stream_velocity"],
        reference_area=sample.globals["reference_area"],
        **options,
    )


def test_a_cube_in_a_pressure_gradient():
    """p = -x pushes a body of volume V along +x with force V (p falls along x); friction is that of the fluid on it."""
    inward = -torch.cat([torch.eye(3), -torch.eye(3)]).double()
    centers = torch.tensor([0.5, 0.5, 0.5]) - 0.5 * inward
    areas = torch.ones(6).double()
    stress = torch.zeros(6, 3).double()
    stress[:, 2] = -0.25  # OpenFOAM's sign: the fluid drags the body up
    q_times_area = 0.5 * 2.0**2 * 0.3
    for offset in (0.0, 100.0):
        found = integrated_forces(offset - centers[:, 0], stress, inward, areas, speed=2.0, reference_area=0.3)
        torch.testing.assert_close(found.total, torch.tensor([1.0, 0.0, 1.5]).double() / q_times_area)
        torch.testing.assert_close(found.pressure[0], found.drag)
        torch.testing.assert_close(found.friction[2], found.lift)
        assert found.side.abs() < 1e-12
    outward = integrated_forces(
        -centers[:, 0], stress, -inward, areas, speed=2.0, reference_area=0.3, outward_normals=True
    )
    torch.testing.assert_close(outward.total, found.total)


def test_inputs_that_do_not_belong_together():
    n = torch.ones(5)
    with pytest.raises(ValueError, match=r"got \[\(5,\), \(5, 2\), \(5, 3\), \(5,\)\]"):
        integrated_forces(n, torch.ones(5, 2), torch.ones(5, 3), n, speed=1.0, reference_area=1.0)
    with pytest.raises(ValueError, match="must be positive"):
        integrated_forces(n, torch.ones(5, 3), torch.ones(5, 3), n, speed=0.0, reference_area=1.0)


class TestEmbeddedCars:
    CARS = find_cars(DATA)

    def test_the_set_is_small_and_has_all_bodies(self):
        assert list(self.CARS) == ["run_1", "run_2", "run_3", "run_5", "run_6"]
        assert sum(file.stat().st_size for file in DATA.rglob("*") if file.is_file()) < 6e6
        assert (DATA / "README.md").is_file()

    @pytest.mark.parametrize("name", CARS)
    def test_drag_and_lift_are_those_of_the_solver(self, name):
        dataset = PointDataset({name: self.CARS[name]}, {"surface": SURFACE, "volume": VOLUME}, whole=GEOMETRY)
        with PointLoader(dataset, prefetch=0) as loader:
            (sample,) = loader
        found = forces_of(sample)
        assert found.drag.item() == pytest.approx(sample.globals["Cd"], rel=0.02)
        assert found.lift.item() == pytest.approx(sample.globals["Cl"], rel=0.02)
        assert found.side.abs() < 0.005
        areas, normals = sample["surface_areas"], sample["surface_normals"]
        assert areas.min() > 0
        assert (areas[:, None] * normals).sum(0).norm() < 1e-5 * areas.sum()  # a closed surface
        assert sample["volume_fields"].shape == (16384, 5)
        assert int(sample["stl_faces"].max()) < len(sample["stl_coordinates"])


@distributed(ranks=3)
def test_forces_of_a_cut_surface(ranks):
    mesh = domain_mesh()
    torch.manual_seed(0)
    n = 40
    p, stress, normals, areas = torch.randn(n), torch.randn(n, 3), torch.randn(n, 3), torch.rand(n)
    leaf = p.clone().requires_grad_()
    truth = integrated_forces(leaf, stress, normals, areas, speed=3.0, reference_area=0.5)
    (truth.drag + truth.lift).backward()
    cut = [scatter(t, mesh, 0, sizes=[25, 0, 15], requires_grad=t is p) for t in (p, stress, normals, areas)]
    found = integrated_forces(*cut, speed=3.0, reference_area=0.5)
    torch.testing.assert_close(found.total.full_tensor(), truth.total.detach(), rtol=1e-12, atol=1e-12)
    assert found.drag.item() == pytest.approx(truth.drag.item(), rel=1e-12)
    (found.drag + found.lift).backward()
    torch.testing.assert_close(cut[0].grad.full_tensor(), leaf.grad)
