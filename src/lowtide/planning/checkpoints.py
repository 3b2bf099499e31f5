"""A step in which some modules run once more in backward, worked out from the profile of a plain one.

A checkpointed module keeps what it was given until its backward has ended. Nothing that it saves outlives its forward.
Just before its backward begins, all that its forward made is made again: what it saves stays until backward has read
it, the rest goes as it went the first time. Torch stops the second run after the last tensor that is saved; here it
runs to its end, which is never less.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np

from .profiling import Block, Part, Profile, Saved
from .recorder import SAVED

_SIZES = 12
"""For so many numbers of checkpointed modules, at most, a plan is tried, in each of the orders."""


def candidates(profile: Profile, patterns: Sequence[str] = ()) -> tuple[Part, ...]:
    """The modules that a plan may checkpoint: those that match a pattern, outermost first, or else all blocks.

    Left out are those of which a checkpoint would keep at least as much as it drops.
    """
    named = [part for part in profile.parts if part.repeated and not patterns]
    for pattern in patterns:
        found = [part for part in profile.parts if fnmatchcase(part.path, pattern)]
        if not found:
            some = ", ".join(repr(part.path) for part in profile.parts[:4]) or "none"
            raise ValueError(
                f"blocks={pattern!r} matches no module that can run again; a module must be called once in the forward "
                f"and leave what it is given as it is. There are {some}{' and so on' * (len(profile.parts) > 4)}"
            )
        named += found
    outermost = [p for p in named if not any(o is not p and o.holds(p.path) and o.path != p.path for o in named)]
    unique = {part.path: part for part in outermost}.values()
    return tuple(part for part in unique if part.backward >= 0 and freed_nbytes(profile, part) > 0)


def freed_nbytes(profile: Profile, part: Part) -> int:
    """Bytes that are not kept from forward to backward if this module alone is checkpointed."""
    inside = _inner(profile, part)
    kept = {number for number in part.inputs if profile.blocks[number].died <= profile.forward_end}
    return sum(profile.blocks[n].nbytes for n in inside) - sum(profile.blocks[n].nbytes for n in kept)


def selections(profile: Profile, parts: Sequence[Part]) -> list[tuple[Part, ...]]:
    """Sets of modules worth trying, from none to all; which ones does not depend on any limit.

    The first are those whose second run takes least time for the bytes that it frees, or simply the first ones of the
    forward: they run again last, when later ones have given back what they held.
    """
    freed = {part.path: freed_nbytes(profile, part) for part in parts}
    by_worth = sorted(parts, key=lambda part: (part.share or freed[part.path]) / freed[part.path])
    by_time = sorted(parts, key=lambda part: part.first)
    sizes = sorted({round(k) for k in np.linspace(0, len(parts), min(len(parts), _SIZES) + 1)})
    found: dict[frozenset[str], tuple[Part, ...]] = {}
    for order in (by_time, by_worth):
        for k in sizes:
            chosen = tuple(sorted(order[:k], key=lambda part: part.first))
            found.setdefault(frozenset(part.path for part in chosen), chosen)
    return list(found.values())


def share_of(profile: Profile, part: Part) -> float:
    """The time of the second run as a part of the step's.

    Without data no time is known. A forward is about a third of a step, and what a module saves tells its share of it.
    """
    if part.share:
        return part.share
    return sum(profile.blocks[n].nbytes for n in _inner(profile, part)) / max(1, 3 * profile.saved_nbytes)


def checkpointed(profile: Profile, parts: Iterable[Part]) -> Profile:
    """The profile of the same step with these modules checkpointed. Tensors that they save are not in it."""
    order = sorted(parts, key=lambda part: part.backward)
    if not order:
        return profile
    later = later_moments(profile, order)
    by_block: dict[int, list[Saved]] = {}
    for each in profile.saved:
        by_block.setdefault(each.block, []).append(each)
    held: dict[int, int] = {}  # what checkpoints were given, and until when they keep it
    for part in order:
        for number in part.inputs:
            held[number] = max(held.get(number, 0), part.backward_end)
    gone = set(held)  # storages about which there is nothing left to decide
    ends: dict[int, int] = {}  # when the first copy of a storage is of no use any more
    second: list[Block] = []
    workspaces = [(later[at], nbytes) for at, nbytes in profile.workspaces]
    start = 0
    for number, part in enumerate(order):
        # What happened at a moment of the forward happens again so much later.
        start = part.backward + sum(p.last - p.first for p in order[:number])
        delay, end = start - part.first - 1, start + part.last - part.first - 1
        inner = set(_inner(profile, part))
        for i in _born_in(profile, part):
            block, own = profile.blocks[i], by_block.get(i, ())
            reads = [r for s in own for r in s.reads] if any(part.holds(s.module) for e in own for s in e.sites) else []
            inside = [last for first, last in reads if first >= part.backward]
            died = min(block.died + delay, end)
            if i in inner:
                gone.add(i)
                died = later[block.died]
                ends[i] = max((s.sealed for s in own), default=part.last)
            elif inside:
                died = max(end, later[max(inside)])
                before = [last for first, last in reads if first < part.backward]
                ends[i] = max(*before, *(s.sealed for s in own))
            second.append(block._replace(born=block.born + delay, died=max(block.born + delay, died)))
        workspaces += [(at + delay, nbytes) for at, nbytes in profile.workspaces if part.first < at <= part.last]
        # What came in by another way than the arguments is perhaps kept by whoever gave it.
        gone |= {
            s.block
            for s in profile.saved
            if profile.blocks[s.block].born <= part.first and any(part.holds(site.module) for site in s.sites)
        }
    blocks = []
    for i, block in enumerate(profile.blocks):
        died = max(ends.get(i, block.died), held.get(i, 0), block.born)
        blocks.append(block._replace(born=later[block.born], died=later[died]))
    return dataclasses.replace(
        profile,
        times=later[profile.times],
        blocks=(*blocks, *second),
        saved=tuple(_outside(profile, order, gone, ends, later)),
        workspaces=tuple(workspaces),
        parts=(),
    )


def later_moments(profile: Profile, parts: Iterable[Part]) -> list[int]:
    """The new moment of each moment of the plain step: second runs come before backward of their modules."""
    moments = np.arange(profile.times + 1)
    for part in parts:
        moments[part.backward :] += part.last - part.first
    found: list[int] = moments.tolist()
    return found


def _outside(
    profile: Profile, order: Sequence[Part], gone: set[int], ends: Mapping[int, int], later: Sequence[int]
) -> list[Saved]:
    """Saved tensors about which a plan still decides, as later modules read them."""
    found, renamed = [], {}
    for each in profile.saved:
        if each.block in gone:
            continue
        sites = tuple(site for site in each.sites if not any(part.holds(site.module) for part in order))
        renamed[each.sites[0]] = sites[0]
        end = ends.get(each.block, profile.times)
        reads, bits, codes = (
            tuple((later[a], later[b]) for a, b in r if b <= end) for r in (each.reads, each.bit_reads, each.code_reads)
        )
        sealed = later[each.sealed]
        found.append(
            dataclasses.replace(each, sites=sites, sealed=sealed, reads=reads, bit_reads=bits, code_reads=codes)
        )
    return [
        dataclasses.replace(s, sources=tuple((renamed.get(site, site), gain) for site, gain in s.sources))
        for s in found
    ]


def _inner(profile: Profile, part: Part) -> list[int]:
    """The numbers of storages that only the module's own nodes keep for backward."""
    known = {saved.block for saved in profile.saved}
    others = {saved.block for saved in profile.saved if not all(part.holds(site.module) for site in saved.sites)}
    others |= set(part.outputs) - known
    return [
        i
        for i in _born_in(profile, part)
        if i not in others and profile.blocks[i].role == SAVED and profile.blocks[i].died > profile.forward_end
    ]


def _born_in(profile: Profile, part: Part) -> range:
    """The numbers of the storages that the forward of the module made; storages are in the order of their birth."""
    first = bisect.bisect_right(profile.blocks, part.first, key=lambda block: block.born)
    return range(first, bisect.bisect_right(profile.blocks, part.last, key=lambda block: block.born))
