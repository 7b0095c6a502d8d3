import numpy as np
import pytest

from dpzoo.cli import main
from dpzoo.datapipes import DataError
from dpzoo.datapipes.drivaerml.complete import check_complete
from dpzoo.datapipes.drivaerml.convert import Settings, convert
from dpzoo.datapipes.drivaerml.folder import CarFolder
from dpzoo.datapipes.drivaerml.polygons import area_vectors
from dpzoo.datapipes.points import SURFACE, VOLUME, PointDataset, find_cars, open_source
from dpzoo.datapipes.points.curves import curve_keys
from dpzoo.datapipes.points.dataset import read_part

pyvista = pytest.importorskip("pyvista")
from tests.datapipes import made_vtk  # noqa: E402  (it needs pyvista)


def arrays_of(path):
    source = open_source(path)
    return {name: source.read(name, 0, info.rows) for name, info in source.fields.items()}


def test_area_vectors_of_polygons():
    points = np.array([[0, 0, 5], [2, 0, 5], [2, 1, 5], [0, 1, 5], [1, 2, 5.0]])
    found = area_vectors(points, np.array([0, 3, 8]), np.array([0, 1, 2, 3, 2, 1, 0, 3]))
    np.testing.assert_allclose(found, [[0, 0, 1], [0, 0, -2]], atol=1e-15)
    pentagon = area_vectors(points + 1e6, np.array([0, 5]), np.array([0, 1, 2, 4, 3]))
    np.testing.assert_allclose(pentagon, [[0, 0, 3]], rtol=1e-12, atol=1e-9)


def test_a_folder_gives_the_arrays_of_the_curator(tmp_path):
    path = made_vtk.write_folder(tmp_path / "run_3", 3)
    mesh, air = made_vtk.surface(3), made_vtk.volume(3)
    found = arrays_of(path)
    np.testing.assert_array_equal(found["surface_fields"][:, 0], mesh["pMeanTrim"])
    np.testing.assert_array_equal(found["surface_fields"][:, 1:], mesh["wallShearStressMeanTrim"])
    np.testing.assert_allclose(found["surface_mesh_centers"], mesh.cell_centers().points, atol=1e-6)
    sized = mesh.compute_cell_sizes(length=False, volume=False)["Area"]
    np.testing.assert_allclose(found["surface_areas"], sized, rtol=1e-6)
    assert found["surface_areas"].sum() == pytest.approx(10.0)
    outwards = found["surface_mesh_centers"] - [1, 0.5, 0.5]
    assert ((outwards * found["surface_normals"]).sum(1) < 0).all()  # the polygons look inwards
    np.testing.assert_allclose(np.linalg.norm(found["surface_normals"], axis=1), 1, rtol=1e-6)
    np.testing.assert_array_equal(found["volume_fields"][:, :3], air["UMeanTrim"])
    np.testing.assert_array_equal(found["volume_fields"][:, 3:], np.stack([air["pMeanTrim"], air["nutMeanTrim"]], 1))
    np.testing.assert_allclose(found["volume_mesh_centers"], air.cell_centers().points)
    assert found["stl_areas"].sum() == pytest.approx(10.0)
    corners = found["stl_coordinates"][found["stl_faces"].reshape(-1, 3)]
    np.testing.assert_allclose(corners.mean(1), found["stl_centers"], atol=1e-6)
    assert all(array.dtype == np.float32 for name, array in found.items() if name != "stl_faces")
    attributes = open_source(path).attributes
    assert (attributes["Cd"], attributes["aRef"], attributes["geo_parameters.Vehicle_Length"]) == (0.3, 2.17, 30.5)


class TestConvert:
    def test_shuffled(self, tmp_path):
        for i in (1, 2, 10):
            made_vtk.write_folder(tmp_path / "src" / f"run_{i}", i, parts=2 if i == 2 else 0)
        assert [o.car for o in convert(tmp_path / "src", tmp_path / "dst")] == ["run_1", "run_2", "run_10"]
        assert sorted(path.name for path in (tmp_path / "dst").iterdir()) == ["run_1.zarr", "run_10.zarr", "run_2.zarr"]
        for name, path in find_cars(tmp_path / "dst").items():
            truth, found = arrays_of(tmp_path / "src" / name), arrays_of(path)
            assert truth.keys() == found.keys()
            for cloud in ("surface", "volume"):
                fields = [f for f in truth if f.startswith(cloud)]
                rows = [tuple(map(bytes, parts)) for parts in zip(*(found[f] for f in fields), strict=True)]
                expected = [tuple(map(bytes, parts)) for parts in zip(*(truth[f] for f in fields), strict=True)]
                assert sorted(rows) == sorted(expected)  # whole rows moved together
                assert rows != expected
            for field in (f for f in truth if f.startswith("stl")):
                np.testing.assert_array_equal(found[field], truth[field])
            attributes = open_source(path).attributes
            assert attributes["shuffled"] is True
            assert attributes["volume_fields"] == [
                "UMeanTrim_x",
                "UMeanTrim_y",
                "UMeanTrim_z",
                "pMeanTrim",
                "nutMeanTrim",
            ]
            assert (attributes["Cd"], attributes["lRef"], attributes["stream_velocity"]) == (0.3, 2.8, 38.889)

    @pytest.mark.parametrize("order", ["hilbert", "morton"])
    def test_along_a_curve(self, tmp_path, order):
        made_vtk.write_folder(tmp_path / "run_1", 1)
        list(convert(tmp_path / "run_1", tmp_path / "dst", Settings(order=order, chunk_rows=5)))
        found = arrays_of(tmp_path / "dst" / "run_1.zarr")
        assert (np.diff(curve_keys(found["volume_mesh_centers"], order).astype(float)) > 0).all()
        assert open_source(tmp_path / "dst" / "run_1.zarr").attributes["shuffled"] is False

    def test_it_goes_on_where_it_was_stopped(self, tmp_path, monkeypatch):
        for i in (1, 2):
            made_vtk.write_folder(tmp_path / "src" / f"run_{i}", i)
        from dpzoo.datapipes.drivaerml import convert as module

        original = module.read_geometry

        def stop_at_the_second(file):
            if file.name == "drivaer_2.stl":
                raise KeyboardInterrupt
            return original(file)

        monkeypatch.setattr(module, "read_geometry", stop_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            list(convert(tmp_path / "src", tmp_path / "dst"))
        with pytest.raises(DataError, match=r"run_2.zarr is unfinished"):
            open_source(tmp_path / "dst" / "run_2.zarr")
        monkeypatch.setattr(module, "read_geometry", original)
        stamp = (tmp_path / "dst" / "run_1.zarr" / "zarr.json").stat().st_mtime_ns
        assert [(o.car, o.state) for o in convert(tmp_path / "src", tmp_path / "dst")] == [
            ("run_1", "kept"),
            ("run_2", "written"),
        ]
        assert (tmp_path / "dst" / "run_1.zarr" / "zarr.json").stat().st_mtime_ns == stamp
        (outcome,) = convert(tmp_path / "src", tmp_path / "dst", Settings(order="morton"), ["run_2"])
        assert outcome.state == "failed"
        assert "was converted with other settings" in outcome.reason

    def test_a_car_that_fails_does_not_stop_the_others(self, tmp_path, capsys):
        made_vtk.write_folder(tmp_path / "src" / "run_1", 1, nan=True)
        made_vtk.write_folder(tmp_path / "src" / "run_2", 2)
        assert main(["convert", "drivaer", str(tmp_path / "src"), str(tmp_path / "dst")]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("run_1: failed: ")
        assert "run_1: surface_fields has a value that is not finite, in cell 5" in lines[0]
        assert lines[1] == "run_2: written"
        assert main(["convert", "drivaer", str(tmp_path / "src"), str(tmp_path / "dst"), "--cars", "run_2"]) == 0
        assert capsys.readouterr().out == "run_2: kept\n"

    def test_the_command_says_what_is_missing(self, tmp_path, capsys):
        made_vtk.write_folder(tmp_path / "run_1", 1)
        command = ["convert", "drivaer", str(tmp_path), str(tmp_path / "dst")]
        assert main([*command, "--surface-fields", "p", "wallShearStressMeanTrim"]) == 1
        out = capsys.readouterr().out
        assert "boundary_1.vtp has no cell data p; it has pMeanTrim, wallShearStressMeanTrim, CpMeanTrim" in out
        assert "--surface-fields" in out
        assert main([*command, "--cars", "run_7"]) == 2
        assert "has no car folder run_7; it has run_1" in capsys.readouterr().err
        assert main(["convert", "drivaer", str(tmp_path / "dst"), str(tmp_path / "other")]) == 2
        assert "holds no folder with boundary_*.vtp" in capsys.readouterr().err


class TestDamagedFiles:
    def test_point_data_is_not_taken_for_cell_data(self, tmp_path):
        path = made_vtk.write_folder(tmp_path / "run_1", 1)
        mesh = made_vtk.surface(1).cell_data_to_point_data()
        mesh.save(path / "boundary_1.vtp")
        with pytest.raises(DataError, match=r"boundary_1.vtp has no cell data pMeanTrim.*is point data: convert it"):
            arrays_of(path)

    @pytest.mark.parametrize("file", ["boundary_1.vtp", "volume_1.vtu"])
    @pytest.mark.parametrize("binary", [True, False])
    def test_truncated(self, tmp_path, file, binary):
        path = made_vtk.write_folder(tmp_path / "run_1", 1)
        mesh = made_vtk.surface(1) if file.endswith("vtp") else made_vtk.volume(1)
        mesh.save(path / file, binary=binary)
        whole = (path / file).read_bytes()
        (path / file).write_bytes(whole[: len(whole) // 2])
        dataset = PointDataset({"run_1": path}, {"surface": SURFACE, "volume": VOLUME})
        with pytest.raises(DataError, match=rf"{file}: truncated"):
            read_part(dataset.request(0))
        (path / file).write_bytes(whole[: len(whole) // 2] + whole[len(whole) // 2 + 40 :])  # a hole in the middle
        with pytest.raises(DataError, match=file):
            read_part(dataset.request(0))
        (path / file).write_bytes(b"")
        with pytest.raises(DataError, match=f"{file} is not a VTK XML file"):
            read_part(dataset.request(0))

    @pytest.mark.parametrize("encoded", [True, False])
    @pytest.mark.parametrize("compressor", [0, 2])
    @pytest.mark.parametrize("word", [32, 64])
    def test_appended_data_is_as_long_as_it_says(self, tmp_path, encoded, compressor, word):
        from vtkmodules.vtkIOXML import vtkXMLUnstructuredGridWriter

        writer = vtkXMLUnstructuredGridWriter()
        writer.SetDataModeToAppended()
        writer.SetEncodeAppendedData(encoded)
        writer.SetCompressorType(compressor)
        (writer.SetHeaderTypeToUInt64 if word == 64 else writer.SetHeaderTypeToUInt32)()
        file = tmp_path / "volume_1.vtu"
        writer.SetFileName(str(file))
        writer.SetInputData(made_vtk.volume(1))
        writer.Write()
        check_complete(file)
        whole = file.read_bytes()
        for lost in (1, 4, 100):
            file.write_bytes(whole[:-200] + whole[-200 + lost :] if lost < 100 else whole[:-600] + whole[-300:])
            with pytest.raises(DataError, match=r"volume_1.vtu: by the sizes it states, .* bytes are missing"):
                check_complete(file)

    def test_parts(self, tmp_path):
        path = made_vtk.write_folder(tmp_path / "run_1", 1, parts=3)
        parts = sorted(path.glob("*.part"))
        whole = [part.read_bytes() for part in parts]
        assert "volume_fields" in arrays_of(path)
        assert not list(path.glob(".join-*"))
        (outcome,) = convert(path, tmp_path / "dst", Settings(volume_fields=("q",)))
        assert "run_1: the joined parts of volume_1.vtu has no cell data q" in outcome.reason
        for index, message in (
            (2, r"02.part: truncated \(it does not end with </VTKFile>\)"),
            (1, r"the joined parts of volume_1.vtu .*short: .*volume_1.vtu.01.part: \d+ bytes"),
            (0, r"the joined parts of volume_1.vtu"),
        ):
            parts[index].write_bytes(whole[index][:-50])
            with pytest.raises(DataError, match=message):
                arrays_of(path)
            parts[index].write_bytes(whole[index])
        parts[1].write_bytes(b"")
        with pytest.raises(DataError, match=r"01.part: empty"):
            arrays_of(path)
        parts[1].unlink()
        with pytest.raises(DataError, match=r"parts \['00', '02'\] of volume_1.vtu; one is missing"):
            arrays_of(path)
        parts[2].unlink()
        with pytest.raises(DataError, match=r"00.part: truncated .* or a later part is missing"):
            arrays_of(path)

    def test_files_of_two_cars_in_one_folder(self, tmp_path):
        path = made_vtk.write_folder(tmp_path / "run_1", 1)
        (path / "boundary_2.vtp").touch()
        with pytest.raises(DataError, match=r"files of cars \['1', '2'\]"):
            CarFolder(path)

    def test_no_surface(self, tmp_path):
        path = made_vtk.write_folder(tmp_path / "run_1", 1)
        (path / "boundary_1.vtp").unlink()
        with pytest.raises(DataError, match=r"boundary_1.vtp is not there"):
            open_source(path).fields["surface_areas"]
