"""Codecs: frozen values that turn a tensor into packed buffers and back."""

from .base import FLOATS, Codec, NotRepresentable, Packed, TensorMeta, flatten, from_config, registered
from .blocks import BlockMean
from .casts import Cast
from .groups import GroupQuant, SampleQuant
from .logarithms import LogQuant
from .lossless import Indices, Mask, PoolOffsets, Raw, ShapeOnly, TwoValue
from .projection import Projection
from .sixsigma import SixSigma

__all__ = [
    "FLOATS",
    "BlockMean",
    "Cast",
    "Codec",
    "GroupQuant",
    "Indices",
    "LogQuant",
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
    "flatten",
    "from_config",
    "registered",
]
