import itertools
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import pytest
import torch


@pytest.fixture(autouse=True)
def _fixed_seeds(monkeypatch):
    """Torch's seed and the count of sessions, so that a test's noise does not depend on the tests before it."""
    torch.manual_seed(0)
    monkeypatch.setattr("lowtide.session.session._ticks", itertools.count())
