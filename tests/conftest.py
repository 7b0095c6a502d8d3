import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _ranks_end_with_the_session() -> Iterator[None]:
    yield
    # Only a session that ran tasks has imported the pool.
    if pool := sys.modules.get("dpzoo.testing.pool"):
        pool.session_pool().close()
