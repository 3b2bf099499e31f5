"""Codecs: frozen values that turn a tensor into packed buffers and back."""

from .base import Codec, NotRepresentable, Packed, TensorMeta, from_config, registered
from .fixed import SixSigma
from .lossless import Indices, Mask, PoolOffsets, Raw, ShapeOnly, TwoValue
from .lossy import FLOATS, BlockMean, Cast, Derived, GroupQuant, SampleQuant
from .projection import Projection

__all__ = [
    "FLOATS",
    "BlockMean",
    "Cast",
    "Codec",
    "Derived",
    "GroupQuant",
    "Indices",
    "Mask",
    "NotRepresentable",
    "Packed",
    "PoolOffsets",
    "Projection",
    "Raw",
    "SampleQuant",
    "ShapeOnly",
    "SixSigma",
    "TensorMeta",
    "TwoValue",
    "from_config",
    "registered",
]
