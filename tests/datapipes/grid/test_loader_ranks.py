import shutil
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dpzoo.datapipes import DataError
from dpzoo.datapipes.grid import (
    GridDataset,
    GridLoader,
    Invariants,
    Stream,
    compute_grid_statistics,
    describe,
    write_fields,
)
from dpzoo.datapipes.grid.part import read_part
from dpzoo.datapipes.grid.read import Box
from dpzoo.shard import Shard, ShardTensor
from dpzoo.testing import distributed, domain_mesh, expect_error, grid_mesh
from tests.datapipes.folders import folder_of_all_ranks
from tests.datapipes.grid.made_grids import CHANNELS, GRID, LATITUDE, LONGITUDE, fields, hours, write_channels

BLOCK = {"rows": "y", "columns": "x"}


def write(folder, mine, name="a.zarr", data=None, frames=5):
    if mine:
        write_channels(folder / name, hours(frames), data=data, rows=2)
    dist.barrier()
    return folder / name


def make_dataset(path):
    states = Stream((path,), ("z500", "t850"), offsets=(-1, 0), masked=True)
    return GridDataset(
        {"past": states, "next": replace(states, offsets=(1,), masked=False)},
        invariants=Invariants((path,), ("latitude", "longitude")),
        cos_zenith=(0,),
        seed=4,
    )


def assert_same_samples(dataset, mesh, sizes, **options):
    with GridLoader(dataset, mesh, **options) as loader, GridLoader(dataset, prefetch=0) as truth:
        assert loader.layout.sizes == sizes
        for sample, whole in zip(loader.epoch(1), truth.epoch(1), strict=True):
            assert (sample.time, sample.channels) == (whole.time, whole.channels)
            assert sample.tensors.keys() == whole.tensors.keys() == {"past", "next", "invariants", "cos_zenith"}
            for name, tensor in [*sample.tensors.items(), *((f"{n}/mask", t) for n, t in sample.masks.items())]:
                expected = whole.masks["past"] if name == "past/mask" else whole[name]
                assert isinstance(tensor, ShardTensor)
                assert tensor.spec.sizes == sizes
                assert torch.equal(tensor.full_tensor(), expected), name
            assert sample.stacked("past").shape == (1, 4, *GRID)
            assert torch.equal(sample.stacked("past").full_tensor(), whole.stacked("past"))
    return sample


@distributed(ranks=[2, 3])
def test_the_ranks_hold_the_samples_of_one_process(ranks):
    mesh = domain_mesh()
    with folder_of_all_ranks() as (folder, mine):
        data = fields(hours(5))
        data[0, 3, 1, 1] = np.nan  # a frame that only "past" needs
        path = write(folder, mine, data=data)
        dataset = make_dataset(path)
        dataset = replace(dataset, statistics=compute_grid_statistics(dataset, mesh))
        sample = assert_same_samples(dataset, mesh, ((6, 6),) if ranks == 2 else ((4, 4, 4),), multiple=2)
        assert sample["past"].placements == (Shard(2),)
        assert sample.batched("past").placements == (Shard(3),)
        columns = ((6, 4),) if ranks == 2 else ((4, 4, 2),)
        assert assert_same_samples(dataset, mesh, columns, cut={"domain": "x"}, multiple=2)["next"].placements == (
            Shard(3),
        )
        cropped = replace(dataset, crop=(0, 4, 0, 10))
        with GridLoader(cropped, mesh, multiple=1 if ranks == 2 else 2) as loader:
            assert loader.layout.sizes == (((2, 2),) if ranks == 2 else ((2, 2, 0),))
            assert next(iter(loader))["past"].full_tensor().shape == (2, 2, 4, 10)
        # The statistics are those of one process and of the plain arrays, pixels without a value left out.
        alone = compute_grid_statistics(replace(dataset, statistics=None))
        for stream in ("past", "next", "invariants"):
            assert alone.channels(stream) == dataset.statistics.channels(stream)
            for channel, moments in alone.streams[stream].items():
                found = dataset.statistics.streams[stream][channel]
                assert found.count == moments.count
                np.testing.assert_allclose([found.mean, found.std], [moments.mean, moments.std], rtol=1e-12)
        values = data[:4, 3].astype(np.float64)
        found = dataset.statistics.streams["past"]["z500"]
        assert found.count == np.isfinite(values).sum() == values.size - 1
        np.testing.assert_allclose([found.mean[0], found.std[0]], [np.nanmean(values), np.nanstd(values)], rtol=1e-12)
        normal = dataset.statistics.denormalise("past", sample["past"])
        assert isinstance(normal, ShardTensor)


@distributed(ranks=4)
def test_two_axes_cut_a_grid_and_data_parallel_ranks_take_other_samples(ranks):
    with folder_of_all_ranks() as (folder, mine):
        dataset = make_dataset(write(folder, mine))
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("columns", "rows"))
        sample = assert_same_samples(dataset, both, ((6, 4), (6, 6)), cut=BLOCK, multiple=2)
        assert sample["next"].placements == (Shard(3), Shard(2))
        mesh = grid_mesh((2, 2))
        with GridLoader(dataset, mesh) as loader, GridLoader(dataset, mesh, last="drop") as dropping:
            assert (len(loader), len(dropping)) == (2, 1)
            seen = [(str(s.time), s.is_repeat, float(s["past"].sum())) for s in loader.epoch(0)]
        everyone = [None] * 4
        dist.all_gather_object(everyone, seen)
        assert everyone[0] == everyone[1] != everyone[2] == everyone[3]
        assert {time for time, *_ in everyone[0] + everyone[2]} == {str(t) for t in hours(3, 1)}
        assert [repeat for _, repeat, _ in everyone[0] + everyone[2]] == [False, False, False, True]
        # Other samples than those of an outer mesh of other ranks: a domain mesh that is not the first.
        data = fields(hours(5))
        data[4, 0, 11, 0] = np.nan
        bad = replace(make_dataset(write(folder, mine, "bad.zarr", data)), seed=0)
        with GridLoader(bad, mesh, shuffle=False) as loader:
            samples = loader.epoch(0)
            next(samples)
            told = r"bad.zarr: t850 at 2022-01-01T00:00:00 has 1 pixels .*row 11, column 0.*\[met on rank 1\]"
            expect_error(lambda: next(samples), DataError, told, mesh)
        expect_error(lambda: compute_grid_statistics(bad, mesh, ["next"]), DataError, r"bad.zarr: t850 at 2022", mesh)


@distributed(ranks=2)
def test_faults_of_one_rank_stop_all(ranks):
    mesh, rank = domain_mesh(), dist.get_rank()
    with folder_of_all_ranks() as (folder, mine):
        path = write(folder, mine)
        dataset = make_dataset(path)
        absent = make_dataset(path if rank == 0 else folder / "absent.zarr")
        expect_error(lambda: GridLoader(absent, mesh), DataError, r"absent.zarr does not exist \[met on rank 1\]")
        other = replace(dataset, seed=rank)
        expect_error(lambda: GridLoader(other, mesh), DataError, "see different data")
        older = replace(dataset, stop=hours(5)[3 + rank])  # as if one rank saw a copy that is not up to date
        expect_error(lambda: GridLoader(older, mesh), DataError, "see different data")
        expect_error(lambda: GridLoader(dataset, mesh, cut=BLOCK), DataError, "none of them is 'rows'")
        expect_error(lambda: GridLoader(dataset, mesh, multiple=4), DataError, r"dim x: 10 .* not divisible by 4")
        lost = folder / "a.zarr" / "HRRR" / "c" / "4" / "0" / "5"
        if mine:
            (lost / "0").unlink()
        dist.barrier()
        with GridLoader(dataset, mesh, shuffle=False) as loader:
            samples = loader.epoch(0, start=2)
            expect_error(lambda: next(samples), DataError, r"chunk HRRR/c/4/0/5/0 is missing .*\[met on rank 1\]")
            next(loader.epoch(0, start=1))


@distributed(ranks=2)
def test_each_rank_reads_its_share_and_holds_no_more(ranks):
    with folder_of_all_ranks() as (folder, mine):
        data = np.random.default_rng(0).standard_normal((2, 4, 256, 192)).astype(np.float32)
        if mine:
            group = write_channels(folder / "a.zarr", hours(2), data=data, rows=16)
            for name in ("latitude", "longitude"):  # of another grid
                shutil.rmtree(group / name)
        dist.barrier()
        dataset = GridDataset({"x": Stream((folder / "a.zarr",))})
        mesh = domain_mesh()
        with GridLoader(dataset, mesh, multiple=4, prefetch=0) as loader, GridLoader(dataset, prefetch=0) as alone:
            for sample in loader:
                assert sample["x"].to_local().numel() == data[0].size // 2
            next(alone.epoch(0))  # imports are not the samples' memory
            alone.bytes_read = 0
            peaks = []
            for each in (loader, alone):
                tracemalloc.start()
                list(each.epoch(1))
                peaks.append(tracemalloc.get_traced_memory()[1])
                tracemalloc.stop()
            assert 0.49 * 2 * alone.bytes_read < loader.bytes_read < 0.51 * 2 * alone.bytes_read
            assert peaks[0] < 0.6 * peaks[1]


@distributed(ranks=4)
def test_ranks_write_their_blocks_of_one_store(ranks):
    xarray = pytest.importorskip("xarray")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    with folder_of_all_ranks() as (folder, mine):
        dataset = make_dataset(write(folder, mine))
        with GridLoader(dataset, mesh, cut=BLOCK, multiple=2, shuffle=False) as loader:
            sample = next(iter(loader))
            names, times = sample.channels["past"], sample.times["past"]
            out = folder / "forecast.zarr"
            write_fields(out, sample["past"], names, times, loader.layout, mesh, LATITUDE, LONGITUDE)
            expect_error(
                lambda: write_fields(out, sample["past"], names, times, loader.layout, mesh),
                DataError,
                r"forecast.zarr exists: .*met on rank 0",
            )
            expect_error(
                lambda: write_fields(out, sample["past"], names[:1], times, loader.layout, mesh),
                DataError,
                "1 channels",
            )
        index = GridDataset({"x": Stream((out,), ("t850", "z500"))}).index
        part = read_part(index.request(1, Box(0, GRID[0], 0, GRID[1])))
        assert index.times.tolist() == times.tolist()
        np.testing.assert_array_equal(part.arrays["x"][0], fields(hours(5))[1, [0, 3]])
        assert set(describe(out).chunks) == {(6, 6)}
        with xarray.open_zarr(out, consolidated=False) as opened:
            chosen = opened["fields"].sel(channel="z500", time=times[0].astype("datetime64[ns]"), latitude=LATITUDE[3])
            np.testing.assert_array_equal(chosen.values, fields(hours(5))[0, CHANNELS.index("z500"), 3])
