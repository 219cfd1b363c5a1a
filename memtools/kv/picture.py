"""The still picture of a KVPool, which a notebook shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtools._base import picture
from memtools._base.picture import Part
from memtools._base.size import format_bytes
from memtools._base.text import count

if TYPE_CHECKING:
    from memtools.kv.pool import KVPool, KVStats

NAMES = 8  # of leases that views keep


def picture_of_pool(pool: KVPool) -> str:
    """The picture as HTML without a script; of a pool that is closed, or of another process, its
    name alone."""
    try:
        stats = None if pool.closed else pool.stats()
    except RuntimeError:  # a forked child
        stats = None
    if stats is None:
        return picture.card(picture.heading(repr(pool)))
    kind = f"{str(pool.dtype).removeprefix('torch.')}, {pool.device}"
    shape = f"{pool.num_layers} layers x {pool.num_kv_heads} heads x {pool.head_dim}, {kind}"
    lingering = [picture.line(f"kept by views: {name}") for name in stats.lingering_names[:NAMES]]
    return picture.card(
        picture.heading(pool.name),
        picture.line(shape, soft=True),
        _pages(stats),
        picture.table(_rows(stats), right=(1,)),
        *lingering,
    )


def _pages(stats: KVStats) -> str:
    """The pages as a bar, against the limit where there is one; else against the most so far."""
    promised = max(0, stats.promised_bytes - stats.idle_bytes)
    parts = [
        Part("live, of one row", stats.live_bytes - stats.shared_bytes, "s0"),
        Part("live, shared", stats.shared_bytes, "s1"),
        Part("idle", stats.idle_bytes, "s7"),
        Part("promised", promised, "s3"),
    ]
    whole = stats.limit_bytes or max(stats.peak_bytes, stats.reserved_bytes)
    return picture.bar(parts, whole, mark=("peak", stats.peak_bytes))


def _rows(stats: KVStats) -> list[tuple[str, str, str]]:
    limit = "no limit" if stats.limit_bytes is None else f"of {format_bytes(stats.limit_bytes)}"
    leases = f"{count(stats.rows, 'row')}; {stats.acquired:,} acquired, {stats.forked:,} forked"
    blocks = f"{stats.taken:,} from the system, {stats.copied:,} copied for a row that wrote"
    return [
        ("reserved", format_bytes(stats.reserved_bytes), limit),
        ("peak", format_bytes(stats.peak_bytes), "live and idle"),
        ("copies would take", format_bytes(stats.payload_bytes), "if no row shared a page"),
        ("leases", f"{stats.leases:,}", leases),
        ("blocks used again", f"{stats.recycled:,}", blocks),
    ]
