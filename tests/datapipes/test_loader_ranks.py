import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dpzoo.datapipes import DataError, DataWarning
from dpzoo.datapipes.points import GEOMETRY, SURFACE, VOLUME, PointDataset, PointLoader, compute_statistics
from dpzoo.datapipes.points import loader as loader_module
from dpzoo.shard import Replicate, Shard, ShardTensor
from dpzoo.testing import distributed, domain_mesh, expect_error, grid_mesh
from tests.datapipes.folders import folder_of_all_ranks
from tests.datapipes.made_cars import car_arrays, write_npy, write_plain_zarr, write_zarr

CLOUDS = {"surface": replace(SURFACE, points=31), "volume": VOLUME}


def write_cars(folder: Path, mine: bool, count: int = 3, **options) -> dict[str, Path]:
    for i in range(count if mine else 0):
        write_zarr(folder / f"run_{i}.zarr", car_arrays(surface=40 + i, seed=i), **options)
    dist.barrier()
    return {f"run_{i}": folder / f"run_{i}.zarr" for i in range(count)}


@distributed(ranks=[2, 3])
def test_the_ranks_hold_the_samples_of_one_process(ranks):
    mesh = domain_mesh()
    with folder_of_all_ranks() as (folder, mine):
        cars = write_cars(folder, mine)
        weights = (2.0, 1.0, 0.0)[:ranks]
        clouds = {"surface": replace(CLOUDS["surface"], replicated=True), "volume": replace(VOLUME, points=50)}
        for cut in (CLOUDS, {"volume": replace(VOLUME, points=50, weights=weights)}, clouds):
            dataset = PointDataset(cars, cut, whole=GEOMETRY, seed=1)
            alone = replace(dataset, clouds={name: replace(cloud, weights=None) for name, cloud in cut.items()})
            with PointLoader(dataset, mesh) as loader, PointLoader(alone, prefetch=0) as truth:
                for sample, whole in zip(loader.epoch(1), truth.epoch(1), strict=True):
                    assert (sample.name, sample.globals, sample.totals) == (whole.name, whole.globals, whole.totals)
                    assert sample.tensors.keys() == whole.tensors.keys()
                    for name, tensor in sample.tensors.items():
                        assert isinstance(tensor, ShardTensor)
                        assert torch.equal(tensor.full_tensor(), whole[name])
                    if ranks == 3 and len(cut) == 1:
                        assert sample["volume_fields"].spec.sizes[0] == (33, 17, 0)
                    assert sample["volume_fields"].placements == (Shard(0),)
                    assert sample["stl_faces"].placements == (Replicate(),)
                    batch = sample.batched("volume_mesh_centers")
                    assert batch.shape == (1, *whole["volume_mesh_centers"].shape)
                    assert batch.placements == (Shard(1),)


@distributed(ranks=4)
def test_domain_groups_share_a_car_and_data_parallel_ranks_do_not(ranks):
    mesh = grid_mesh((2, 2))
    with folder_of_all_ranks() as (folder, mine):
        dataset = PointDataset(write_cars(folder, mine), {"volume": replace(VOLUME, points=20)})
        seen = []
        with PointLoader(dataset, mesh) as loader, PointLoader(dataset, mesh, last="drop") as dropping:
            assert (len(loader), len(dropping)) == (2, 1)
            for sample in loader.epoch(0):
                seen.append((sample.name, sample.is_repeat, float(sample["volume_fields"].sum())))
            assert len(list(dropping.epoch(0))) == 1
        everyone = [None] * 4
        dist.all_gather_object(everyone, seen)
        assert everyone[0] == everyone[1]
        assert everyone[2] == everyone[3]
        assert {name for name, *_ in everyone[0] + everyone[2]} == {"run_0", "run_1", "run_2"}
        assert [repeat for _, repeat, _ in everyone[0] + everyone[2]] == [False, False, False, True]
        statistics = compute_statistics(dataset, mesh)
        normal = statistics.normalise("volume_fields", sample["volume_fields"])
        assert normal.placements == (Shard(0),)
        whole = statistics.normalise("volume_fields", sample["volume_fields"].full_tensor())
        torch.testing.assert_close(normal.full_tensor(), whole)
        found = statistics.fields["volume_fields"]
        truth = compute_statistics(dataset).fields["volume_fields"]
        assert found.count == truth.count
        np.testing.assert_allclose(found.mean, truth.mean, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(found.m2, truth.m2, rtol=1e-12)
        # A fault of one rank stops the other data-parallel group too.
        if mine:
            np.save(folder / "x.npy", 0)
            arrays = car_arrays()
            arrays["volume_fields"][69] = np.nan  # in the rows of domain rank 1
            write_plain_zarr(folder / "bad.zarr", arrays)
        dist.barrier()
        cars = {"run_0": dataset.cars["run_0"], "bad": folder / "bad.zarr"}
        bad = PointLoader(replace(dataset, cars=cars, clouds={"volume": VOLUME}), mesh, shuffle=False)
        expect_error(
            lambda: next(bad.epoch(0)), DataError, r"bad.zarr: volume_fields .* row 69.*\[met on rank 3\]", mesh
        )
        expect_error(lambda: compute_statistics(bad.dataset, mesh), DataError, r"bad.zarr.*met on rank 3", mesh)
        bad.close()


@distributed(ranks=3)
def test_each_rank_reads_its_share_of_the_file(ranks):
    rows, chunk = 30_000, 500
    with folder_of_all_ranks() as (folder, mine):
        rng = np.random.default_rng(0)
        arrays = {
            "volume_mesh_centers": rng.random((rows, 3)).astype(np.float32),
            "volume_fields": rng.random((rows, 5)).astype(np.float32),
        }
        path = folder / "run_1.zarr"
        if mine:
            write_zarr(path, arrays, chunk_rows=chunk)
        dist.barrier()
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        for cloud, share in ((VOLUME, 1.0), (replace(VOLUME, points=rows // 2), 0.5)):
            with PointLoader(PointDataset({"run_1": path}, {"volume": cloud}), domain_mesh()) as loader:
                (sample,) = loader
            assert sum(len(t.to_local()) for t in sample.tensors.values()) == 2 * rows * share / ranks
            assert loader.bytes_read >= 0.95 * share * size / ranks
            assert loader.bytes_read <= share * size / ranks + 3 * chunk * 8 * 4  # chunks at the ends, and the index
        before = loader.bytes_read
        strata = replace(VOLUME, points=rows // 10, draw="strata")
        with PointLoader(PointDataset({"run_1": path}, {"volume": strata}), domain_mesh()) as loader:
            list(loader)
        assert before < loader.bytes_read <= size / ranks + 3 * chunk * 8 * 4


@distributed(ranks=2)
def test_a_bad_file_stops_all_ranks_and_the_next_car_still_works(ranks):
    mesh = domain_mesh()
    with folder_of_all_ranks() as (folder, mine):
        good = write_cars(folder, mine, 1)["run_0"]
        if mine:
            broken = write_plain_zarr(folder / "short.zarr", {**car_arrays(), "surface_areas": np.ones(3, np.float32)})
            broken = write_plain_zarr(folder / "hole.zarr", car_arrays())
            (broken / "surface_fields" / "c" / "6" / "0").unlink()  # rows 48, 49: rank 1 alone meets it
            broken = write_zarr(folder / "unfinished.zarr", car_arrays())
            text = (broken / "zarr.json").read_text()
            (broken / "zarr.json").write_text(text.replace("finished", "writing"))
        dist.barrier()
        for name, message in (
            ("short", r"short.zarr: .* different lengths .*\[met on rank 0, 1\]"),
            ("hole", r"hole.zarr: chunk surface_fields/c/6/0 is missing.*\[met on rank 1\]"),
            ("unfinished", r"unfinished.zarr is unfinished .*\[met on rank 0, 1\]"),
            ("absent", r"absent.zarr does not exist \[met on rank 0, 1\]"),
        ):
            cars = {name: folder / f"{name}.zarr", "run_0": good}
            with PointLoader(PointDataset(cars, {"surface": SURFACE}), mesh, shuffle=False) as loader:
                expect_error(lambda loader=loader: next(loader.epoch(0)), DataError, message)
                assert next(loader.epoch(0, start=1))["surface_fields"].shape == (40, 4)


@distributed(ranks=2)
def test_ranks_that_see_different_things_are_told(ranks):
    mesh = domain_mesh()
    with folder_of_all_ranks() as (folder, _):
        arrays = car_arrays(surface=40 + 2 * dist.get_rank())
        own = write_npy(folder / f"rank_{dist.get_rank()}" / "run_1", arrays)  # as if a copy were not up to date
        dataset = PointDataset({"run_1": own}, {"surface": SURFACE})
        with PointLoader(dataset, mesh) as loader:
            expect_error(lambda: next(iter(loader)), DataError, "see different data")
        other = replace(dataset, seed=dist.get_rank())
        expect_error(lambda: PointLoader(other, mesh), DataError, "see different data")
        expect_error(lambda: PointLoader(dataset, grid_mesh((1, 2)), domain_axis="x"), DataError, "none of them is 'x'")


@distributed(ranks=2)
def test_vtk_files_are_read_by_one_rank_and_sent(ranks):
    pytest.importorskip("pyvista")
    from tests.datapipes.made_vtk import write_folder

    mesh = domain_mesh()
    loader_module._told_of_one_reader = False
    with folder_of_all_ranks() as (folder, mine):
        if mine:
            write_folder(folder / "run_1", 1)
            write_folder(folder / "run_2", 2, nan=True)
        dist.barrier()
        cars = {f"run_{i}": folder / f"run_{i}" for i in (1, 2)}
        clouds = {
            "surface": replace(SURFACE, points=13, weights=(1.0, 2.0)),
            "volume": replace(VOLUME, replicated=True),
        }
        dataset = PointDataset(cars, clouds, whole=("stl_faces",))
        alone = replace(dataset, clouds={**clouds, "surface": replace(clouds["surface"], weights=None)})
        with (
            PointLoader(dataset, mesh, shuffle=False) as loader,
            PointLoader(alone, shuffle=False, prefetch=0) as truth,
        ):
            with pytest.warns(DataWarning, match=r"run_1: .*dpzoo convert drivaer"):
                sample = next(loader.epoch(0))
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                whole = next(truth.epoch(0))
            assert sample["surface_fields"].spec.sizes[0] == (4, 9)
            assert sample["volume_fields"].placements == (Replicate(),)
            assert (sample.globals, sample.totals) == (whole.globals, whole.totals)
            for name, tensor in sample.tensors.items():
                assert torch.equal(tensor.full_tensor(), whole[name])
            assert (loader.bytes_read > 0) == (dist.get_rank() == 0)
            second = loader.epoch(0, start=1)
            expect_error(lambda: next(second), DataError, r"run_2: .*surface_fields .* not finite .*\[met on rank 0\]")
        found = compute_statistics(replace(dataset, cars={"run_1": cars["run_1"]}), mesh, ["surface_areas"])
        assert found.fields["surface_areas"].count == whole.totals["surface"]
