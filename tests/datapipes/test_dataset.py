from dataclasses import replace

import numpy as np
import pytest

from dpzoo.datapipes import DataError
from dpzoo.datapipes.csv_row import read_one_row
from dpzoo.datapipes.points import GEOMETRY, SURFACE, VOLUME, Cloud, PointDataset
from dpzoo.datapipes.points import dataset as dataset_module
from dpzoo.datapipes.points.dataset import read_part
from tests.datapipes.made_cars import ATTRIBUTES, car_arrays, write_npy, write_zarr

CLOUDS = {"surface": replace(SURFACE, points=31), "volume": replace(VOLUME, points=17, weights=(3.0, 1.0, 0.0))}


def one_car(folder, arrays=None, clouds=CLOUDS, whole=GEOMETRY, attributes=ATTRIBUTES):
    path = write_zarr(folder / "run_1.zarr", car_arrays() if arrays is None else arrays, attributes=attributes)
    return PointDataset({"run_1": path}, clouds, whole, seed=5)


def parts(dataset, ranks, epoch=0):
    return [read_part(dataset.request(0, epoch, rank, ranks)) for rank in range(ranks)]


@pytest.mark.parametrize("shuffled", [True, False])
def test_the_ranks_together_hold_what_one_process_draws(tmp_path, shuffled):
    clouds = {name: replace(cloud, weights=None) for name, cloud in CLOUDS.items()}
    dataset = one_car(tmp_path, clouds=clouds, attributes={**ATTRIBUTES, "shuffled": shuffled})
    for epoch in (0, 1):
        (alone,) = parts(dataset, 1, epoch)
        for ranks in (2, 3, 7):
            together = parts(dataset, ranks, epoch)
            for name in (*SURFACE.fields, *VOLUME.fields):
                joined = np.concatenate([part.arrays[name] for part in together])
                np.testing.assert_array_equal(joined, alone.arrays[name])
                assert {part.sizes[name] for part in together} == {tuple(len(part.arrays[name]) for part in together)}
    assert alone.totals == {"surface": 50, "volume": 70}


@pytest.mark.parametrize("block", [1, 4, 1000])
@pytest.mark.parametrize("draw", ["window", "strata"])
def test_rows_of_one_cloud_stay_together(tmp_path, draw, block, monkeypatch):
    monkeypatch.setattr(dataset_module, "BLOCK_ROWS", block)
    arrays = car_arrays()
    dataset = one_car(tmp_path, clouds={"surface": replace(SURFACE, points=31, draw=draw)}, arrays=arrays)
    for epoch in range(4):
        (part,) = parts(dataset, 1, epoch)
        rows = part.arrays["surface_areas"].astype(int)
        for name in SURFACE.fields:
            np.testing.assert_array_equal(part.arrays[name], arrays[name][rows])
        assert draw == "strata" or set(np.diff(rows)) <= {1, -49}


def test_weights_and_replicated_clouds(tmp_path):
    clouds = {"surface": replace(SURFACE, replicated=True), "volume": CLOUDS["volume"]}
    together = parts(one_car(tmp_path, clouds=clouds), 3)
    assert [len(part.arrays["volume_fields"]) for part in together] == [13, 4, 0]
    assert together[2].arrays["volume_fields"].shape == (0, 5)
    assert all(part.sizes["surface_fields"] is None and len(part.arrays["surface_fields"]) == 50 for part in together)
    assert all(part.sizes["stl_faces"] is None and len(part.arrays["stl_faces"]) == 6 for part in together)


def test_all_rows_come_in_the_order_of_the_file(tmp_path):
    (part,) = parts(one_car(tmp_path, clouds={"surface": SURFACE}), 1)
    assert part.arrays["surface_areas"].tolist() == list(range(50))


class TestBadInput:
    def test_a_value_that_is_not_finite_is_named_with_its_row(self, tmp_path):
        arrays = car_arrays()
        arrays["surface_fields"][[20, 33], [1, 2]] = np.nan, np.inf
        path = write_npy(tmp_path / "run_1", arrays)
        dataset = PointDataset({"run_1": path}, {"surface": SURFACE})
        with pytest.raises(DataError, match=r"run_1: surface_fields .* not finite in 2 of rows \[0, 50\), .* row 20"):
            parts(dataset, 1)
        assert len(read_part(dataset.request(0, rank=2, ranks=3)).arrays["surface_fields"]) == 16  # rows 34 to 49
        with pytest.raises(DataError, match="first is row 20"):
            read_part(dataset.request(0, rank=1, ranks=3))

    def test_lengths_that_do_not_match(self, tmp_path):
        arrays = car_arrays()
        arrays["surface_areas"] = arrays["surface_areas"][:-1]
        dataset = one_car(tmp_path, arrays)
        for rank in range(3):
            with pytest.raises(
                DataError, match=r"run_1.zarr: .*'surface' have different lengths .*'surface_areas': 49"
            ):
                read_part(dataset.request(0, rank=rank, ranks=3))

    def test_a_field_that_is_not_there(self, tmp_path):
        dataset = one_car(tmp_path, clouds={"surface": Cloud(("surface_mesh_centers", "surface_cp"))})
        with pytest.raises(DataError, match=r"run_1.zarr has no field 'surface_cp'; it has stl_areas, "):
            parts(dataset, 1)
        with pytest.raises(DataError, match="has no field 'sdf'"):
            parts(replace(dataset, clouds={"surface": SURFACE}, whole=("sdf",)), 1)

    def test_more_points_than_the_file_has(self, tmp_path):
        with pytest.raises(DataError, match=r"run_1.zarr: asked for 51 of 50 rows"):
            parts(one_car(tmp_path, clouds={"surface": replace(SURFACE, points=51)}), 1)

    def test_a_car_that_is_gone(self, tmp_path):
        with pytest.raises(DataError, match=r"run_9.zarr does not exist"):
            parts(PointDataset({"run_9": tmp_path / "run_9.zarr"}, {"surface": SURFACE}), 1)

    def test_a_damaged_chunk_names_the_file(self, tmp_path):
        dataset = one_car(tmp_path)
        chunk = dataset.cars["run_1"] / "surface_areas" / "c" / "0"
        chunk.write_bytes(chunk.read_bytes()[:-9])
        with pytest.raises(DataError, match=r"run_1.zarr"):
            parts(dataset, 1)

    def test_datasets_that_make_no_sense(self, tmp_path):
        with pytest.raises(DataError, match="a dataset of 0 cars"):
            PointDataset({}, CLOUDS)
        with pytest.raises(DataError, match="surface_areas: wanted twice"):
            PointDataset({"run_1": tmp_path}, CLOUDS, whole=("surface_areas",))


def test_forces_beside_a_store_are_read(tmp_path):
    (tmp_path / "run_7").mkdir()
    write_zarr(tmp_path / "run_7" / "run_7.zarr", car_arrays(), attributes={})
    (tmp_path / "run_7" / "force_mom_7.csv").write_text("Cd, Cl\n0.31, -0.05\n")
    dataset = PointDataset({"run_7": tmp_path / "run_7" / "run_7.zarr"}, CLOUDS)
    part = read_part(dataset.request(0, rank=1, ranks=3))
    assert (part.attributes["Cd"], part.attributes["Cl"]) == (0.31, -0.05)


@pytest.mark.parametrize("text", ["", "Cd,Cl\n", "Cd,Cl\n0.3\n", "Cd\n0.3\n0.4\n", "Cd\nabc\n"])
def test_a_csv_that_is_not_one_row_of_numbers(tmp_path, text):
    file = tmp_path / "force_mom_1.csv"
    file.write_text(text)
    with pytest.raises(DataError, match=r"force_mom_1.csv: "):
        read_one_row(file)
