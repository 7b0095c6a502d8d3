"""The verdict of the demo: its exit status follows the losses, and the picture is written either way."""

import pytest
import torch

from dpzoo.demo import run, worker
from dpzoo.demo.worker import RankResult

pytest.importorskip("matplotlib")


def result(rows, history):
    return RankResult(rows, history, 0.5, 1.0, 2**20, 2**21, 1.0, torch.zeros(4, 60, 120))


def stand_in(last_loss):
    """In place of starting processes: write what they would, with this loss of the last epoch on the ranks."""

    def spawn(function, arguments, processes):
        folder = arguments[-1]
        if function is worker.plain:
            result(60, [1.0, 0.5]).save(folder / "plain.pt")
        for rank in range(processes) if function is worker.domain_parallel else ():
            result(60 // processes, [1.0, last_loss]).save(folder / f"rank{rank}.pt")

    return spawn


@pytest.mark.parametrize(
    ("precision", "last_loss", "status", "verdict"),
    [
        ("float32", 0.5, 0, "equal to rounding"),
        ("float32", 0.50004, 0, "equal to rounding"),
        ("float32", 0.5001, 1, "NOT EQUAL"),
        ("float64", 0.50004, 1, "NOT EQUAL"),
        ("float32", float("nan"), 1, "NOT EQUAL"),
    ],
)
def test_status_follows_the_losses(precision, last_loss, status, verdict, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(run, "_spawn", stand_in(last_loss))
    assert run.run_demo(2, 2, tmp_path, precision) == status
    printed = capsys.readouterr().out
    assert f"1 process and 2 ranks: {verdict}" in printed
    assert "rank 1 of 2" in printed
    assert (tmp_path / "forecast.png").exists()


def test_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="must be one of float32, float64, not 'float16'"):
        run.run_demo(precision="float16")
