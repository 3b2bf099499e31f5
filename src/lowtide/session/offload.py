"""Where packed bytes live: beside the computation, in host memory, or in a file (ActNN's levels 4 and 5).

Decoding gives the same values from every home, on the device that encoded them. Bytes go to host memory and back
beside the computation, where the device has streams; see :mod:`.transfers`. A file is written and read at once.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..codecs import Packed
from .streams import Copies, on_host, stream_of
from .transfers import Orders, Ticket, Transfers

IN_FLIGHT = 256 << 20
"""Bytes of a device that are on their way to the host, or back before they are read, at most; or one tensor."""

_PLACES = {"host": "in host memory", "file": "in a file"}
_ALIGNED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved(Packed):
    """Packed bytes that left the device; ``nbytes`` are those of the new home."""

    device: torch.device
    home: str
    ticket: Ticket | None = None
    """What brings them back, if they travel beside the computation."""

    def decode(self, support: Tensor | None = None) -> Tensor:
        """The tensor again, on its own device."""
        return fetch(self).decode(support)


def place_away(home: str, device: torch.device) -> str | None:
    """Where bytes of a home other than the device lie, for a reader; None if they stay where they are."""
    return None if home == "device" or (home == "host" and device.type == "cpu") else _PLACES[home]


def send(packed: Packed, home: str) -> Packed:
    """The same bytes in another home, at once."""
    if home == "host":
        return to_host(packed)
    return to_file(packed) if home == "file" else packed


def fetch(packed: Packed) -> Packed:
    """The same bytes on the device that decodes them, without a copy if they are there."""
    if not isinstance(packed, Moved):
        return packed
    ticket = packed.ticket
    buffers = tuple(b.to(packed.device) for b in packed.buffers) if ticket is None else ticket.fetch()
    return Packed(packed.codec, packed.meta, buffers, packed.key)


def device_of(packed: Packed) -> torch.device:
    """The device that decodes them."""
    return packed.device if isinstance(packed, Moved) else packed.buffers[0].device


class Homes:
    """Where one session sends packed bytes; ``orders`` has what was learned of its backward, for each device."""

    def __init__(self, orders: dict[str, Orders]) -> None:
        self._orders = orders
        self._travelling: dict[torch.device, Transfers] = {}

    def begin(self) -> None:
        """Another forward."""
        for transfers in self._travelling.values():
            transfers.begin()

    def send(self, packed: Packed, home: str) -> Packed:
        """The same bytes in another home, or on their way to it. The caller lets go of ``packed``."""
        device, stream = packed.buffers[0].device, stream_of(packed.buffers[0])
        if home != "host" or stream is None:
            return send(packed, home)
        transfers = self._travelling.get(device)
        if transfers is None:
            transfers = Transfers(IN_FLIGHT, self._orders.setdefault(str(device), {}))
            self._travelling[device] = transfers
        ticket = transfers.send(Copies(device, stream), packed.buffers, packed.nbytes)
        return Moved(packed.codec, packed.meta, ticket.held, packed.key, device=device, home=home, ticket=ticket)


def to_host(packed: Packed) -> Packed:
    """Buffers of an accelerator in host memory, pinned where that is possible; those of a CPU are there already."""
    if packed.buffers[0].device.type == "cpu":
        return packed
    return _moved(packed, [on_host(b).copy_(b) for b in packed.buffers], "host")


def _moved(packed: Packed, buffers: list[Tensor], home: str) -> Moved:
    device = packed.buffers[0].device
    return Moved(packed.codec, packed.meta, tuple(buffers), packed.key, device=device, home=home)


def to_file(packed: Packed, folder: str | os.PathLike[str] | None = None) -> Packed:
    """Buffers in one memory-mapped file without a name, whose pages the kernel may write out when memory is short.

    ``folder`` is the system's folder for temporary files (``TMPDIR``) unless given; it has to be on a disk, since a
    folder in memory saves none. The file's name is gone before any value is written, so nothing is left behind,
    whatever ends the process; its room is given back with the last reader.
    """
    if packed.nbytes == 0:
        return packed
    starts, size = [], 0
    for buffer in packed.buffers:
        starts.append(size)
        size += -(-buffer.numel() * buffer.element_size() // _ALIGNED) * _ALIGNED
    mapped = _mapped(size, Path(tempfile.gettempdir() if folder is None else folder))
    buffers = []
    for start, buffer in zip(starts, packed.buffers, strict=True):
        own = mapped[start : start + buffer.numel() * buffer.element_size()]
        buffers.append(own.view(buffer.dtype).view(buffer.shape).copy_(buffer))
    return _moved(packed, buffers, "file")


def _mapped(size: int, folder: Path) -> Tensor:
    """Memory of a file that has no name any more.

    Its room is taken first: a write to a mapped file on a full disk would kill the process.
    """
    free = shutil.disk_usage(folder).free
    if free < size:
        raise _full(size, folder, free)
    descriptor, name = tempfile.mkstemp(prefix="lowtide-", dir=folder)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        return torch.from_file(name, shared=True, size=size, dtype=torch.uint8)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _full(size, folder, shutil.disk_usage(folder).free) from error
        raise
    finally:
        os.close(descriptor)
        Path(name).unlink()


def _full(size: int, folder: Path, free: int) -> OSError:
    return OSError(
        errno.ENOSPC,
        f"packed activations need {size} bytes and {free} are free; make room, set TMPDIR to a larger disk, or leave "
        "home='file'",
        str(folder),
    )
