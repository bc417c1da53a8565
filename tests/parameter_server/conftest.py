"""One cluster for most tests of this folder: what a test kills it starts again."""

import pytest

from tests.parameter_server.cluster import Cluster


@pytest.fixture(scope="session")
def cluster():
    """A chief, two workers and a ps."""
    with Cluster(num_workers=2, num_ps=1) as running:
        yield running
