import subprocess
import sys

import pytest

from dpzoo.testing.torchrun import under_torchrun

pytestmark = pytest.mark.skipif(under_torchrun(), reason="starts torchrun itself")

TESTS = """
import torch
import torch.distributed as dist
from dpzoo.testing import distributed, session_pool

@distributed(ranks=[2, 3])
def test_sum(ranks):
    total = torch.ones(())
    dist.all_reduce(total)
    assert total.item() == ranks

def rank():
    return dist.get_rank()

def test_results_of_all_ranks():
    assert session_pool().run(rank, ranks=2) == [0, 1]

@distributed(ranks=2)
def test_one_rank_fails():
    assert dist.get_rank() == 0, "rank one says no"
"""


def test_the_same_tests_run_in_the_ranks_of_torchrun(tmp_path):
    (tmp_path / "test_launched.py").write_text(TESTS)
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--tee",
        "3",
        "-m",
        "pytest",
        "-q",
    ]
    run = subprocess.run(
        [sys.executable, *command, "-p", "no:cacheprovider", str(tmp_path)], capture_output=True, text=True, timeout=100
    )
    text = run.stdout + run.stderr
    assert run.returncode != 0
    for rank in (0, 1):
        lines = "\n".join(line for line in text.splitlines() if line.startswith(f"[default{rank}]"))
        assert "1 failed, 2 passed, 1 skipped" in lines
        assert "rank one says no" in lines
