"""The picture is written and shows the border between the ranks."""

import numpy as np
import pytest
import torch

from dpzoo.demo.data import ForecastPairs
from dpzoo.demo.figure import Panel, draw
from dpzoo.demo.run import panels_of

pytest.importorskip("matplotlib")


def test_panels_are_in_physical_units():
    pairs = ForecastPairs([9])
    height, temperature = panels_of(pairs, 2, pairs[2][1][0])
    assert (height.unit, temperature.unit) == ("m", "K")
    assert 4500 < height.field.min() < height.field.max() < 6000
    assert np.array_equal(height.truth, height.forecast)
    assert temperature.truth.shape == (60, 120)


def test_png_is_written(tmp_path):
    pairs = ForecastPairs([9])
    panels: list[Panel] = panels_of(pairs, 2, torch.zeros(4, 60, 120))
    draw(tmp_path / "forecast.png", panels, *pairs.coordinates(), [32, 28], "test")
    assert (tmp_path / "forecast.png").read_bytes().startswith(b"\x89PNG")


def test_one_line_per_border(monkeypatch):
    from matplotlib.axes import Axes

    from dpzoo.demo import figure

    lines = []
    monkeypatch.setattr(Axes, "axhline", lambda self, y, **style: lines.append(float(y)))
    axes = figure._pyplot().figure().add_subplot()
    latitude, _ = ForecastPairs([9]).coordinates()
    figure._draw_borders(axes, latitude, [32, 16, 12], label=True)
    assert lines == [-4.5, -52.5]
    assert [text.get_text() for text in axes.texts] == ["rank 0: 32 rows", "rank 1: 16 rows", "rank 2: 12 rows"]
