"""Test bed for domain-parallel code: ranks that stay up, and a comparison of sharded with unsharded results.

Use it for your own modules:

    from dpzoo.testing import assert_parity, distributed

    @distributed(ranks=[2, 3])
    def test_my_block(ranks):
        assert_parity(MyBlock(), torch.randn(1, 8, 17, 8), placements=2, sizes="uneven")
"""

from dpzoo.testing.assembling import ParityError as ParityError
from dpzoo.testing.decorator import distributed as distributed
from dpzoo.testing.derivatives import with_derivatives as with_derivatives
from dpzoo.testing.expecting import expect_error as expect_error
from dpzoo.testing.expecting import expect_same_error as expect_same_error
from dpzoo.testing.layouts import LAYOUTS as LAYOUTS
from dpzoo.testing.layouts import layout_sizes as layout_sizes
from dpzoo.testing.meshes import column_mesh as column_mesh
from dpzoo.testing.meshes import domain_mesh as domain_mesh
from dpzoo.testing.meshes import grid_mesh as grid_mesh
from dpzoo.testing.meshes import row_mesh as row_mesh
from dpzoo.testing.op_case import OpCase as OpCase
from dpzoo.testing.op_case import op_test as op_test
from dpzoo.testing.op_case import run_case as run_case
from dpzoo.testing.outcome import RankError as RankError
from dpzoo.testing.outcome import RankTimeout as RankTimeout
from dpzoo.testing.parity import assert_parity as assert_parity
from dpzoo.testing.pool import RankPool as RankPool
from dpzoo.testing.pool import session_pool as session_pool
