"""Identifiers and times as the database keeps them."""

import secrets
import time


def new_id(prefix: str) -> str:
    """A prefixed UUIDv7 in hex (RFC 9562 §5.7): sorts by the millisecond it was made in."""
    value = (time.time_ns() // 1_000_000) << 80 | 0x7 << 76 | secrets.randbits(76)
    value = value & ~(0x3 << 62) | 0x2 << 62
    return f"{prefix}_{value:032x}"


def now_us() -> int:
    """UTC now in microseconds."""
    return time.time_ns() // 1_000
