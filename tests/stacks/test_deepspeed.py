"""DeepSpeed's ZeRO on two ranks, beside the same training without Lowtide. Real processes, gloo on this machine."""

from __future__ import annotations

import os
import sys

import pytest
import torch
import torch.distributed as dist
from together import BATCH, loss_of, mlp

import lowtide
from ranks import on_two_ranks

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

METHODS = {"plain": None, "lossless": "lossless", "auto": "auto"}


def _zero(stage: int, method: str | None) -> dict[str, object]:
    """Three steps; losses and weights, and every saved tensor as ``(op, slot, state, shape)``."""
    import deepspeed

    model = mlp()
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": BATCH, "zero_optimization": zero}
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    handle = None if method is None else lowtide.attach(engine.module, method, min_numel=0)
    losses = []
    for step in range(3):
        loss = loss_of(engine, 2 * step + dist.get_rank())
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().clone())
    report = None if handle is None else handle.report()
    if handle is not None:
        handle.remove()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
        weights = [p.detach().clone() for p in engine.module.parameters()]
    sites = [] if report is None else [(s.site.op, s.site.slot, s.state, tuple(s.shape)) for s in report.sites]
    stored = None if report is None else (report.plain_nbytes, report.stored_nbytes)
    return {"losses": losses, "weights": weights, "sites": sites, "stored": stored}


def _on_each_rank(rank: int) -> dict[str, object]:
    os.environ.update(DS_ACCELERATOR="cpu", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    import deepspeed

    # Shared memory for collectives would be compiled first, for minutes; gloo serves as well.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed("gloo")
    return {f"{stage} {name}": _zero(stage, method) for stage in (1, 2, 3) for name, method in METHODS.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_two_ranks(_on_each_rank, tmp_path_factory.mktemp("zero"))


def _check(ranks, stage):
    for rank in ranks:
        plain, lossless, auto = (rank[f"{stage} {name}"] for name in METHODS)
        for what in ("losses", "weights"):
            assert all(torch.equal(a, b) for a, b in zip(lossless[what], plain[what], strict=True))
        assert torch.equal(auto["losses"][0], plain["losses"][0])  # the forward is exact
        assert not torch.equal(auto["weights"][0], plain["weights"][0])
        saved, stored = auto["stored"]
        assert stored < saved / 3
        packed = [(op, shape) for op, _, state, shape in auto["sites"] if state == "compressed"]
        assert packed
        assert all(shape[0] == BATCH for _, shape in packed)  # activations, and no weight
    assert all(torch.equal(a, b) for a, b in zip(*[rank[f"{stage} auto"]["weights"] for rank in ranks], strict=True))


@pytest.mark.stack("DeepSpeed", "ZeRO stages 1 and 2: gradients and optimizer states in parts")
@pytest.mark.parametrize("stage", [1, 2])
def test_parts_of_gradients_and_states(ranks, stage):
    _check(ranks, stage)


@pytest.mark.stack("DeepSpeed", "ZeRO stage 3: weights are gathered for a layer and let go, and never packed")
def test_parts_of_weights(ranks):
    _check(ranks, 3)
