"""Which codec class an id names: definitions that replace each other, rivals, and configs that name nothing."""

from __future__ import annotations

import gc
import json
import sys
import types
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

from lowtide.codecs import Codec, GroupQuant, Packed, PoolOffsets, Projection, Raw, TensorMeta, from_config, registered


class Copying:
    """The three methods that a codec must have, for classes whose definition alone is tested."""

    def encode(self, tensor: Tensor, *, key: int, support: Tensor | None = None) -> Packed:
        return Packed(self, TensorMeta.of(tensor), (tensor.clone(),))  # type: ignore[arg-type]

    def decode(self, packed: Packed, *, support: Tensor | None = None) -> Tensor:
        return packed.buffers[0].clone()

    def packed_nbytes(self, meta: TensorMeta) -> int:
        return meta.nbytes


@pytest.fixture
def forget():
    """No class of one test is left for the next."""
    gc.collect()
    before = set(registered())
    yield
    gc.collect()
    assert set(registered()) == before


def run_cell(source: str, **names: object) -> Any:
    """What a notebook cell defines: each run makes new classes of the same names in one module."""
    module = types.ModuleType("cell")
    module.__dict__.update(Codec=Codec, Copying=Copying, GroupQuant=GroupQuant, dataclass=dataclass, **names)
    sys.modules["cell"] = module  # where dataclass looks for names in annotations
    try:
        exec(source, module.__dict__)
    finally:
        del sys.modules["cell"]
    return module


CELL = """
@dataclass(frozen=True)
class Mine(Copying, Codec):
    id = "mine"
    bits: int = 2
"""


def test_a_codec_with_slots(forget):
    """``slots=True`` makes a second class and leaves the first one alive."""
    cell = run_cell(CELL.replace("frozen=True", "frozen=True, slots=True"))
    assert registered()["mine"] is cell.Mine
    codec = cell.Mine(3)
    again = from_config(json.loads(json.dumps(codec.to_config())))
    assert again == codec
    assert type(again) is cell.Mine


def test_the_newest_definition_is_the_codec(forget):
    first = run_cell(CELL)
    second = run_cell(CELL)
    assert first.Mine is not second.Mine
    assert registered()["mine"] is second.Mine
    assert type(from_config(first.Mine(5).to_config())) is second.Mine


def test_the_newest_definition_is_the_codec_below_another_base(forget):
    """The order in which subclasses are found is not the order of their definition."""
    base = run_cell(CELL.replace("Mine", "Base").replace("mine", "base")).Base
    first = run_cell(CELL)
    second = run_cell(CELL.replace("Copying, Codec", "Base"), Base=base)
    assert Codec.__subclasses__().index(base) < Codec.__subclasses__().index(first.Mine)
    assert registered()["mine"] is second.Mine


def test_two_classes_with_one_id_are_refused(forget):
    cell = run_cell(CELL + CELL.replace("class Mine", "class Other"))
    with pytest.raises(ValueError, match=r"two codecs share the id 'mine': cell\.Mine and cell\.Other; give one of"):
        registered()
    with pytest.raises(ValueError, match="share the id 'mine'"):
        from_config({"id": "raw"})
    del cell
    assert "mine" not in registered()  # a class that nobody uses is no rival, whenever the collector runs


def test_an_id_of_ours_is_refused(forget):
    cell = run_cell(CELL.replace("mine", "raw"))
    with pytest.raises(ValueError, match=r"share the id 'raw': lowtide\.codecs\.lossless\.Raw and cell\.Mine"):
        registered()
    del cell


def test_a_subclass_of_a_codec_is_a_codec(forget):
    cell = run_cell("""
@dataclass(frozen=True)
class Finer(GroupQuant):
    id = "finer"
    bits: int = 8

@dataclass(frozen=True)
class Finest(Finer):
    id = "finest"
    group: int = 16
""")
    assert registered()["finer"] is cell.Finer
    assert registered()["finest"] is cell.Finest
    assert registered()["group_quant"] is GroupQuant
    assert from_config({"id": "finest", "layout": "flat"}) == cell.Finest(8, 16, "flat")


def test_a_class_without_an_id_is_no_codec_yet(forget):
    """A base for several codecs has no id; one that inherits its id could not be told from its parent."""
    cell = run_cell("""
class Base(Codec):
    pass

@dataclass(frozen=True)
class Named(Copying, Base):
    id = "named"

@dataclass(frozen=True)
class Nameless(Copying, Codec):
    pass

@dataclass(frozen=True)
class Heir(GroupQuant):
    pass
""")
    assert registered()["named"] is cell.Named
    assert {cell.Base, cell.Nameless, cell.Heir}.isdisjoint(registered().values())
    for made in (cell.Nameless(), cell.Heir()):
        with pytest.raises(TypeError, match=rf"cell\.{type(made).__name__} has no id of its own"):
            made.to_config()


@pytest.mark.parametrize("config", [None, "raw", ["raw"], [("id", "raw")], 7, Raw()], ids=repr)
def test_a_config_is_a_mapping(config):
    with pytest.raises(TypeError, match=r"must be a mapping, as Codec\.to_config\(\) gives it; got "):
        from_config(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"unknown codec None in \{\}; known: .*group_quant.*raw"),
        ({"bits": 2}, r"unknown codec None in \{'bits': 2\}; known: "),
        ({"id": "zip"}, "unknown codec 'zip' in .*; known: .*raw"),
        ({"id": ["raw"]}, r"unknown codec \['raw'\] in "),
        ({"id": GroupQuant}, "unknown codec <class .*GroupQuant'> in "),
        ({"id": "raw", "bits": 2}, r"does not fit codec 'raw', whose settings are: none \(.*'bits'"),
        ({"id": "group_quant", "bit": 2}, r"'bit': 2.* does not fit codec 'group_quant', .*: bits, group, layout, lev"),
        ({"id": "group_quant", 3: 2}, "does not fit codec 'group_quant', whose settings are: bits, group"),
        ({"id": "projection"}, r"does not fit codec 'projection', .*: rank, bits, kind, group \(.*'rank'"),
        ({"id": "indices", "low": 3}, "does not fit codec 'indices', whose settings are: low, high .*'high'"),
        ({"id": "group_quant", "bits": "2"}, "bits must be one of 1, 2, 3, 4, 5, 6, 7, 8; got '2'"),
        ({"id": "group_quant", "bits": [2]}, r"bits must be one of 1, 2, 3, 4, 5, 6, 7, 8; got \(2,\)"),
        ({"id": "group_quant", "bits": None}, "bits must be one of 1, 2, 3, 4, 5, 6, 7, 8; got None"),
    ],
    ids=repr,
)
def test_a_config_that_fits_no_codec_is_named(config, message):
    with pytest.raises(ValueError, match=message):
        from_config(config)


def test_lists_of_a_config_become_tuples():
    pool = PoolOffsets((8, 8), (2, 2), (2, 2), (0, 0), (1, 1))
    assert from_config(json.loads(json.dumps(pool.to_config()))) == pool
    assert from_config({"id": "projection", "rank": 3}) == Projection(3)


def test_values_are_kept_by_all_but_the_special_codecs():
    """What may stand for any saved float tensor; the others answer questions that one kind of op asks."""
    ours = {name: cls for name, cls in registered().items() if cls.__module__.startswith("lowtide.")}
    special = {name for name, cls in ours.items() if not cls.keeps_values}
    assert special == {"shape_only", "mask", "two_value", "indices", "pool_offsets"}
    assert Codec.keeps_values
