"""Fixtures shared by all tests."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from workers import WorkerPool


@pytest.fixture(scope="session")
def pool() -> WorkerPool:
    return WorkerPool()
