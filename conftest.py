"""Fixtures that several folders share."""

import gc

import pytest


@pytest.fixture(scope="session")
def worker_pool():
    """Started worker processes for the whole run; see `tfdist_ext.testing.WorkerPool`."""
    from tfdist_ext.testing import WorkerPool

    with WorkerPool() as pool:
        yield pool


def pytest_collection_finish():
    """Hides what was imported from the garbage collector, which `clear_session` calls before every test: 0.5 s each."""
    gc.collect()
    gc.freeze()
