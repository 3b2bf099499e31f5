"""Training in several processes, beside the same training without Lowtide. Real processes, gloo on this machine."""

from __future__ import annotations

import pytest
import torch
from together import BATCH, FROZEN, mlp, on_each_of_four, on_each_of_two

import lowtide
from ranks import on_ranks


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return on_ranks(on_each_of_two, tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return on_ranks(on_each_of_four, tmp_path_factory.mktemp("four"), 4)


def same(first, second):
    assert list(first) == list(second)
    return all(torch.equal(first[name], second[name]) for name in first)


def assert_like_plain(ranks, case, bound=None, agree=True):
    """``lossless`` is bit-equal, four bits are within their bound, repeat, and depend on the seed; ranks agree."""
    for rank in ranks:
        found = rank[case]
        for what in ("gradients", "weights"):
            assert same(found["lossless"][what], found["plain"][what])
            assert same(found["again"][what], found["four"][what])
            assert not same(found["four"][what], found["plain"][what])
            assert not same(found["other seed"][what], found["four"][what])
        if bound is not None:
            assert_within(found, bound)
    if agree:
        for run in ranks[0][case]:
            assert all(same(rank[case][run]["weights"], ranks[0][case][run]["weights"]) for rank in ranks)


def assert_within(found, bound):
    exact = found["plain"]["gradients"]
    for run in ("four", "other seed"):
        for name, gradient in found[run]["gradients"].items():
            error = (gradient - exact[name]).abs()
            if name.endswith("bias"):
                assert error.max() == 0, name
            else:
                assert (error <= bound[name]).all(), name
                assert error.max() > 0, name


def mean_bound(ranks):
    """Gradients are averaged over ranks, and so is the most that each may err."""
    return {name: sum(rank["bounds"][name] for rank in ranks) / len(ranks) for name in ranks[0]["bounds"]}


def assert_bytes_are_those_of_the_bare_model(ranks, case):
    """No weight is listed, be it gathered from shards or not, and no byte is counted but those of activations."""
    shapes = {"x".join(map(str, s)) for p in mlp().parameters() for s in (p.shape, p.shape[::-1])}
    for rank in ranks:
        found, bare = rank[case], rank["bare"]
        listed = found["lossless"]["bytes"]
        assert not shapes & {*listed["shapes"], *found["four"]["bytes"]["shapes"]}
        assert (listed["plain"], listed["held"]) == (bare["plain"], bare["held"])
        assert listed["stored"] <= listed["plain"]
        assert found["four"]["bytes"]["stored"] * 4 < found["four"]["bytes"]["plain"]


# ---------------------------------------------------------------- data parallel


@pytest.mark.stack("DDP", "ranks agree, `lossless` bit-equal, 4 bits within their bound, bytes, seeds")
def test_ddp(two):
    assert_like_plain(two, "ddp", mean_bound(two))
    assert_bytes_are_those_of_the_bare_model(two, "ddp")


@pytest.mark.stack("DDP", "a model that was attached before it was wrapped")
def test_ddp_of_an_attached_model(two):
    assert_like_plain(two, "ddp inside", mean_bound(two))
    assert_bytes_are_those_of_the_bare_model(two, "ddp inside")


@pytest.mark.stack("DDP", "`static_graph=True`")
def test_ddp_with_a_static_graph(two):
    assert_like_plain(two, "ddp static", mean_bound(two))


@pytest.mark.stack("DDP", "`find_unused_parameters=True`")
def test_ddp_with_unused_parameters(two):
    assert_like_plain(two, "ddp unused", mean_bound(two))


@pytest.mark.stack("DDP", "`no_sync()` and accumulation")
def test_ddp_without_sync_between(two):
    assert_like_plain(two, "ddp no_sync")


def test_ranks_round_independently_unless_they_share_samples(two):
    """Both ranks have the same batch here, and nobody averages: all that can differ is noise."""
    first, second = (rank["same data"] for rank in two)
    assert same(first["mesh"], second["mesh"])
    assert same(first["group"], second["group"])
    assert not same(first["alone"], second["alone"])


# ---------------------------------------------------------------- sharded parameters


@pytest.mark.stack("FSDP", "bit-equal, within the bound at 4 bits; gathered weights are neither kept nor packed")
def test_fsdp1(two):
    assert_like_plain(two, "fsdp1", mean_bound(two))
    assert_bytes_are_those_of_the_bare_model(two, "fsdp1")


@pytest.mark.stack("FSDP", "`use_orig_params=False`")
def test_fsdp1_with_flat_parameters(two):
    assert_like_plain(two, "fsdp1 flat", agree=False)  # each rank has a shard of its own
    assert_bytes_are_those_of_the_bare_model(two, "fsdp1 flat")


@pytest.mark.stack("FSDP2", "bit-equal, within the bound at 4 bits; gathered weights are neither kept nor packed")
def test_fsdp2(two):
    assert_like_plain(two, "fsdp2", mean_bound(two))
    assert_bytes_are_those_of_the_bare_model(two, "fsdp2")


@pytest.mark.stack("FSDP2", "frozen weights")
def test_fsdp2_with_frozen_weights(two):
    assert_like_plain(two, "fsdp2 frozen", mean_bound(two))
    assert all(FROZEN not in rank["fsdp2 frozen"]["plain"]["gradients"] for rank in two)
    assert_bytes_are_those_of_the_bare_model(two, "fsdp2 frozen")


@pytest.mark.stack("FSDP2", "a mesh that replicates and shards (HSDP), 4 ranks")
def test_fsdp2_on_a_hybrid_mesh(four):
    assert_like_plain(four, "hsdp")


# ---------------------------------------------------------------- tensor parallel


@pytest.mark.stack("Tensor parallel", "bit-equal, within the bound at 4 bits, bytes of the local parts")
def test_tensor_parallel(two):
    assert_like_plain(two, "tp", two[0]["shared bounds"])
    for rank in two:
        # Input of the second layer and mask of the first rectifier are halved; input and mask of the third are not.
        whole = BATCH * 96 * 4
        assert rank["tp"]["lossless"]["bytes"]["plain"] == rank["bare"]["plain"] - whole // 2


@pytest.mark.stack("Tensor parallel", "frozen weights")
def test_tensor_parallel_with_frozen_weights(two):
    assert_like_plain(two, "tp frozen", two[0]["shared bounds"])
    for rank in two:
        found = rank["tp frozen"]
        assert FROZEN not in found["plain"]["gradients"]
        assert not {"48x96", "96x48"} & {*found["lossless"]["bytes"]["shapes"], *found["four"]["bytes"]["shapes"]}


@pytest.mark.stack("Tensor parallel", "parameters that all ranks hold stay bit-equal, for every method")
@pytest.mark.parametrize("method", sorted(lowtide.methods()))
def test_replicas_stay_equal(two, method):
    first, second = (rank[f"tp local {method}"]["weights"] for rank in two)
    assert same(first, second)
    plain = two[0]["tp local plain"]["weights"]
    assert same(first, plain) == (method in ("lossless", "pool"))  # the last one rounds maps alone


@pytest.mark.stack("Tensor parallel", "activations that are `DTensor`, split by features or by samples")
@pytest.mark.parametrize("kind", ["dtensor", "sequence"])
def test_replicas_stay_equal_where_activations_are_distributed(two, kind):
    for method in ("lossless", "actnn", "auto"):
        first, second = (rank[f"tp {kind} {method}"] for rank in two)
        assert same(first["weights"], second["weights"])
        assert same(first["weights"], two[0][f"tp {kind} plain"]["weights"]) == (method == "lossless")
        if method != "lossless":
            assert first["bytes"]["stored"] * 4 < first["bytes"]["plain"]
        local = two[0][f"tp local {method}"]["bytes"]
        assert first["bytes"]["plain"] + first["bytes"]["held"] <= local["plain"] + local["held"]


def test_a_distributed_tensor_that_changes_raises_as_in_plain_pytorch(two):
    for rank in two:
        assert all("modified by an inplace operation" in words for words in rank["changed"])


@pytest.mark.stack("Tensor parallel", "with FSDP2 across the groups, 4 ranks")
@pytest.mark.parametrize("method", ["lossless", "actnn", "auto"])
def test_fsdp2_across_tensor_parallel_groups(four, method):
    """Ranks 0 and 1 share samples, and so do 2 and 3."""
    found = [rank[method] for rank in four]
    assert all(same(each["weights"], found[0]["weights"]) for each in found)
    assert same(found[0]["weights"], four[0]["None"]["weights"]) == (method == "lossless")
    noise = [each["noise"] for each in found]
    assert noise[0] == noise[1] != noise[2] == noise[3]


# ---------------------------------------------------------------- what needs the whole model


@pytest.mark.stack(
    "FSDP2", "`check()` and `adapt()`", instead="ValueError: compare gradients before the model is sharded"
)
def test_sharded_models_cannot_be_probed(two):
    for rank in two:
        for name in ("check fsdp2", "adapt fsdp2"):
            assert "before the model is sharded" in rank["refused"][name]


@pytest.mark.stack("Tensor parallel", "`check()` and `adapt()`, of the local parts")
def test_parts_can_be_probed(two):
    for rank in two:
        assert rank["refused"]["check tp"] == rank["refused"]["adapt tp"] == ""


@pytest.mark.stack("FSDP2", "`budget=`", instead="ValueError: the parameters are spread over processes")
def test_a_budget_for_a_model_that_is_spread(two):
    for rank in two:
        for name in ("budget fsdp2", "budget tp"):
            assert "spread over processes" in rank["refused"][name]
        assert "must decide alike" in rank["refused"]["guard tp"]


# ---------------------------------------------------------------- pipeline


@pytest.mark.stack("Pipeline parallel", "1F1B with 4 micro-batches: bit-equal, bytes fall")
def test_pipeline(two):
    for rank in two:
        found = rank["pipeline"]
        assert same(found["lossless"]["gradients"], found["plain"]["gradients"])
    last = two[1]["pipeline"]
    assert not same(last["four"]["gradients"], last["plain"]["gradients"])
    assert last["four"]["bytes"]["stored"] < last["four"]["bytes"]["plain"]
