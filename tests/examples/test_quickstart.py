"""The quickstart scripts agree with one process on any number of ranks, and their handlers in any layout."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dpzoo.shard import Partial, Replicate, Shard, ShardTensor, scatter, strict
from dpzoo.shard.tensor import FUNCTIONS
from dpzoo.shard.traffic import count_traffic
from dpzoo.testing import LAYOUTS, distributed, domain_mesh, expect_error, grid_mesh, layout_sizes, row_mesh
from tests.examples.running import EXAMPLES, load_from

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = EXAMPLES / "quickstart"
SIZES = {
    "vector_addition": 23,
    "dot_product": 23,
    "knn_brute_force": 45,
    "resharding": 45,
    "knn_ring": 45,
    "convolution": 13,
}


def load(name):
    """A script or one of the modules beside it, imported as if it had been started."""
    return load_from("quickstart", name)


def double(*shape, seed=0, grad=False):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_(grad)


def test_every_script_is_listed():
    scripts = {p.stem for p in QUICKSTART.glob("*.py") if "__main__" in p.read_text()}
    assert scripts == {*SIZES, "scatter_vit"}


# ---------------------------------------------------------------------- the scripts
@pytest.mark.parametrize("name", SIZES)
@distributed(ranks=[1, 2, 3])
def test_script_agrees_with_one_process(name, ranks):
    before = FUNCTIONS.get(torch.dot)
    try:
        assert load(name).main(domain_mesh(), SIZES[name])
    finally:
        FUNCTIONS.pop(torch.dot, None)  # the handler of dot_product.py must not answer other tests
        if before is not None:
            FUNCTIONS[torch.dot] = before


@pytest.mark.parametrize("name", ["vector_addition", "dot_product", "knn_brute_force", "resharding", "knn_ring"])
@distributed(ranks=3)
def test_script_agrees_on_a_problem_smaller_than_the_ranks(name):
    test_script_agrees_with_one_process.__wrapped__(name, 3)


@distributed(ranks=2)
def test_a_wrong_result_is_reported_on_every_rank():
    compare, right = load("agreement").compare, double(4)
    for wrong in (right + 1e-8, right * float("nan"), right[:3], torch.full((4,), float("inf"))):
        assert not compare("wrong", domain_mesh(), lambda: {"x": right}, lambda wrong=wrong: {"x": wrong})
    assert not compare("index", domain_mesh(), lambda: {"i": torch.arange(4)}, lambda: {"i": torch.arange(4).flip(0)})
    assert compare("right", domain_mesh(), lambda: {"x": right}, lambda: {"x": right})


# ---------------------------------------------------------------------- the dot product's handler
def check_dot(x, y):
    """Value and gradients of `dot_handler`; x and y hold `double(11)` of seeds 1 and 2 in some layout."""
    dot, (a, b) = load("dot_product"), (double(11, seed=s, grad=True) for s in (1, 2))
    (torch.dot(a, b) * 3).backward()
    product = dot.dot_handler(torch.dot, (), (x, y), {})
    assert product.placements == (Replicate(),) * product.device_mesh.ndim
    torch.testing.assert_close(product.to_local(grad_placements=product.placements), torch.dot(a, b))
    (product * 3).backward()
    for found, expected in zip((x, y), (a, b), strict=True):
        whole = found.grad.full_tensor() if isinstance(found, ShardTensor) else found.grad
        torch.testing.assert_close(whole, expected.grad)
        if isinstance(found, ShardTensor):
            assert found.grad.spec.sizes == found.spec.sizes


@pytest.mark.parametrize("layout", LAYOUTS)
@distributed(ranks=[2, 3])
def test_dot_of_any_shards(layout, ranks):
    mesh, sizes = domain_mesh(), layout_sizes(11, ranks, layout)
    x, y = double(11, seed=1), double(11, seed=2)
    cut_alike = [scatter(t, mesh, sizes=sizes, requires_grad=True) for t in (x, y)]
    check_dot(*cut_alike)
    check_dot(scatter(x, mesh, sizes=sizes, requires_grad=True), scatter(y, mesh, requires_grad=True))
    check_dot(x.clone().requires_grad_(), scatter(y, mesh, sizes=sizes, requires_grad=True))
    check_dot(scatter(x, mesh, sizes=sizes, requires_grad=True), y.clone().requires_grad_())
    check_dot(scatter(x, mesh, dim=(None,), requires_grad=True), scatter(y, mesh, sizes=sizes, requires_grad=True))


@distributed(ranks=4)
def test_dot_on_two_axes_and_on_a_group_that_is_not_the_first():
    x, y = double(11, seed=1), double(11, seed=2)
    mesh = grid_mesh()
    check_dot(*(scatter(t, mesh, dim=(None, 0), requires_grad=True) for t in (x, y)))
    check_dot(scatter(x, mesh, dim=(0, None), requires_grad=True), scatter(y, mesh, dim=(None, 0), requires_grad=True))
    check_dot(*(scatter(t, row_mesh(), sizes=[2, 9], requires_grad=True) for t in (x, y)))


@distributed(ranks=2)
def test_dot_adds_up_partial_values():
    mesh, dot = domain_mesh(), load("dot_product")
    x, y = double(11, seed=1), double(11, seed=2)
    summand = ShardTensor.from_local(x / 2, mesh, [Partial()])
    product = dot.dot_handler(torch.dot, (), (summand, scatter(y, mesh)), {})
    torch.testing.assert_close(product.full_tensor(), x @ y)


@distributed(ranks=2)
def test_dot_of_different_lengths_raises_on_every_rank():
    dot = load("dot_product")
    x, y = scatter(double(11), domain_mesh()), scatter(double(12), domain_mesh())
    expect_error(lambda: dot.dot_handler(torch.dot, (), (x, y), {}), Exception, "11|12")


# ---------------------------------------------------------------------- nearest neighbours
@pytest.mark.parametrize("layout", LAYOUTS)
@distributed(ranks=[2, 3])
def test_brute_force_on_any_shards(layout, ranks):
    knn, mesh = load("knn_brute_force"), domain_mesh()
    x, y = double(17, 3, seed=1, grad=True), double(9, 3, seed=2, grad=True)
    expected = knn.with_gradients(x, y)
    for x_layout, y_layout in ((layout, layout), (layout, "even")):
        xs, ys = (
            scatter(t.detach(), mesh, sizes=layout_sizes(len(t), ranks, name), requires_grad=True)
            for t, name in ((x, x_layout), (y, y_layout))
        )
        with strict():
            found = knn.with_gradients(xs, ys)
        for name, value in found.items():
            torch.testing.assert_close(value.full_tensor(), expected[name], msg=lambda m, name=name: f"{name}: {m}")


@distributed(ranks=3)
def test_points_everywhere_leave_nothing_to_send():
    resharding, mesh = load("resharding"), domain_mesh()
    x, y = double(17, 3, seed=1), double(9, 3, seed=2)
    whole, cut = scatter(x, mesh, dim=(None,)), scatter(y, mesh)
    with count_traffic() as silent, strict():
        resharding.nearest(whole, cut)
    assert silent.calls == 0
    with count_traffic() as loud, strict():
        resharding.nearest(scatter(x, mesh), scatter(y, mesh))
    assert loud.nbytes > 0


@pytest.mark.parametrize("layout", LAYOUTS)
@distributed(ranks=[2, 3])
def test_ring_on_any_shards(layout, ranks):
    knn, mesh = load("knn_ring"), domain_mesh()
    ShardTensor.register_function_handler(knn.nearest, knn.ring_handler)
    x, y = double(11, 3, seed=1), double(7, 3, seed=2)
    x_cut, y_cut = (scatter(t, mesh, sizes=layout_sizes(len(t), ranks, layout)) for t in (x, y))
    for k in (1, 5, 11):  # more than the rows of any shard, and all of them
        for points, queries in ((x_cut, y_cut), (x_cut, y), (x, y_cut), (x_cut, scatter(y, mesh, dim=1))):
            found = knn.nearest(points, queries, k)
            assert found.placements == (Shard(0),)
            assert torch.equal(found.full_tensor(), knn.nearest(x, y, k))


@distributed(ranks=3)
def test_ring_sends_each_shard_of_the_points_once_around():
    knn, mesh = load("knn_ring"), domain_mesh()
    ShardTensor.register_function_handler(knn.nearest, knn.ring_handler)
    x, y = scatter(double(12, 3, seed=1), mesh), scatter(double(900, 3, seed=2), mesh)
    with count_traffic() as traffic:
        knn.nearest(x, y, 2)
    assert (traffic.calls, traffic.nbytes) == (2, 2 * 4 * 3 * 8)  # two steps, four points of three float64


@distributed(ranks=4)
def test_ring_on_a_group_that_is_not_the_first():
    knn = load("knn_ring")
    ShardTensor.register_function_handler(knn.nearest, knn.ring_handler)
    x, y = double(11, 3, seed=1), double(7, 3, seed=2)
    found = knn.nearest(scatter(x, row_mesh(), sizes=[3, 8]), scatter(y, row_mesh()), 4)
    assert torch.equal(found.full_tensor(), knn.nearest(x, y, 4))
    expect_error(lambda: knn.nearest(scatter(x, grid_mesh(), dim=(0, None)), y, 4), ValueError, "mesh has 2")


@distributed(ranks=2)
def test_ring_refuses_more_neighbours_than_points():
    knn = load("knn_ring")
    ShardTensor.register_function_handler(knn.nearest, knn.ring_handler)
    x = scatter(double(5, 3), domain_mesh())
    for k in (0, 6):
        expect_error(lambda k=k: knn.nearest(x, x, k), ValueError, f"k={k} neighbours.*there are 5 points")


# ---------------------------------------------------------------------- from the command line
DISAGREEING = f"""
import sys
sys.path.insert(0, {str(QUICKSTART)!r})
import torch
from agreement import compare
from ranks import launch

def main(mesh, size):
    return compare("it", mesh, lambda: {{"x": torch.ones(size)}}, lambda: {{"x": torch.zeros(size)}})

if __name__ == "__main__":
    sys.exit(launch(main, size=5))
"""


def start(*command):
    outer = ("TORCHELASTIC_", "OMPI_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *command], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """What two commands, run side by side, came to: (exit status, stdout, stderr) of each."""
    script = tmp_path_factory.mktemp("quickstart") / "disagreeing.py"
    script.write_text(DISAGREEING)
    addition = (str(QUICKSTART / "vector_addition.py"), "--size", "9")
    commands = {
        "own ranks": start(str(script), "--ranks", "2"),
        "torchrun": start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *addition),
    }
    try:
        outputs = {name: process.communicate(timeout=100) for name, process in commands.items()}
    finally:
        for process in commands.values():
            process.terminate()  # torchrun passes it on to its ranks
    return {name: (commands[name].returncode, *output) for name, output in outputs.items()}


def test_a_script_starts_its_own_ranks_and_exits_with_one_if_they_disagree(ended):
    status, out, err = ended["own ranks"]
    assert (status, err) == (1, "")
    assert re.search(r"it: differs from one process by: x 1.0e\+00\n *one process .* ms, 2 ranks .* ms", out)


def test_a_script_joins_the_ranks_of_torchrun(ended):
    status, out, err = ended["torchrun"]
    assert status == 0, err
    assert "2 ranks" in out


# ---------------------------------------------------------------------- the tutorial
def test_the_code_in_the_tutorial_is_that_of_the_scripts():
    text = (ROOT / "docs" / "tutorial_new_layer.md").read_text()
    blocks = re.findall(r"<!-- (\w+\.py) -->\n```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 6
    shown = {name: (QUICKSTART / name).read_text() for name, _ in blocks}
    assert {f"{name}.py" for name in SIZES} <= {*shown, "resharding.py"}
    for name, block in blocks:
        for part in block.split("...\n"):  # a line of dots stands for what is left out
            assert part.strip("\n") in shown[name], f"{name} does not contain:\n{part}"
