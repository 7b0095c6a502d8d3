"""A stated sample of the conformance run (`make conformance` does all of it): no failure in the families that are done.

One case in SAMPLE of the entries below, always the same ones, on two ranks. `python -m tests.conformance --op NAME`
runs all cases of an operator.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = 6
OPS = (
    # pointwise
    "add|sub|mul|div|pow|lerp|where|clamp|masked_fill|maximum|eq|isclose|nan_to_num|exp|sigmoid|addcmul",
    "nn.functional.(gelu|silu|softplus|leaky_relu)|to|type_as|float|bfloat16",
    # reduction
    "sum|mean|var|std|var_mean|max|min|amax|amin|argmax|argmin|prod|any|all|norm|logsumexp|count_nonzero|nansum",
    "linalg.vector_norm|nanmean",
    # view
    "view|reshape|flatten|unflatten|permute|transpose|movedim|squeeze|unsqueeze|expand|chunk|split|unbind|select",
    "narrow|stack|cat|roll|flip|repeat|__getitem__",
    # matmul, norm, loss
    "matmul|mm|bmm|addmm|baddbmm|einsum|nn.functional.linear|nn.Linear",
    "softmax|log_softmax|nn.functional.(layer_norm|rms_norm)|nn.LayerNorm",
    "nn.functional.(mse_loss|l1_loss|huber_loss|smooth_l1_loss|cross_entropy|binary_cross_entropy|nll_loss)",
    # random
    "nn.functional.dropout|rand_like|randn_like|bernoulli|normal",
)


@pytest.mark.timeout(240)
def test_sample_of_torch_database_has_no_failure(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.conformance", "--ranks", "2", "--sample", str(SAMPLE)]
    command += ["--build", str(tmp_path), *(part for pattern in OPS for part in ("--op", pattern.replace(".", r"\.")))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    cases = [line for line in done.stdout.splitlines() if " cases in " in line]
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert cases, done.stdout[-2000:]
    assert int(cases[0].split()[0]) > 300, cases[0]
