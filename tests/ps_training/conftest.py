"""A process that is the chief of a cluster inside itself, shared by the tests of this folder."""

import pytest

from tfdist_ext.testing import WorkerPool


def _runner(pool, num_workers, num_ps):
    def run(function, **arguments):
        (result,) = pool.run(
            function,
            num_workers=1,
            devices=1,
            timeout_seconds=150,
            cluster=[num_workers, num_ps],
            **arguments,
        )
        return result

    return run


@pytest.fixture(scope="package")
def chief():
    """Runs a program on the chief of 2 workers and 2 ps."""
    with WorkerPool() as pool:
        yield _runner(pool, 2, 2)


@pytest.fixture(scope="package")
def chief_of_four():
    """Runs a program on the chief of 4 workers and 1 ps."""
    with WorkerPool() as pool:
        yield _runner(pool, 4, 1)
