import shutil

import numpy as np
import pytest
import zarr

from dpzoo.datapipes import DataError
from dpzoo.datapipes.points import open_source
from dpzoo.datapipes.points.zarr_source import MARKER
from dpzoo.datapipes.points.zarr_writer import ZarrWriter, state_of
from tests.datapipes.made_cars import ATTRIBUTES, car_arrays, write_hdf5, write_npy, write_plain_zarr, write_zarr


def write(kind, folder, arrays):
    if kind == "hdf5":
        pytest.importorskip("h5py")
        return write_hdf5(folder / "run_1.h5", arrays)
    if kind == "npy":
        return write_npy(folder / "run_1", arrays)
    if kind == "zarr":
        return write_zarr(folder / "run_1.zarr", arrays)
    return write_plain_zarr(folder / "run_1.zarr", arrays, int(kind[-1]))


KINDS = ["zarr", "zarr2", "zarr3", "npy", "hdf5"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_rows_asked_for(kind, tmp_path):
    arrays = car_arrays()
    source = open_source(write(kind, tmp_path, arrays))
    assert set(source.fields) == set(arrays)
    assert all(
        source.fields[n][:2] == (len(a), a.shape[1:]) and source.fields[n].dtype == a.dtype for n, a in arrays.items()
    )
    assert {key: source.attributes[key] for key in ATTRIBUTES} == ATTRIBUTES
    for name, array in arrays.items():
        for start, stop in ((0, len(array)), (1, 2), (2, 2)):
            np.testing.assert_array_equal(source.read(name, start, stop), array[start:stop])
    source.close()


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_chunks_of_the_rows_are_read(kind, tmp_path):
    arrays = {"volume_fields": np.random.default_rng(0).random((4096, 5)).astype(np.float32)}
    path = write(kind, tmp_path, arrays)
    sizes = []
    for start, stop in ((0, 4096), (1024, 2048), (1020, 1030)):
        source = open_source(path)
        source.read("volume_fields", start, stop)
        sizes.append(source.bytes_read)
        source.close()
    assert sizes[0] >= 0.8 * arrays["volume_fields"].nbytes  # random numbers hardly shrink: all of them were counted
    # zarr's shards have an index beside the chunks, read once per file (16 chunks here).
    assert sizes[1] == pytest.approx(sizes[0] / 4, rel=0.05)
    assert sizes[2] < sizes[0] / 20


class TestUnfinished:
    def test_a_store_whose_writer_was_stopped_is_recognised_and_replaced(self, tmp_path):
        arrays, path = car_arrays(), tmp_path / "run_1.zarr"
        arrays["volume_fields"][3] = np.nan
        with pytest.raises(DataError, match="not finite, in cell 3"):
            write_zarr(path, arrays)
        arrays["volume_fields"][3] = 0
        assert state_of(path) == {"state": "writing"}
        with pytest.raises(DataError, match=r"run_1.zarr is unfinished .* run the same `dpzoo convert` again"):
            open_source(path)
        write_zarr(path, arrays)
        assert set(open_source(path).fields) == set(arrays)

    def test_a_finished_or_foreign_store_is_not_overwritten(self, tmp_path):
        write_zarr(tmp_path / "a.zarr", car_arrays())
        write_plain_zarr(tmp_path / "b.zarr", car_arrays())
        for name in ("a.zarr", "b.zarr"):
            with pytest.raises(DataError, match=f"{name} exists and is no unfinished store"):
                write_zarr(tmp_path / name, car_arrays())
        assert state_of(tmp_path / "c.zarr") is None

    @pytest.mark.parametrize("kind", ["zarr", "zarr2", "zarr3"])
    def test_a_missing_chunk_is_not_read_as_zeros(self, kind, tmp_path):
        path = write(kind, tmp_path, car_arrays(surface=300))
        chunk = {"zarr": "c/1/0", "zarr2": "2.0", "zarr3": "c/2/0"}[kind]
        (path / "surface_fields" / chunk).unlink()
        source = open_source(path)
        source.read("surface_fields", 0, 8)
        first = 128 if kind == "zarr" else 16
        assert not zarr.open_group(path, mode="r")["surface_fields"][first : first + 8].any()  # what zarr makes of it
        with pytest.raises(DataError, match=rf"run_1.zarr: chunk surface_fields/{chunk} is missing"):
            source.read("surface_fields", 0, 300)

    def test_chunks_of_zeros_are_written(self, tmp_path):
        path = write_zarr(tmp_path / "run_1.zarr", {"volume_fields": np.zeros((20, 5), np.float32)})
        assert not open_source(path).read("volume_fields", 0, 20).any()

    def test_a_folder_without_metadata_is_no_store(self, tmp_path):
        path = write_zarr(tmp_path / "run_1.zarr", car_arrays())
        (path / "zarr.json").unlink()
        with pytest.raises(DataError, match="not a readable zarr group"):
            open_source(path)

    def test_only_what_is_known_to_be_unfinished_is_replaced(self, tmp_path):
        (tmp_path / "a.zarr").mkdir()
        write_zarr(tmp_path / "a.zarr", car_arrays())  # empty
        (tmp_path / "b.zarr").mkdir()
        (tmp_path / "b.zarr" / "thesis.tex").touch()
        with pytest.raises(DataError, match=r"b.zarr exists and is no unfinished store"):
            write_zarr(tmp_path / "b.zarr", car_arrays())
        assert (tmp_path / "b.zarr" / "thesis.tex").exists()


def test_damaged_files_are_named(tmp_path):
    npy = write_npy(tmp_path / "run_1", car_arrays())
    whole = (npy / "volume_fields.npy").read_bytes()
    (npy / "volume_fields.npy").write_bytes(whole[:-100])
    with pytest.raises(DataError, match=r"volume_fields.npy is not a complete .npy file"):
        open_source(npy)
    pytest.importorskip("h5py")
    h5 = write_hdf5(tmp_path / "run_2.h5", car_arrays())
    h5.write_bytes(h5.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"run_2.h5 is not a complete HDF5 file"):
        open_source(h5)
    store = write_plain_zarr(tmp_path / "run_3.zarr", car_arrays())
    shutil.rmtree(store / "surface_fields")
    assert "surface_fields" not in open_source(store).fields
    with pytest.raises(DataError, match="does not exist"):
        open_source(tmp_path / "run_4.zarr")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(DataError, match="is not a sample"):
        open_source(tmp_path / "notes.txt")


def test_contiguous_hdf5_counts_its_rows(tmp_path):
    pytest.importorskip("h5py")
    source = open_source(write_hdf5(tmp_path / "run_1.h5", car_arrays(), chunk_rows=None))
    source.read("volume_fields", 10, 30)
    assert source.bytes_read == 20 * 5 * 4


def test_the_marker_keeps_the_settings(tmp_path):
    with ZarrWriter(tmp_path / "run_1.zarr", {}, {"order": "hilbert"}) as writer:
        writer.write("surface_areas", np.ones(3, np.float32))
    assert zarr.open_group(tmp_path / "run_1.zarr", mode="r").attrs[MARKER] == {"state": "finished", "order": "hilbert"}
