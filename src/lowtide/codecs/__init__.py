"""Codecs: frozen values that turn a tensor into packed buffers and back."""

from .base import Codec, NotRepresentable, Packed, TensorMeta, from_config, registered
from .lossless import Indices, Mask, PoolOffsets, Raw, ShapeOnly, TwoValue
from .lossy import FLOATS, BlockMean, Cast, GroupQuant, SampleQuant

__all__ = [
    "FLOATS",
    "BlockMean",
    "Cast",
    "Codec",
    "GroupQuant",
    "Indices",
    "Mask",
    "NotRepresentable",
    "Packed",
    "PoolOffsets",
    "Raw",
    "SampleQuant",
    "ShapeOnly",
    "TensorMeta",
    "TwoValue",
    "from_config",
    "registered",
]
