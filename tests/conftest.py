import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator

import pytest

if "RANK" in os.environ:
    # Processes started by torchrun would tidy up each other's temporary folders.
    os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.mkdtemp(prefix=f"dpzoo-rank{os.environ['RANK']}-")
    atexit.register(shutil.rmtree, os.environ["PYTEST_DEBUG_TEMPROOT"], ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def _ranks_end_with_the_session() -> Iterator[None]:
    yield
    # Only a session that ran tasks has imported the pool.
    if pool := sys.modules.get("dpzoo.testing.pool"):
        pool.session_pool().close()
