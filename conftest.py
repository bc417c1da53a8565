"""Fixtures that several folders share."""

import pytest


@pytest.fixture(scope="session")
def worker_pool():
    """Started worker processes for the whole run; see `tfdist_ext.testing.WorkerPool`."""
    from tfdist_ext.testing import WorkerPool

    with WorkerPool() as pool:
        yield pool
