import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import pytest
import torch


@pytest.fixture(autouse=True)
def _fixed_seed():
    """A test's random numbers do not depend on the tests before it."""
    torch.manual_seed(0)
