from pathlib import Path

import pytest

from dpzoo.datapipes import DataError, DataWarning
from dpzoo.datapipes.points import find_cars, k_folds, read_names, select, split_by_fraction, split_by_lists

CARS = {f"run_{i}": Path(f"data/run_{i}.zarr") for i in (1, 2, 3, 5, 10)}


def test_cars_of_every_format_are_found_in_natural_order(tmp_path):
    for name in ("run_10.zarr", "run_2.zarr", "run_3", "run_4", "run_5/run_5.zarr", "images"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "run_3" / "surface_areas.npy").touch()
    (tmp_path / "run_4" / "boundary_4.vtp").touch()
    (tmp_path / "run_5" / "boundary_5.vtp").touch()
    (tmp_path / "run_6.h5").touch()
    found = find_cars(tmp_path)
    assert list(found) == ["run_2", "run_3", "run_4", "run_5", "run_6", "run_10"]
    assert found["run_5"] == tmp_path / "run_5" / "run_5.zarr"  # not its VTK files
    assert found["run_4"] == tmp_path / "run_4"


def test_folders_without_cars_and_doubles_are_refused(tmp_path):
    with pytest.raises(DataError, match="is not a folder"):
        find_cars(tmp_path / "nowhere")
    with pytest.raises(DataError, match="holds no sample"):
        find_cars(tmp_path)
    (tmp_path / "run_1.zarr").mkdir()
    (tmp_path / "run_1.h5").touch()
    with pytest.raises(DataError, match="both called 'run_1'"):
        find_cars(tmp_path)


def test_a_car_missing_from_disk_is_named():
    with pytest.raises(
        DataError, match="training list names run_4, run_7, which are not among the 5 cars found in data"
    ):
        split_by_lists(CARS, ["run_1", "run_4", "run_7"], ["run_2"])
    with pytest.raises(DataError, match="names run_1 twice"):
        select(CARS, ["run_1", "run_2", "run_1"])


def test_a_car_in_both_lists_or_in_none_is_named():
    with pytest.raises(DataError, match="run_2: in the training list and in the validation list"):
        split_by_lists(CARS, ["run_1", "run_2"], ["run_2"])
    with pytest.warns(DataWarning, match="not used: run_5, run_10"):
        training, validation = split_by_lists(CARS, ["run_3", "run_1"], ["run_2"])
    assert (list(training), list(validation)) == (["run_3", "run_1"], ["run_2"])


def test_split_file(tmp_path):
    (tmp_path / "train.txt").write_text("# 436 cars\nrun_1\n\nrun_10  # the last\n")
    assert read_names(tmp_path / "train.txt") == ["run_1", "run_10"]


def test_split_by_fraction_depends_on_names_and_seed_alone():
    training, validation = split_by_fraction(CARS, 0.4, seed=1)
    assert len(validation) == 2
    assert training.keys() | validation.keys() == CARS.keys()
    assert not training.keys() & validation.keys()
    backwards = dict(reversed(CARS.items()))
    assert split_by_fraction(backwards, 0.4, seed=1)[1].keys() == validation.keys()
    assert any(split_by_fraction(CARS, 0.4, seed=s)[1].keys() != validation.keys() for s in range(5))
    assert len(split_by_fraction(CARS, 0.01)[1]) == 1
    assert len(split_by_fraction(CARS, 0.99)[0]) == 1
    with pytest.raises(DataError, match="cannot keep a fraction"):
        split_by_fraction(CARS, 1.0)


@pytest.mark.parametrize("folds", [2, 3, 5])
def test_every_car_is_validated_once(folds):
    parts = list(k_folds(CARS, folds))
    assert sorted(name for _, validation in parts for name in validation) == sorted(CARS)
    assert all(t.keys() | v.keys() == CARS.keys() and not t.keys() & v.keys() for t, v in parts)
    with pytest.raises(DataError, match="choose between 2 and 5"):
        list(k_folds(CARS, 6))
