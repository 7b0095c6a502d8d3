from dataclasses import replace

import numpy as np
import pytest

from dpzoo.datapipes import DataError
from dpzoo.datapipes.grid import GridDataset, GridLoader, Invariants, Storms, Stream, describe, write_storms
from dpzoo.datapipes.grid.storms import CHANNELS, alive, frame

SMALL = Storms(rows=48, columns=64, frames=3, births=60, seed=1)


def test_frames_are_a_function_of_the_seed(tmp_path):
    first = frame(SMALL, 2)
    np.testing.assert_array_equal(first, frame(SMALL, 2))
    np.testing.assert_array_equal(first, frame(replace(SMALL, frames=50), 2))
    assert not np.array_equal(first, frame(replace(SMALL, seed=2), 2))
    pieces = [frame(SMALL, 2, top, bottom) for top, bottom in ((0, 7), (7, 40), (40, 48))]
    np.testing.assert_array_equal(np.concatenate(pieces, 1), first)


def test_cells_drift_grow_and_decay():
    storms = replace(SMALL, rows=200, columns=300)
    cells = [alive(storms, n) for n in range(3)]
    # A cell is known by its strength, which it keeps.
    shared = set(cells[0].strength) & set(cells[1].strength)
    assert len(shared) > 5
    assert len(shared) < len(cells[0].strength)  # some died
    assert len(set(cells[1].strength) - set(cells[0].strength)) > 2  # some were born
    before = {s: (x, age) for s, x, age in zip(cells[0].strength, cells[0].x, cells[0].age, strict=True)}
    after = {s: (x, age) for s, x, age in zip(cells[1].strength, cells[1].x, cells[1].age, strict=True)}
    for s in shared:
        assert after[s][1] > before[s][1]
        assert 0.09 < (after[s][0] - before[s][0]) / storms.minutes < 1.11  # km per minute, eastwards
    # Persistence is a bad forecast, and a worse one of two steps.
    a, b, c = (frame(storms, n)[0] for n in range(3))
    assert 0 < np.square(b - a).mean() < np.square(c - a).mean()


def test_the_store_reads_like_any_other(tmp_path):
    write_storms(tmp_path / "storms.zarr", SMALL, slabs=4)
    info = describe(tmp_path / "storms.zarr")
    assert tuple(n for n in info.channels if n != "orography") == CHANNELS
    assert (info.grid, info.chunks) == ((48, 64), ((12, 64),))
    stream = Stream((tmp_path / "storms.zarr",), log1p=("lightning",))
    dataset = GridDataset(
        {"past": stream, "next": replace(stream, offsets=(1,))},
        invariants=Invariants((tmp_path / "storms.zarr",), ("orography", "latitude", "longitude")),
        cos_zenith=(0,),
    )
    with GridLoader(dataset, multiple=16, shuffle=False) as loader:
        samples = list(loader)
    assert len(samples) == 2
    for number, sample in enumerate(samples):
        made = frame(SMALL, number + 1)
        made[2] = np.log1p(made[2])
        np.testing.assert_allclose(sample["next"][0], made, rtol=1e-6)
    rain, brightness, lightning = sample["next"][0]
    assert rain.min() == 0 and 20 < rain.max() <= 75
    assert 190 <= brightness.min() < 250 < brightness.max() < 300
    assert lightning.min() == 0 < lightning.max()
    assert sample["invariants"][0].max() > 2000
    with pytest.raises(DataError, match=r"storms.zarr exists and it was made with"):
        write_storms(tmp_path / "storms.zarr", replace(SMALL, seed=5))
    with pytest.raises(DataError, match="no point, no time"):
        Storms(rows=0)
