"""Low rank: what the random and the fitted projection promise beyond the contract of every codec.

Keys and seeds are fixed. A mean over N keys may differ from its expectation by 4.5 standard errors: a chance of
7e-6 for each of the tested numbers, which are a few thousand at most.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide
from lowtide.codecs import Cast, Codec, GroupQuant, Mask, Projection, TensorMeta, from_config, projection
from lowtide.codecs.projection import signs
from lowtide.graph.capture import Site
from lowtide.graph.rules import Need
from lowtide.policy.methods import resolve
from lowtide.policy.use import Use

CPU = torch.device("cpu")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SIGMAS = 4.5


def _matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def _decodes(codec: Codec, x: Tensor, keys: int) -> Tensor:
    return torch.stack([codec.encode(x, key=_key(k)).decode() for k in range(keys)]).double()


def _key(number: int) -> int:
    """Keys that differ in both words, as those of a session do."""
    return number * 0x9E3779B97F4A7C15 % 2**64 - 2**63


def _assert_mean(samples: Tensor, wanted: Tensor, rounding: float = 0.0) -> None:
    error = (samples.mean(0) - wanted).abs()
    standard = samples.std(0) / samples.shape[0] ** 0.5
    assert bool((error <= SIGMAS * standard + rounding).all()), float((error / standard).max())


# ---------------------------------------------------------------- random signs


@pytest.mark.parametrize("keys", ["near", "far"])
def test_signs_are_fair_and_independent(keys: str) -> None:
    """Over keys each sign, and each product of two or of four, has mean 0 and variance 1."""
    count, rows, columns = 4000, 7, 70
    s = torch.stack([signs(rows, columns, k if keys == "near" else _key(k), CPU) for k in range(count)]).double()
    assert bool((s.abs() == 1).all())
    tests = {
        "one": s,
        "row": s[:, :, :1] * s[:, :, 1:],
        "column": s[:, :1] * s[:, 1:],
        "word": s[:, :, :32] * s[:, :, 32:64],
        "four": s[:, :1, :1] * s[:, :1, 1:] * s[:, 1:, :1] * s[:, 1:, 1:],
        "next key": s[1:] * s[:-1],
        "next key, shifted": s[1:, :-1] * s[:-1, 1:],
    }
    for name, t in tests.items():
        assert float(t.mean(0).abs().max()) <= SIGMAS / len(t) ** 0.5, name


def test_signs_do_not_depend_on_their_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = signs(100, 33, 5, CPU)
    monkeypatch.setattr(projection, "_CHUNK", 64)
    assert torch.equal(signs(100, 33, 5, CPU), whole)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bits", [0, 1, 2, 4, 8])
def test_random_is_unbiased(bits: int, dtype: torch.dtype) -> None:
    x = _matrix(5, 24).to(dtype)
    samples = _decodes(Projection(6, bits), x, 800)
    # What comes back is rounded to nearest once, y (without bits) once more: half a unit each of the largest.
    units = torch.finfo(dtype).eps * float(samples.abs().max())
    _assert_mean(samples, x.double(), units)


@pytest.mark.parametrize(("rank", "columns"), [(1, 5), (6, 24), (24, 24), (40, 24), (16, 65)])
def test_random_has_the_variance_of_the_formula(rank: int, columns: int) -> None:
    """E|error|^2 = (D - 1) / r |x|^2; the spread of its mean over keys is taken from the samples."""
    x = _matrix(3, columns)
    squares = (_decodes(Projection(rank), x, 1500) - x.double()).square().sum(2)
    _assert_mean(squares, (columns - 1) / rank * x.double().square().sum(1))


def test_random_equals_the_product_with_its_signs() -> None:
    x = _matrix(50, 40)
    r = signs(40, 12, 9, CPU).double() / 12**0.5
    wanted = x.double() @ r @ r.t()
    out = Projection(12).encode(x, key=9).decode().double()
    # Two products of 40 and 12 terms in float32.
    bound = 52 * 2.0**-24 * x.double().abs() @ r.abs() @ r.abs().t()
    assert bool(((out - wanted).abs() <= bound).all())


def test_rounding_and_signs_draw_from_different_numbers() -> None:
    """Chunks of one tensor are quantized with different keys: equal rows get different codes."""
    x = _matrix(1, 4096).expand(512, 4096).contiguous()
    packed = Projection(16, 2).encode(x, key=3)
    assert len(list(projection._chunks(512, 4096))) > 1
    first, second = packed.buffers[0].view(512, -1)[:128], packed.buffers[0].view(512, -1)[128:256]
    assert not torch.equal(first, second)


# ---------------------------------------------------------------- subspace


def _sketch(x: Tensor, rank: int, key: int) -> tuple[Tensor, Tensor]:
    """The test matrix and what the range finder takes its basis from, in float64."""
    test = signs(x.shape[1], rank, key, CPU).double()
    return test, x.double().t() @ (x.double() @ test)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("inner", [1, 4, 9])
def test_subspace_is_exact_where_the_rank_suffices(inner: int, dtype: torch.dtype) -> None:
    """Nothing but rounding remains: of the sketch in float32, then of the basis, y and the result.

    The sketch sums rows + columns terms in float32, so it is wrong by at most (rows + columns) 2^-24 of the sum of
    their magnitudes, which turns its range by that over its smallest singular value (Wedin). A basis of r columns
    with an error of half a unit in each value moves the projection by sqrt(r) units.
    """
    rows, columns, rank, key = 200, 48, 16, 4
    generator = torch.Generator().manual_seed(2)
    left, right = (torch.randint(-1, 2, s, generator=generator).double() for s in ((rows, inner), (inner, columns)))
    x = (left @ right).to(dtype)  # whole numbers up to 9: exact in every type
    test, sketch = _sketch(x, rank, key)
    wide = x.double()
    wrong = (rows + columns) * 2.0**-24 * (wide.abs().t() @ (wide.abs() @ test.abs())).norm()
    turned = wrong / torch.linalg.svdvals(sketch)[inner - 1]
    units = (rank**0.5 + 1) * torch.finfo(dtype).eps + (columns + rank) * 2.0**-23
    out = Projection(rank, kind="subspace").encode(x, key=key).decode()
    assert float((out.double() - wide).norm()) <= float(wide.norm() * (turned + 1.01 * units))
    assert float(turned + units) < 0.05  # the bound says something


@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0, 2.0])
def test_subspace_error_is_near_the_smallest(decay: float) -> None:
    """The structural bound of a range finder, which holds for every test matrix S (Halko et al. 2011, section 9).

    With singular vectors V = [V1 V2], V1 the first k: |error|^2 <= |s2|^2 + |s2^2 V2'S (V1'S)^+ s1^-1|^2. It holds
    for each k, so the smallest counts. The smallest error of any matrix of rank r is |s[r:]|.
    """
    rows, columns, rank = 120, 40, 12
    u, v = (torch.linalg.qr(_matrix(n, columns, n).double()).Q for n in (rows, columns))
    s = torch.arange(1, columns + 1).double() ** -decay
    x = (u * s @ v.t()).float()
    codec = Projection(rank, kind="subspace")
    ratios = []
    for key in map(_key, range(20)):
        test, _ = _sketch(x, rank, key)
        bounds = []
        for k in range(1, rank + 1):
            one, two = v[:, :k].t() @ test, v[:, k:].t() @ test
            excess = s[k:, None] ** 2 * (two @ torch.linalg.pinv(one)) / s[:k]
            bounds.append(s[k:].square().sum() + excess.square().sum())
        error = (codec.encode(x, key=key).decode().double() - x.double()).square().sum()
        assert float(error) <= float(min(bounds)) * (1 + columns * 2.0**-20)
        assert float(error) >= float(s[rank:].square().sum()) * (1 - columns * 2.0**-20)
        ratios.append(float(error / s[rank:].square().sum()))
    # Gaussian theory for half the columns as oversampling, without the gain from squaring: 1 + k / (p - 1).
    k, p = rank // 2, rank - rank // 2
    best = s[k:].square().sum() / s[rank:].square().sum()
    assert sum(ratios) / 20 <= (1 + k / (p - 1)) * float(best)


def test_subspace_beats_random_by_far_on_correlated_rows() -> None:
    x = _matrix(300, 6, 1) @ _matrix(6, 64, 2) + 0.1 * _matrix(300, 64, 3)
    fitted, random = (
        float((Projection(8, kind=kind).encode(x, key=1).decode() - x).norm() / x.norm())
        for kind in ("subspace", "random")
    )
    assert fitted < 0.05 < 2 < random


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_subspace_codes_are_unbiased_within_the_subspace(bits: int) -> None:
    """One key fixes the basis and the rounding; over many rows that are equal the rounding averages out."""
    rows = 2000
    x = _matrix(1, 24).expand(rows, 24).contiguous()
    exact = Projection(5, kind="subspace").encode(x, key=2).decode()[0].double()
    samples = Projection(5, bits, "subspace").encode(x, key=2).decode().double()
    _assert_mean(samples, exact, 24 * 2.0**-22 * float(x.abs().max()))


# ---------------------------------------------------------------- contract in detail


@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("kind", ["random", "subspace"])
def test_large_tensors_are_cut_without_a_trace(kind: str, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks change no result but by rounding (and the draw of codes)."""
    x = _matrix(100, 32)
    codec = Projection(8, bits, kind)
    whole = codec.encode(x, key=1).decode()
    monkeypatch.setattr(projection, "_CHUNK", 512)
    assert len(list(projection._chunks(100, 32))) == 7
    cut = codec.encode(x, key=1)
    assert cut.nbytes == codec.packed_nbytes(TensorMeta.of(x))
    if bits:
        assert float((cut.decode() - x).norm()) < 1.2 * float((whole - x).norm())
    else:
        # the sums of 100 rows and 32 columns in another order, over the gap in the spectrum
        assert torch.allclose(cut.decode(), whole, atol=1e-4)


@pytest.mark.parametrize("kind", ["random", "subspace"])
def test_no_wide_copy_of_a_16_bit_tensor(kind: str) -> None:
    """Every tensor made on the way is far smaller than the input in float32."""
    x = _matrix(16384, 128).bfloat16()
    seen: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            for t in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(t, Tensor) and t.dtype != x.dtype:
                    seen.append(t.untyped_storage().nbytes())
            return result

    codec = Projection(32, 4, kind)
    with Watch():
        codec.encode(x, key=1).decode()
    assert seen
    assert max(seen) <= x.numel() * 4 // 4 + 4096


@pytest.mark.parametrize("kind", ["random", "subspace"])
@pytest.mark.parametrize("bits", [0, 2])
def test_autocast_does_not_touch_the_product(kind: str, bits: int) -> None:
    x = _matrix(64, 48)
    codec = Projection(12, bits, kind)
    plain = codec.encode(x, key=1)
    with torch.autocast("cpu", torch.bfloat16):
        inside = codec.encode(x, key=1)
        decoded = inside.decode()
    assert all(map(torch.equal, plain.buffers, inside.buffers))
    assert torch.equal(decoded, plain.decode())


@pytest.mark.parametrize("kind", ["random", "subspace"])
@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("rank", [1, 5])
def test_a_bad_row_is_all_nan(bad: float, bits: int, kind: str, rank: int) -> None:
    x = _matrix(6, 16)
    x[2, 7] = bad
    out = Projection(rank, bits, kind).encode(x, key=1).decode()
    hit = torch.zeros(6, 16, dtype=torch.bool)
    hit[2 if kind == "random" else slice(None)] = True
    assert torch.equal(out.isnan(), hit)
    assert bool(out[~hit].isfinite().all())


@pytest.mark.parametrize("kind", ["random", "subspace"])
def test_large_halves_stay_finite(kind: str) -> None:
    """y is scaled so that float16 holds it; what a random product adds beyond 65504 is cut there."""
    x = (torch.rand(64, 256, generator=torch.Generator().manual_seed(1)) * 60000).half()
    out = Projection(64, kind=kind).encode(x, key=1).decode()
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bits", [0, 4])
def test_support_restores_zeros(bits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = _matrix(37, 21).relu().to(dtype)
    codec = Projection(6, bits)
    support = Mask().encode(x, key=0).buffers[0]
    for _ in range(2):
        packed = codec.encode(x, key=3, support=support)
        masked, plain = packed.decode(support), packed.decode()
        assert torch.equal(masked[x > 0], plain[x > 0])
        assert not bool(masked[x == 0].any())
        monkeypatch.setattr(projection, "_CHUNK", 200)
    bad = x.clone()
    bad[3, 3] = torch.nan
    support = Mask().encode(bad, key=0).buffers[0]
    assert bool(codec.encode(bad, key=3, support=support).decode(support)[3].isnan().all())


# ---------------------------------------------------------------- method


def _use(need: Need, shape: tuple[int, ...], spatial: bool = False, stride: tuple[int, ...] | None = None) -> Use:
    meta = TensorMeta.of(torch.empty(shape)) if stride is None else TensorMeta(shape, stride, torch.float32)
    return Use(need, meta, spatial, (Site("m", "Addmm", "mat1", 0),))


@pytest.mark.parametrize(
    ("options", "use", "codec"),
    [
        ({"rank": 8}, _use(Need.LINEAR, (100, 64)), Projection(8)),
        ({"rank": 0.1}, _use(Need.LINEAR, (10, 10, 64)), Projection(7)),
        ({"rank": 0.5}, _use(Need.LINEAR, (64, 100), stride=(1, 64)), Projection(32)),
        (
            {"rank": 8, "kind": "subspace", "bits": 4, "group": 64},
            _use(Need.LINEAR, (9, 64)),
            Projection(8, 4, "subspace", 64),
        ),
        ({"rank": 64}, _use(Need.LINEAR, (100, 64)), GroupQuant(2, 256, "row")),
        ({"rank": 8}, _use(Need.LINEAR, (100, 16)), GroupQuant(2, 256, "row")),
        ({"rank": 8}, _use(Need.LINEAR, (6400,)), GroupQuant(2, 256, "row")),
        ({"rank": 8}, _use(Need.LINEAR, (4, 8, 64, 64), spatial=True), GroupQuant(2, 256, "sample")),
        ({"rank": 8}, _use(Need.PROPAGATE, (100, 64)), GroupQuant(4, 256, "row")),
        ({"rank": 8, "propagating_bits": 2}, _use(Need.PROPAGATE, (100, 64)), GroupQuant(2, 256, "row")),
        ({"rank": 8, "other_bits": 8}, _use(Need.BATCH, (100, 64)), GroupQuant(8, 256, "row")),
        ({"rank": 8}, _use(Need.LOGARITHM, (100, 64)), Cast("bfloat16")),
    ],
)
def test_lowrank_projects_the_inputs_of_linear_layers(options: dict, use: Use, codec: Codec) -> None:  # type: ignore[type-arg]
    assert resolve("lowrank", options).choose(use).codec == codec


@pytest.mark.parametrize("rank", [0, -1, 1.0, 0.0, 1.5, True, "8", None])
def test_lowrank_names_a_bad_rank(rank: object) -> None:
    with pytest.raises(ValueError, match="rank must be a whole number of at least 1 or a fraction below 1; got"):
        resolve("lowrank", {"rank": rank})


@pytest.mark.parametrize("options", [{"bits": 9}, {"kind": "svd"}, {"other_bits": 0}, {"group": 0}])
def test_lowrank_checks_its_options(options: dict) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match="must be"):
        resolve("lowrank", options)


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 48), nn.ReLU(), nn.Linear(48, 36), nn.ReLU(), nn.Linear(36, 3))


@pytest.mark.parametrize(
    "options", [{"rank": 0.25}, {"rank": 12, "bits": 4}, {"rank": 12, "kind": "subspace"}], ids=str
)
def test_bytes_and_forward(options: dict) -> None:  # type: ignore[type-arg]
    net, x = _net(), _matrix(256, 40)
    plain = net(x)
    with lowtide.compress(net, "lowrank", **options) as session:
        out = net(x.clone())
    assert torch.equal(out, plain)
    projected = [s for s in session.report().sites if "projection" in s.codec]
    assert [s.site.module for s in projected] == ["0", "1", "3"]
    for row in projected:
        rank = options["rank"] if isinstance(options["rank"], int) else -(-row.shape[1] // 4)
        codec = Projection(rank, options.get("bits", 0), options.get("kind", "random"))
        meta = TensorMeta.of(torch.empty(row.shape))
        assert row.stored_nbytes == codec.packed_nbytes(meta) + (row.shape[0] * row.shape[1] // 8) * (
            row.site.op == "Relu"
        )
    out.sum().backward()


def test_weight_gradients_are_unbiased() -> None:
    """Linear inputs are read linearly, masks are exact: every gradient's mean is the exact gradient."""
    net, x, y = _net(), _matrix(128, 40), _matrix(128, 3, 1)
    F.mse_loss(net(x), y).backward()
    exact = {name: p.grad.double() for name, p in net.named_parameters()}
    samples: dict[str, list[Tensor]] = {name: [] for name in exact}
    for seed in range(400):
        net.zero_grad()
        # The loss reads 384 values, whose noise would reach all gradients.
        with lowtide.compress(net, "lowrank", rank=0.5, bits=4, seed=seed, min_numel=512):
            loss = F.mse_loss(net(x.clone()), y)
        loss.backward()
        for name, p in net.named_parameters():
            samples[name].append(p.grad.double())
    for name, wanted in exact.items():
        drawn = torch.stack(samples[name])
        if name.endswith("bias"):
            assert torch.equal(drawn, wanted.expand_as(drawn))
        else:
            assert float(drawn.std(0).mean()) > 0.01 * float(wanted.abs().mean())
            # sums of 128 products in float32
            _assert_mean(drawn, wanted, 128 * 2.0**-24 * float(drawn.abs().max()))


def test_config_round_trip() -> None:
    codec = Projection(7, 2, "subspace", 64)
    config = codec.to_config()
    assert config == {"id": "projection", "rank": 7, "bits": 2, "kind": "subspace", "group": 64}
    assert from_config(config) == codec
    assert str(codec) == "projection(rank=7, bits=2, kind=subspace, group=64)"
