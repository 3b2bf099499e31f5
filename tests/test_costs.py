"""What things cost on this machine: numbers that make sense, are measured once, and survive the process."""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.codecs import (
    BlockMean,
    Cast,
    Codec,
    GroupQuant,
    Indices,
    Mask,
    Packed,
    PoolOffsets,
    Projection,
    Raw,
    SampleQuant,
    ShapeOnly,
    SixSigma,
    TwoValue,
    flatten,
)
from lowtide.machine import costs
from lowtide.machine.costs import (
    Call,
    Seconds,
    codec_seconds,
    copy_seconds,
    file_seconds,
    forget_costs,
    fresh_seconds,
    workspaces,
)
from lowtide.machine.measure import ChildError

MIB = 2**20
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc and /proc")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A cache folder of the test's own, and a process that knows nothing yet."""
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(costs, "_known", {})
    return tmp_path / "cache"


@pytest.fixture
def quick(monkeypatch):
    """Measure with few and small runs: for tests that look at what is done with a number."""
    monkeypatch.setattr(costs, "_LARGE", 200_000)
    monkeypatch.setattr(costs, "_RUNS", {200_000: 1, costs._SMALL: 1})
    monkeypatch.setattr(costs, "_COPIED", 2**20)


def new_process():
    """Forget what this process knows, but not the file."""
    costs._known.clear()


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def must_not_run(*args, **settings):
    raise AssertionError("this was measured before")


def tensor(*shape, dtype="float32", stride=None):
    stride = torch.empty(shape, device="meta").stride() if stride is None else stride
    return "tensor", shape, stride, dtype


# Seconds.


def test_seconds_are_positive_and_those_of_one_codec_are_alike():
    rough, fine = codec_seconds(GroupQuant(2)), codec_seconds(GroupQuant(8))
    assert min(rough) > 0
    assert min(fine) > 0
    for few, many in zip(rough, fine, strict=True):  # a busy machine may double either; more would be absurd
        assert 1 / 20 < many / few < 20
    assert rough.to_encode(10**6) > rough.encode * 10**6
    assert rough.to_encode(0) == rough.encode_call
    assert rough.to_decode(100) == pytest.approx(rough.decode_call + 100 * rough.decode)


def test_a_codec_that_does_more_takes_longer():
    """A copy reads and writes memory. Six standard deviations take many passes over float64 values."""
    assert codec_seconds(SixSigma(4)).encode > 2 * codec_seconds(Raw()).encode


POOL = PoolOffsets((32, 32), (3, 3), (2, 2), (1, 1), (1, 1))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("rectified", [False, True])
@pytest.mark.parametrize(
    "codec",
    [
        *(GroupQuant(4, layout="channel", dither=True), GroupQuant(3, layout="sample"), SampleQuant(14, 3)),
        *(BlockMean(dims=1), BlockMean(), BlockMean(dims=3, bits=0), BlockMean(faithful=True), SixSigma(4)),
        *(Cast("float8_e4m3fn", group=128), Projection(8), Mask(), TwoValue(), Raw(), ShapeOnly(), Indices(0, 9), POOL),
    ],
    ids=str,
)
def test_every_codec_gets_a_tensor_that_it_stores(codec, rectified):
    seconds = codec_seconds(codec, torch.float32, rectified)
    assert len(seconds) == 4
    assert min(seconds) >= 0
    assert max(seconds) > 0


def test_blocks_get_maps_with_as_many_dimensions_as_they_have():
    for dims in (1, 2, 3):
        for size in (costs._SMALL, costs._LARGE):
            sample = costs._sample(BlockMean(dims=dims), torch.bfloat16, size)
            assert sample.dim() == dims + 2
            assert sample.numel() == pytest.approx(size, rel=0.1)
            assert sample.dtype == torch.bfloat16


@pytest.mark.usefixtures("quick")
def test_a_type_that_the_codec_does_not_store_is_its_own_error():
    assert min(codec_seconds(GroupQuant(2), torch.bfloat16)) >= 0
    with pytest.raises(TypeError, match="group_quant stores float32"):
        codec_seconds(GroupQuant(2), torch.float64)


def test_copies_and_files_take_time():
    assert copy_seconds() > 0
    seconds = file_seconds()
    assert seconds.decode > 0
    assert seconds.encode > 0
    assert seconds.encode_call == seconds.decode_call == 0


def test_faults_are_measured_for_the_allocator_that_the_process_has(monkeypatch):
    """What takes twice as long the first time costs the second half; a tuned allocator is measured by itself."""
    faulted = iter([9.0, 3.0, 2.0, 9.0, -1.0, -1.0])  # the first is that of a heap that grows
    monkeypatch.setattr(costs, "_faulted", lambda: next(faulted))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    assert fresh_seconds() == 2.0
    assert fresh_seconds() == 2.0
    monkeypatch.setattr(costs, "is_tuned", lambda: True)
    assert fresh_seconds() == 0.0
    assert next(faulted, None) is None


def test_memory_that_was_touched_before_has_fewer_faults(monkeypatch):
    """Blocks that are all the same memory, touched before, against those of the system."""
    kept = torch.ones(costs._BLOCK, dtype=torch.uint8)
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: kept)
    again = costs._faulted()
    monkeypatch.undo()
    monkeypatch.setattr(torch, "empty", lambda count, **kwargs: torch.from_numpy(np.zeros(count, np.uint8)))
    assert costs._faulted() > max(0.0, again)


def test_measuring_leaves_threads_and_generators_alone(quick):
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    codec_seconds(GroupQuant(2))
    Call("aten.relu.default", (tensor(8),)).run()
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_fake_tensors_are_not_timed(quick):
    with FakeTensorMode(), pytest.raises(RuntimeError, match="real tensors"):
        codec_seconds(GroupQuant(2))
    assert len(codec_seconds(GroupQuant(2))) == 4


# What is known.


def test_what_was_measured_is_not_measured_again(quick, monkeypatch):
    first = codec_seconds(Cast()), copy_seconds(), file_seconds()
    for name in ("_time_codec", "_time_copy", "_time_file"):
        monkeypatch.setattr(costs, name, must_not_run)
    assert (codec_seconds(Cast()), copy_seconds(), file_seconds()) == first
    new_process()
    assert (codec_seconds(Cast()), copy_seconds(), file_seconds()) == first
    for other in (
        lambda: codec_seconds(Cast("float16")),
        lambda: codec_seconds(Cast(), torch.bfloat16),
        lambda: codec_seconds(Cast(), torch.float32, True),
    ):
        with pytest.raises(AssertionError, match="measured before"):
            other()


def test_forgotten_numbers_are_measured_again(quick, monkeypatch, folder):
    copy_seconds()
    assert names_in(folder) == ["costs.json"]
    forget_costs()
    assert names_in(folder) == []
    forget_costs()  # nothing is left to forget, which is no error
    monkeypatch.setattr(costs, "_time_copy", must_not_run)
    with pytest.raises(AssertionError, match="measured before"):
        copy_seconds()


def test_other_threads_versions_and_kernels_have_numbers_of_their_own(quick, monkeypatch, folder):
    threads = torch.get_num_threads()
    copy_seconds()
    try:
        torch.set_num_threads(threads + 1)
        copy_seconds()
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr(costs, "_versions", lambda: "torch 99")
    copy_seconds()
    monkeypatch.setenv("LOWTIDE_KERNELS", "reference")
    copy_seconds()
    sections = json.loads((folder / "costs.json").read_text())
    assert len(sections) == 4
    assert f"{threads + 1} threads, torch {torch.__version__}" in list(sections)[1]
    for turn in range(9):
        monkeypatch.setattr(costs, "_versions", lambda turn=turn: f"torch {turn}")
        copy_seconds()
    assert [name.split("torch ")[1][0] for name in json.loads((folder / "costs.json").read_text())] == [*"12345678"]


@dataclass(frozen=True)
class Own(Codec):
    """Keep the values; only maps."""

    id: ClassVar[str] = "own_of_test_costs"

    def encode(self, tensor, *, key, support=None):
        values, meta, _ = flatten(tensor)
        assert len(meta.shape) == 4
        return Packed(self, meta, (values.clone(),))

    def decode(self, packed, *, support=None):
        return packed.buffers[0].clone().as_strided(packed.meta.shape, packed.meta.stride)

    def packed_nbytes(self, meta):
        return meta.nbytes


def test_a_codec_of_somebody_else_is_known_in_the_process_only(quick, monkeypatch, folder):
    first = codec_seconds(Own())
    assert not (folder / "costs.json").exists()
    monkeypatch.setattr(costs, "_time_codec", must_not_run)
    assert codec_seconds(Own()) == first
    new_process()
    with pytest.raises(AssertionError, match="measured before"):
        codec_seconds(Own())


def damaged(text):
    """What may be found in a file that somebody or something damaged."""
    machine = costs._machine()
    return {
        "cut": text[: len(text) // 2],
        "empty": "",
        "binary": "\udcff\udcfe\x00",
        "another form": "[1, 2]",
        "no sections": json.dumps({machine: 3}),
        "no numbers": json.dumps({machine: {"copy": "fast"}}),
        "true": json.dumps({machine: {"copy": [True]}}),
        "negative": json.dumps({machine: {"copy": [-1.0]}}),
        "not finite": json.dumps({machine: {"copy": [float("nan")]}}),
        "too many": json.dumps({machine: {"copy": [1.0, 2.0]}}),
        "deep": "[" * 100_000,
    }


@pytest.mark.parametrize("how", sorted(damaged("")))
def test_a_damaged_file_is_ignored_and_replaced(how, quick, monkeypatch, folder):
    copy_seconds()
    path = folder / "costs.json"
    path.write_bytes(damaged(path.read_text())[how].encode("utf-8", "surrogateescape"))
    new_process()
    monkeypatch.setattr(costs, "_time_copy", lambda: (0.25,))
    assert copy_seconds() == 0.25
    new_process()
    monkeypatch.setattr(costs, "_time_copy", must_not_run)
    assert copy_seconds() == 0.25


def test_a_folder_that_cannot_be_written_is_ignored(quick, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "file" / "below"))
    first = copy_seconds()
    monkeypatch.setattr(costs, "_time_copy", must_not_run)
    assert copy_seconds() == first
    forget_costs()
    with pytest.raises(AssertionError, match="measured before"):
        copy_seconds()


def test_a_failed_write_leaves_the_old_file_and_no_other(quick, monkeypatch, folder):
    copy_seconds()
    before = (folder / "costs.json").read_text()

    def fail(*args):
        raise OSError("no")

    monkeypatch.setattr(costs.os, "replace", fail)
    codec_seconds(Cast())
    assert names_in(folder) == ["costs.json"]
    assert (folder / "costs.json").read_text() == before


def test_the_folder_is_the_first_that_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert costs._file() == tmp_path / "cache" / "costs.json"
    monkeypatch.delenv("LOWTIDE_CACHE_DIR")
    assert costs._file() == tmp_path / "lowtide" / "costs.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert costs._file() == tmp_path / ".cache" / "lowtide" / "costs.json"


def test_processes_add_to_what_others_wrote(quick, monkeypatch):
    copy_seconds()
    new_process()
    codec_seconds(Cast())  # read what the other wrote, and must not drop it
    new_process()
    monkeypatch.setattr(costs, "_time_copy", must_not_run)
    monkeypatch.setattr(costs, "_time_codec", must_not_run)
    assert copy_seconds() > 0
    assert isinstance(codec_seconds(Cast()), Seconds)


# Calls.


class Record(TorchDispatchMode):
    """Notes each call of an op, and how what it returned looks."""

    def __init__(self):
        super().__init__()
        self.calls: dict[Call, list[tuple[torch.Size, torch.dtype]]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        call = Call.of(func, args, kwargs or {})  # before the op, which may change the form of an argument
        out = func(*args, **(kwargs or {}))
        if not str(func).startswith("prim."):  # which only fake tensors ask for
            assert call is not None, func
            self.calls[call] = forms(out)
        return out


def forms(out):
    values = out if isinstance(out, (tuple, list)) else [out]
    return [(value.shape, value.dtype) for value in values if isinstance(value, torch.Tensor)]


class Small(nn.Module):
    """One of each: embedding, linear, attention, convolution, batch norm, pooling."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 16)
        self.linear = nn.Linear(16, 48)
        self.conv = nn.Conv2d(2, 4, 3, padding=1, stride=2)
        self.norm, self.layer_norm = nn.BatchNorm2d(4), nn.LayerNorm(16)

    def forward(self, tokens):
        q, k, v = self.linear(self.layer_norm(self.embedding(tokens))).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        x = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = functional.max_pool2d(functional.gelu(self.norm(self.conv(x.contiguous()))), 2)
        return functional.cross_entropy(x.flatten(1), tokens[:, 0])


def record(fake):
    with FakeTensorMode() if fake else torch.no_grad():
        model, tokens = Small(), torch.zeros(4, 16, dtype=torch.int64)
    with Record() as seen:
        model(tokens).backward()
    return seen.calls


@pytest.fixture(scope="module")
def real_calls():
    return record(fake=False)


def test_real_and_fake_tensors_give_equal_calls(real_calls):
    assert set(record(fake=True)) == set(real_calls)


def test_calls_survive_json(real_calls):
    ops = {call.op for call in real_calls}
    assert {"aten.convolution.default", "aten.convolution_backward.default", "aten.addmm.default"} <= ops
    assert {"aten.embedding_dense_backward.default", "aten.native_batch_norm_backward.default"} <= ops
    assert any("flash_attention_for_cpu_backward" in op for op in ops)
    for call in real_calls:
        again = Call.from_config(json.loads(json.dumps(call.to_config())))
        assert again == call
        assert hash(again) == hash(call)
        assert repr(again) == repr(call)  # 1, 1.0 and True are equal, but not the same


def test_calls_run_and_return_what_the_op_returned(real_calls):
    for call, expected in real_calls.items():
        assert forms(call.run()) == expected, call


def test_arguments_of_every_kind_come_back():
    given = [1, True, 2.5, "text", None, [1, [2.0]], torch.float16, torch.strided, torch.channels_last]
    call = Call.of("aten.any.name", given, {"b": float("-inf"), "a": torch.device("meta")})
    assert call is not None
    expected = [*given]
    made = [costs._built(form, torch.Generator()) for form in call.arguments[:-2]]
    assert made == expected
    assert [type(value) for value in made] == [type(value) for value in expected]
    assert call.arguments[-2:] == (("named", "a", ("device", "meta")), ("named", "b", ("float", "-inf")))
    function, args, kwargs = Call.of("aten.add.Tensor", [torch.ones(2), True], {"alpha": 3}).prepare()
    assert function is torch.ops.aten.add.Tensor
    assert args[1] is True
    assert kwargs == {"alpha": 3}
    anywhere = Call.of("aten.zeros.default", [[2]], {"device": torch.device("meta"), "dtype": torch.int8})
    assert torch.equal(anywhere.run(), torch.zeros(2, dtype=torch.int8))


def test_equal_numbers_of_other_types_are_other_calls():
    calls = {Call.of("aten.full.default", [[2], value]) for value in (1, 1.0, True)}
    assert len(calls) == 3
    nan = float("nan")
    assert Call.of("aten.full.default", [[2], nan]) == Call.of("aten.full.default", [[2], float("nan")])


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3, 4, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_tensors_are_built_in_their_form(shape, dtype):
    source = torch.zeros(shape, dtype=dtype)
    sources = [source, source.expand(3, *shape)]
    if source.dim() == 4:
        sources += [source.transpose(1, 3), source[:, 1:, ::2], source.to(memory_format=torch.channels_last)]
    for value in sources:
        form = costs._described(value)
        built = costs._built(form, torch.Generator().manual_seed(0))
        assert (built.shape, built.stride(), built.dtype) == (value.shape, value.stride(), dtype)
        assert Call("aten.relu.default", (form,)).nbytes == built.untyped_storage().nbytes()
        if not dtype.is_floating_point:
            assert not built.any()
        elif built.numel() > 9:
            assert built.float().unique().numel() > 1
            assert (built.float() >= 0).all()
            assert (built.float() <= 1).all()


@pytest.mark.parametrize(
    "value",
    [
        object(),
        torch.Generator(),
        [1, object()],
        torch.eye(3).to_sparse(),
        2 + 1j,
        {"a": 1},
        torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_described_gives_none(value):
    assert Call.of(torch.ops.aten.add.Tensor, [torch.ones(2), value]) is None
    assert Call.of(torch.ops.aten.add.Tensor, [torch.ones(2)], {"other": value}) is None


def test_tensors_without_strides_give_none():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to leave both behind
        values = (
            torch.nested.nested_tensor([torch.ones(2)]),
            torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint8),
        )
    for value in values:
        assert value.layout == torch.strided
        assert Call.of(torch.ops.aten.relu.default, [value]) is None


def test_sizes_that_are_not_known_and_functions_that_are_no_ops_give_none():
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    unknown = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.ones(5, 4), static_shapes=False)
    assert Call.of(torch.ops.aten.relu.default, [unknown]) is None
    assert Call.of(torch.relu, [torch.ones(2)]) is None
    assert Call.of(torch.ops.aten.relu.default, [torch.ones(2)]) == Call("aten.relu.default", (tensor(2),))


# Workspaces.


def convolution_backward(channels, side):
    maps, weight = tensor(2, channels, side, side), tensor(channels, channels, 1, 1)
    pair = ("list", 1, 1), ("list", 0, 0)
    mask = ("list", ("bool", 1), ("bool", 1), ("bool", 0))
    settings = (("list", 0), pair[0], pair[1], pair[0], ("bool", 0), pair[1], 1, mask)
    return Call("aten.convolution_backward.default", (maps, maps, weight, *settings))


@on_linux
def test_workspaces_are_those_of_ops_that_need_room(monkeypatch):
    large = convolution_backward(64, 128)  # 8 MiB a map; oneDNN has maps in an order of its own
    product = Call("aten.mul.Tensor", (tensor(2, 64, 128, 128), tensor(2, 64, 128, 128)))
    in_place = Call("aten.add_.Tensor", (tensor(2, 64, 128, 128), 1))
    # It is made of other ops, whose results are gone when it returns: nothing here depends on a library.
    composed = Call("aten.binary_cross_entropy_with_logits.default", (tensor(1024, 4096), tensor(1024, 4096)))
    wrong = Call("aten.mm.default", (tensor(2, 3), tensor(2, 3)))
    absent = Call("aten.there_is_no_such_op.default", (tensor(2),))
    over = Call("aten.relu.default", (tensor(2**40),))
    calls = [large, product, in_place, composed, wrong, absent, over, product]
    found = workspaces(calls)
    assert set(found) == {large, product, in_place, composed}
    assert found[product] == found[in_place] == 0
    assert 16 * MIB * 0.9 < found[composed] < 4 * 16 * MIB
    if torch.backends.mkldnn.is_available():
        assert 2 * MIB < found[large] < 64 * MIB  # with one thread about half of what two take

    monkeypatch.setattr(costs, "run_child", must_not_run)
    assert workspaces(calls) == found  # what raised is not tried again in this process either
    new_process()
    assert workspaces([large, product]) == {large: found[large], product: 0}
    with pytest.raises(AssertionError, match="measured before"):
        workspaces([wrong])


def test_only_what_is_new_in_the_result_is_no_workspace(monkeypatch):
    rises = [10 * MIB, 9 * MIB] * 3 + [MIB - 1]
    monkeypatch.setattr(costs, "peak_above", lambda run: (run(), rises.pop(0))[1])
    square = tensor(1024, 1024)
    assert costs._workspace(Call("aten.mul.Tensor", (square, square))) == 5 * MIB  # the smaller of two
    assert costs._workspace(Call("aten.add_.Tensor", (square, 1))) == 9 * MIB
    assert costs._workspace(Call("aten.split.Tensor", (square, 512))) == 9 * MIB
    assert costs._workspace(Call("aten.add_.Tensor", (square, 1))) == 0
    assert not rises


@on_linux
def test_arguments_beyond_the_limit_are_not_built(monkeypatch):
    monkeypatch.setattr(costs, "run_child", must_not_run)
    call = Call("aten.relu.default", (tensor(2**20),))
    assert workspaces([call], limit_nbytes=2**22 - 1) == {}
    with pytest.raises(AssertionError, match="measured before"):
        workspaces([call], limit_nbytes=2**22)


@on_linux
def test_a_call_that_ends_the_child_costs_no_other(monkeypatch):
    calls = [Call("aten.relu.default", (tensor(n),)) for n in range(1, 7)]
    started = []

    def run_child(function, argument, *, on_event, **settings):
        started.append(len(argument["calls"]))
        for config in argument["calls"]:
            size = config[1][0][1][0]
            if size in deadly:
                raise ChildError("killed")
            on_event({"nbytes": size})

    monkeypatch.setattr(costs, "run_child", run_child)
    deadly = {2, 6}
    assert workspaces(calls) == {call: n for n, call in enumerate(calls, 1) if n not in deadly}
    assert started == [6, 4]
    deadly, started[:] = {1, 2, 3, 4}, []
    forget_costs()
    assert workspaces(calls) == {}  # it gives up
    assert started == [6, 5, 4]


def test_other_systems_have_no_workspaces(monkeypatch):
    monkeypatch.setattr(costs, "run_child", must_not_run)
    monkeypatch.setattr(costs.sys, "platform", "darwin")
    assert workspaces([Call("aten.relu.default", (tensor(2),))]) == {}
