"""What checkpoints keep: seen, packed, counted, and given back, for every kind of checkpoint there is."""

import contextlib
import functools
import gc
import threading

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts, set_checkpoint_early_stop
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide
from lowtide.codecs import Cast, GroupQuant, Mask, Raw, TensorMeta
from lowtide.report import COMPRESSED, EXACT, HELD, SHARED

WIDTH = 128
SAMPLES = 8 * 64  # an input of a block has 512 * 128 values, 256 KiB
BOUNDARY = SAMPLES * WIDTH * 4


class Block(nn.Module):
    """Draws random numbers, so that a recomputation with another random state would show."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down, self.drop = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def selective(block, x, **options):
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    return torch_checkpoint(block, x, use_reentrant=False, context_fn=contexts, **options)


def nested(block, x):
    return torch_checkpoint(lambda t: torch_checkpoint(block, t + 1, use_reentrant=False), x, use_reentrant=False)


KINDS = {
    "non-reentrant": lambda block, x: torch_checkpoint(block, x, use_reentrant=False),
    "no early stop": lambda block, x: torch_checkpoint(block, x, use_reentrant=False, early_stop=False),
    "reentrant": lambda block, x: torch_checkpoint(block, x, use_reentrant=True),
    "selective": selective,
    "nested": nested,
    "own": lowtide.checkpoint,
}
EXACTLY = KINDS | {"own": KINDS["non-reentrant"]}  # without a session, lowtide's own is lossy by itself


class Net(nn.Module):
    def __init__(self, run, blocks=4):
        super().__init__()
        self.embed, self.head = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.run = run

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)


@pytest.fixture
def live_nbytes():
    """Counts bytes of all storages that Python's collector reaches, without what was there before the test."""
    gc.collect()
    gc.freeze()

    def count():
        gc.collect()
        tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    yield count
    gc.unfreeze()


class Step:
    """One forward and backward of a net with fixed seeds."""

    def __init__(self, run, context=contextlib.nullcontext, model=None, inside=False):
        torch.manual_seed(0)
        self.model = Net(run) if model is None else model()
        x = torch.randn(8, 64, 16)
        torch.manual_seed(1)
        with context(self.model) as self.session:
            loss = self.model(x).square().mean()
            if inside:
                loss.backward()
        self.random = torch.get_rng_state()
        if not inside:
            loss.backward()
        self.random_after = torch.get_rng_state()
        self.gradients = [p.grad for p in self.model.parameters()]

    def error_to(self, other):
        pairs = list(zip(self.gradients, other.gradients, strict=True))
        return float((sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs)).sqrt())

    def equals(self, other):
        return all(map(torch.equal, self.gradients, other.gradients))


def session(method="actnn", **options):
    return lambda model: lowtide.compress(model, method, **options)


def boundaries(report):
    return [s for s in report.sites if s.site.op in ("Checkpoint", "CheckpointFunction")]


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["lossless", Raw()], ids=str)
def test_exact_codecs_leave_gradients_and_random_streams_bit_equal(kind, method):
    plain, packed = Step(EXACTLY[kind]), Step(KINDS[kind], session(method))
    assert packed.equals(plain)
    assert torch.equal(packed.random, plain.random)
    assert torch.equal(packed.random_after, plain.random_after)


@pytest.mark.parametrize("kind", KINDS)
def test_boundaries_of_every_kind_are_packed_and_nothing_else_is_lossy(kind):
    """With everything else exact the error of the gradient is that of the boundaries."""
    plain = Step(EXACTLY[kind])
    packed = Step(KINDS[kind], session("actnn", level="L2", include="blocks"))
    # Dithered groups err by at most half a step, 1/510 of a group's range, which is below 12 deviations here. The
    # gradient is smooth in the input of each of 4 blocks, with a slope below 2 in this relative sense.
    assert 0 < packed.error_to(plain) < 4 * 2 * 12 / 510
    found = boundaries(packed.session.report())
    assert len(found) == (12 if kind == "selective" else 4)
    assert {s.codec for s in found} == {"group_quant(8 bits, dithered)"}
    modules = {".".join(s.site.module.split(".")[:2]) if kind == "nested" else s.site.module for s in found}
    assert modules == {f"blocks.{i}" for i in range(4)}  # of a function, the module at its first operator


@pytest.mark.parametrize("kind", KINDS)
def test_noise_repeats_for_a_seed_and_differs_for_another(kind):
    first, again, other = (Step(KINDS[kind], session("division", seed=seed)) for seed in (3, 3, 4))
    assert first.equals(again)
    assert not first.equals(other)


@pytest.mark.parametrize("kind", KINDS)
def test_backward_inside_the_session_is_the_same(kind):
    """The recomputation then runs while the session is open, and must be left alone: packed twice it would differ."""
    outside, inside = (Step(KINDS[kind], session("division"), inside=inside) for inside in (False, True))
    assert inside.equals(outside)
    assert len(inside.session.report().sites) == len(outside.session.report().sites)


@pytest.mark.parametrize("enabled", [False, True])
def test_early_stop_is_as_it_was(enabled):
    calls = []

    def run(block, x):
        def counted(t):
            y = block(t)
            calls.append("ended")
            return y

        with set_checkpoint_early_stop(enabled):
            return torch_checkpoint(counted, x, use_reentrant=False)

    Step(run, session())
    assert len(calls) == 4 + (0 if enabled else 4)


def test_backward_twice_reads_boundaries_twice():
    model, x = Net(KINDS["non-reentrant"]), torch.randn(8, 64, 16)
    model.eval()
    with lowtide.compress(model, "division"):
        loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), once, strict=True))


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize("kind", KINDS)
def test_live_bytes_fall_as_the_report_says(kind, live_nbytes):
    def held(run, context):
        torch.manual_seed(0)
        model, x = Net(run[kind]), torch.randn(8, 64, 16)
        before = live_nbytes()
        with context(model) as opened:
            loss = model(x).square().mean()
        after = live_nbytes()
        return after - before - loss.untyped_storage().nbytes(), opened

    plain, _ = held(EXACTLY, lambda _: contextlib.nullcontext())
    packed, opened = held(KINDS, session("division"))
    report = opened.report()
    # Each region keeps a state of the random stream too, which is no saved tensor. Nested regions make one constant
    # more. What this and the collector's blind spots may add is below a twentieth of one boundary.
    states = (8 if kind == "nested" else 4) * torch.get_rng_state().numel()
    assert abs(plain - states - report.plain_nbytes) < BOUNDARY / 20
    assert abs(packed - states - report.stored_nbytes) < BOUNDARY / 20
    assert report.plain_nbytes > 4 * BOUNDARY
    assert report.ratio > 3.8


def test_boundary_bits_choose_the_codec_and_none_keeps_them():
    plain = Step(KINDS["non-reentrant"])
    found, errors = {}, {}
    for bits in (4, 8, 16, None):
        step = Step(KINDS["non-reentrant"], session("actnn", boundary_bits=bits, include="blocks"))
        (found[bits],) = {(s.codec, s.state) for s in boundaries(step.session.report())}
        errors[bits] = step.error_to(plain)
    assert found == {
        4: ("group_quant(4 bits, dithered)", COMPRESSED),
        8: ("group_quant(8 bits, dithered)", COMPRESSED),
        16: ("cast(bfloat16)", COMPRESSED),
        None: ("", EXACT),
    }
    assert errors[None] == 0 < errors[16] < errors[8] < errors[4]


def test_boundary_bits_are_checked():
    for bits in (0, 9, True, "8", 2.5):
        with pytest.raises(ValueError, match="boundary_bits must be"):
            lowtide.compress(nn.Linear(2, 2), "division", boundary_bits=bits)


@pytest.mark.parametrize("method", [name for name in lowtide.methods() if name not in ("lossless", "pool")])
def test_every_method_gives_boundaries_at_least_eight_bits(method):
    def precise(codec):
        return codec in ("group_quant(8 bits, dithered)", "cast(bfloat16)")

    found = boundaries(Step(KINDS["non-reentrant"], session(method)).session.report())
    assert len(found) == 4
    assert all(precise(s.codec) for s in found), [s.codec for s in found]


def test_one_codec_for_all_does_not_spoil_boundaries():
    found = boundaries(Step(KINDS["reentrant"], session(GroupQuant(bits=2))).session.report())
    assert {s.codec for s in found} == {"group_quant(8 bits, dithered)"}


def test_a_plan_repeats_boundaries_bit_for_bit():
    first = Step(KINDS["selective"], session("division"))
    plan = first.session.plan()
    again = Step(KINDS["selective"], session(plan))
    assert again.equals(first)
    spared = lowtide.Plan({s: c for s, c in plan.choices.items() if s.op != "Checkpoint"})
    kept = boundaries(Step(KINDS["selective"], session(spared)).session.report())
    assert {s.state for s in kept} == {EXACT}


def test_an_input_that_several_regions_share_is_stored_once():
    def run(block, x):
        return KINDS["non-reentrant"](block, x) + KINDS["non-reentrant"](block, x)

    report = Step(run, session("division")).session.report()
    args = [s for s in report.sites if s.site.slot == "args[0]"]
    assert len(args) == 8
    assert sum(s.plain_nbytes for s in args) == 4 * BOUNDARY


def test_inputs_that_live_anyway_or_must_be_exact_are_left_alone():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(SAMPLES, WIDTH))
            self.kept = []

        def forward(self, x):
            h, small = self.first(x), self.first(x[:4])
            self.kept.append(h)
            mask = torch.rand(SAMPLES, WIDTH)
            index = torch.arange(SAMPLES).flip(0)

            def region(h, small, scale, index, mask, plain):
                return (h * scale)[index] * mask + small.sum() + plain

            return torch_checkpoint(region, h, small, self.scale, index, mask, x, use_reentrant=False)

    model, x = Odd(), torch.randn(SAMPLES, WIDTH)
    with lowtide.compress(model, "division") as opened:
        loss = model(x).sum()
    loss.backward()
    states = {s.site.slot: s.state for s in boundaries(opened.report())}
    # The first layer saved the last of them, so its bytes are counted there.
    assert states == {"args[0]": HELD, "args[1]": EXACT, "args[3]": EXACT, "args[4]": EXACT, "args[5]": SHARED}
    assert "no gradient" in next(s.why for s in opened.report().sites if s.site.slot == "args[4]")


def test_a_mask_that_is_part_of_an_input_with_a_gradient_stays_exact():
    """T5 adds its mask to a learned bias; in one group with -1e9 the biases would all be rounded to zero."""

    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias, self.project = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            scores = self.bias(x) + torch.triu(torch.full((64, 64), -1e9), 1)
            return torch_checkpoint(lambda s, x: s.softmax(-1) @ self.project(x), scores, x, use_reentrant=False)

    def step(context):
        torch.manual_seed(0)
        model, x = Biased(), torch.randn(8, 64, 64)
        with context(model) as opened:
            out = model(x)
        out.square().sum().backward()
        return [p.grad for p in model.parameters()], opened

    (plain, _), (packed, opened) = step(contextlib.nullcontext), step(session("division"))
    row = next(s for s in opened.report().sites if s.site.slot == "args[0]")
    assert row.state == EXACT
    assert "mask" in row.why
    assert torch.equal(plain[0], packed[0])


def test_keyword_arguments_are_counted_and_lowtides_own_packs_them():
    def run(checkpoint, **options):
        return lambda block, x: checkpoint(lambda *, t: block(t[0]), t=(x,), **options)

    theirs = boundaries(Step(run(torch_checkpoint, use_reentrant=False), session("division")).session.report())
    assert {(s.site.slot, s.state, s.plain_nbytes) for s in theirs} == {("kwargs[t[0]]", EXACT, BOUNDARY)}
    ours = Step(run(lowtide.checkpoint), session("division"))
    assert {s.state for s in boundaries(ours.session.report())} == {COMPRESSED}
    assert ours.error_to(Step(run(lowtide.checkpoint), session("lossless"))) < 0.2


def test_what_a_policy_lets_be_changed_and_further_results_stay_exact():
    def policy(ctx, op, *args, **kwargs):
        saved = (torch.ops.aten.addmm.default, torch.ops.aten.native_layer_norm.default)
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    def run(mutable):
        contexts = functools.partial(create_selective_checkpoint_contexts, policy, mutable)
        return lambda block, x: torch_checkpoint(block, x, use_reentrant=False, context_fn=contexts)

    report = Step(run(False), session("division", min_numel=0)).session.report()
    norms = {s.site.slot[-2]: s.state for s in report.sites if "layer_norm" in s.site.slot}
    assert norms == {"0": COMPRESSED, "1": EXACT, "2": EXACT}
    plain, mutable = Step(run(True)), Step(run(True), session("actnn", boundary_bits=None, include="blocks"))
    assert mutable.equals(plain)
    assert all(s.state == EXACT for s in boundaries(mutable.session.report()))


def test_a_cached_result_that_is_changed_in_place_is_an_error():
    def changed(x):
        y = x @ torch.eye(WIDTH)
        y.mul_(2)
        return y.sin()

    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    model = nn.Linear(WIDTH, WIDTH)
    for context in (contextlib.nullcontext(), lowtide.compress(model, "division")):
        with context:
            y = torch_checkpoint(changed, model(torch.randn(SAMPLES, WIDTH)), use_reentrant=False, context_fn=contexts)
        with pytest.raises(RuntimeError, match=r"mutated|modified by an inplace"):
            y.sum().backward()


def test_encoding_inside_a_selective_region_is_not_seen_by_its_policy():
    """The region's results are found again by counting operators; ours among them would shift the count."""
    seen = []

    def policy(ctx, op, *args, **kwargs):
        seen.append(str(op))
        return CheckpointPolicy.PREFER_RECOMPUTE

    def run(block, x):
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return torch_checkpoint(block, x, use_reentrant=False, context_fn=contexts)

    Step(run)
    plain = seen.copy()
    seen.clear()
    packed = Step(run, session("auto", min_numel=0))
    assert len(boundaries(packed.session.report())) == 4
    assert seen == plain


# ---------------------------------------------------------------- errors, threads, other hooks


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_in_a_region_leaves_nothing_behind(kind, live_nbytes):
    class Fails(Block):
        def forward(self, x):
            super().forward(x)
            raise KeyError("mine")

    model = Net(KINDS[kind])
    model.blocks[2] = Fails()
    before = live_nbytes()
    with pytest.raises(KeyError, match="mine"), lowtide.compress(model, "division"):
        model(torch.randn(8, 64, 16))
    assert live_nbytes() == before
    assert not torch._C._autograd._top_saved_tensors_default_hooks(True)
    assert torch.overrides._len_torch_function_stack() == 0
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("kind", ["non-reentrant", "reentrant", "own"])
def test_an_input_that_is_changed_in_place_is_an_error(kind):
    model, x = Net(KINDS[kind], blocks=1), torch.randn(8, 64, 16)
    for context in (contextlib.nullcontext(), lowtide.compress(model, "division")):
        with context:
            h = model.embed(x)
            y = KINDS[kind](model.blocks[0], h)
            with torch.no_grad():
                h += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_hooks_around_a_region_are_left_alone():
    def run(block, x):
        with torch.autograd.graph.save_on_cpu():
            return KINDS["non-reentrant"](block, x)

    plain, packed = Step(run), Step(run, session("division", include="blocks"))
    assert packed.equals(plain)


def test_attached_models_pack_boundaries_in_each_step():
    torch.manual_seed(0)
    model = Net(KINDS["reentrant"])
    with lowtide.attach(model, "auto") as handle:
        for _ in range(3):
            model(torch.randn(8, 64, 16)).square().mean().backward()
            assert {s.codec for s in boundaries(handle.report())} == {"group_quant(8 bits, dithered)"}


def test_check_sees_boundaries():
    model = Net(KINDS["non-reentrant"])
    model.eval()
    batch = torch.randn(8, 64, 16)
    coarse = lowtide.check(model, batch, lambda m, x: m(x).square().mean(), "division", boundary_bits=2, seconds=0)
    fine = lowtide.check(model, batch, lambda m, x: m(x).square().mean(), "division", seconds=0)
    assert coarse.overall.error > fine.overall.error


# ---------------------------------------------------------------- lowtide.checkpoint without a session


def chain(blocks, x, **options):
    for block in blocks:
        x = lowtide.checkpoint(block, x, **options)
    return x


@pytest.mark.parametrize("codec", [Raw(), None, Cast("bfloat16"), GroupQuant(4)], ids=str)
def test_alone_it_packs_what_it_keeps(codec, live_nbytes):
    own = functools.partial(lowtide.checkpoint, codec=codec)
    plain, packed = Step(KINDS["non-reentrant"]), Step(own)
    bound = {Raw(): 0.0, None: 4 * 2 * 12 / 510, Cast("bfloat16"): 4 * 2 / 256, GroupQuant(4): 4 * 2 * 12 / 15}[codec]
    assert packed.error_to(plain) <= bound
    assert packed.equals(plain) == (codec == Raw())
    assert torch.equal(packed.random_after, plain.random_after)
    assert packed.equals(Step(own)), "the noise is not a function of seed and values"

    def held(run):
        torch.manual_seed(0)
        model, x = Net(run), torch.randn(8, 64, 16)
        before = live_nbytes()
        y = model(x)
        return live_nbytes() - before - y.untyped_storage().nbytes()

    # The last of the 4 inputs is what backward begins with, so it is never packed.
    form = TensorMeta.of(torch.empty(SAMPLES, WIDTH))
    saved = 3 * (BOUNDARY - (codec or GroupQuant(8)).packed_nbytes(form))
    assert held(KINDS["non-reentrant"]) - held(own) == pytest.approx(saved, abs=64)


def test_alone_it_keeps_what_the_caller_still_holds():
    torch.manual_seed(0)
    blocks, x = nn.ModuleList(Block() for _ in range(3)).eval(), torch.randn(SAMPLES, WIDTH, requires_grad=True)
    seen = []

    def run(checkpoint):
        x.grad = None
        blocks.zero_grad()
        kept = [x * 1]
        for block in blocks:
            kept.append(checkpoint(block, kept[-1]))
        kept[-1].sum().backward()
        seen.append(x.grad)

    run(KINDS["non-reentrant"])
    run(lowtide.checkpoint)
    assert torch.equal(*seen)  # exact, so nothing was packed


def test_alone_it_takes_any_arguments():
    weight, x = nn.Parameter(torch.randn(64, 64)), torch.randn(128, 64, requires_grad=True)
    index, table = torch.arange(128), {"scale": torch.full((1,), 2.0)}

    def function(h, pair, *, w, index, table, flag):
        assert flag == "yes"
        return (h @ w)[index] * table["scale"] + pair[0] - pair[1][0]

    def run(checkpoint, **options):
        weight.grad = x.grad = None
        h = x * 1
        y = checkpoint(function, h, (h * 2, (h * 3,)), w=weight, index=index, table=table, flag="yes", **options)
        y.square().sum().backward()
        return weight.grad, x.grad

    plain, packed = run(torch_checkpoint, use_reentrant=False), run(lowtide.checkpoint, codec=Raw())
    assert all(map(torch.equal, plain, packed))


def test_alone_one_storage_is_stored_once_and_views_come_back(live_nbytes):
    x = torch.randn(256, 128, requires_grad=True)
    h = x * 1
    y = lowtide.checkpoint(lambda a, b: a @ b, h, h.t())
    del h
    before = live_nbytes()
    z = lowtide.checkpoint(torch.sin, y)
    freed = before - live_nbytes() + z.untyped_storage().nbytes()
    packed = GroupQuant(8).packed_nbytes(TensorMeta.of(x))
    # The state of the random stream of the second region is new.
    assert freed == pytest.approx(256 * 128 * 4 - packed - torch.get_rng_state().numel(), abs=256)
    z.sum().backward()
    (expected,) = torch.autograd.grad(torch.sin(x @ x.t()).sum(), x)
    assert float((x.grad - expected).norm() / expected.norm()) < 0.2  # scores of 11 deviations, then a sine
    assert not torch.equal(x.grad, expected)


def test_alone_within_other_checkpoints_and_without_gradients():
    torch.manual_seed(0)
    blocks, x = nn.ModuleList(Block() for _ in range(2)).eval(), torch.randn(SAMPLES, WIDTH, requires_grad=True)
    grads = []
    for inner in (KINDS["non-reentrant"], lowtide.checkpoint):
        x.grad = None
        torch_checkpoint(lambda t, f=inner: f(blocks[1], f(blocks[0], t)), x * 1, use_reentrant=False).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)
    with torch.no_grad():
        assert torch.equal(lowtide.checkpoint(blocks[0], x), blocks[0](x))


def test_alone_bad_arguments_are_refused():
    x = torch.randn(4, requires_grad=True)
    with pytest.raises(TypeError, match="codec must be a codec"):
        lowtide.checkpoint(torch.sin, x, codec=8)
    with pytest.raises(ValueError, match="does not give back the values"):
        lowtide.checkpoint(torch.sin, x, codec=Mask())
    with pytest.raises(ValueError, match="never reentrant"):
        lowtide.checkpoint(torch.sin, x, use_reentrant=True)


def test_alone_threads_do_not_meet():
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(3)).eval()
    x = torch.randn(SAMPLES, WIDTH)
    results = {}

    def run(name):
        leaf = x.clone().requires_grad_()
        (results[name],) = torch.autograd.grad(chain(blocks, leaf * 1).sum(), leaf)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    run("main")
    assert all(torch.equal(results[i], results["main"]) for i in range(3))


# ---------------------------------------------------------------- other people's wrappers


@pytest.mark.parametrize("kind", [CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT])
def test_the_wrapper_of_fsdp(kind):
    def make():
        model = Net(lambda block, x: block(x))
        wrap = functools.partial(checkpoint_wrapper, checkpoint_impl=kind)
        apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=lambda m: isinstance(m, Block))
        return model

    plain, same = Step(None, model=make), Step(None, session("lossless"), model=make)
    packed = Step(None, session("division"), model=make)
    assert same.equals(plain)
    found = boundaries(packed.session.report())
    assert {(s.site.module.split("._")[0], s.codec) for s in found} == {
        (f"blocks.{i}", "group_quant(8 bits, dithered)") for i in range(4)
    }


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_hugging_face_gradient_checkpointing(name, reentrant):
    transformers = pytest.importorskip("transformers")

    def make():
        torch.manual_seed(0)
        if name == "llama":
            config = transformers.LlamaConfig(
                vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4
            )
            model = transformers.LlamaForCausalLM(config)
        elif name == "gpt2":
            config = transformers.GPT2Config(vocab_size=64, n_embd=64, n_layer=3, n_head=4, n_positions=64)
            model = transformers.GPT2LMHeadModel(config)
        else:
            config = transformers.T5Config(
                vocab_size=64, d_model=64, d_ff=128, d_kv=16, num_layers=3, num_heads=4, decoder_start_token_id=0
            )
            model = transformers.T5ForConditionalGeneration(config)
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        return model

    def step(context):
        model = make()
        ids = torch.randint(64, (4, 64), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids)
        mask[:, 50:] = 0
        torch.manual_seed(1)
        with context(model) as opened:
            loss = model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss
        loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, opened

    (plain, _), (same, _) = step(contextlib.nullcontext), step(session("lossless"))
    packed, opened = step(session("actnn", level="L2"))
    assert plain.keys() == same.keys() == packed.keys()
    assert all(torch.equal(plain[n], same[n]) for n in plain)
    squares = sum(g.square().sum() for g in plain.values())
    assert float(sum((plain[n] - packed[n]).square().sum() for n in plain) / squares) ** 0.5 < 0.1
    found = [s for s in boundaries(opened.report()) if s.state == COMPRESSED]
    assert len(found) >= 2, opened.report()


def test_reversible_layers_of_reformer(monkeypatch):
    """Its layers seed themselves from the system, so two plain steps differ. With fixed seeds nothing else does."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ReformerConfig(
        attn_layers=["local", "lsh"],
        vocab_size=64,
        hidden_size=64,
        attention_head_size=16,
        num_attention_heads=4,
        feed_forward_size=128,
        axial_pos_shape=(8, 16),
        axial_pos_embds_dim=(32, 32),
        lsh_attn_chunk_length=16,
        local_attn_chunk_length=16,
        num_buckets=8,
        num_hashes=2,
        is_decoder=True,
        max_position_embeddings=128,
    )
    ids = torch.randint(64, (4, 128))

    def step(context):
        torch.manual_seed(0)
        model = transformers.ReformerModelWithLMHead(config).train()
        seeds = iter(range(10**9, 10**10, 7919))

        def seed():
            torch.manual_seed(found := next(seeds))
            return found

        monkeypatch.setattr(torch, "seed", seed)
        with context(model):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert all(map(torch.equal, step(contextlib.nullcontext), step(session("lossless"))))


class Experts(nn.Module):
    """Each row goes to the expert that its values choose."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(1, -1)
        result = x
        for number, expert in enumerate(self.experts):
            rows = (chosen[:, 0] == number).nonzero().squeeze(-1)
            result = result.index_add(0, rows, expert(x[rows]) * weights[rows])
        return result


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_that_pick_by_values_keep_their_inputs_exact(reentrant):
    """Noise in the input of a router sends rows to other experts, and the second run has other shapes."""
    torch.manual_seed(0)
    first, *blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Experts(), Experts()])
    model = nn.ModuleList([first, *blocks])
    model.forward = lambda x: torch_checkpoint(
        blocks[1], torch_checkpoint(blocks[0], first(x), use_reentrant=reentrant), use_reentrant=reentrant
    )
    handle = lowtide.attach(model, "actnn", level="L2", min_numel=0)
    x = torch.randn(512, WIDTH)
    for _ in range(3):
        model(x).square().mean().backward()
    rows = [s for s in handle.report().sites if s.site.op.startswith("Checkpoint") and s.state == "compressed"]
    assert len(rows) == 2
    assert all(row.codec.startswith("raw") for row in rows)
