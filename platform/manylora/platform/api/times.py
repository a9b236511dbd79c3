"""Times as clients write and read them; inside they are UTC microseconds."""

from datetime import UTC, datetime, timedelta

from manylora.platform.errors import InvalidInputError

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MAX_SECONDS = 253_402_300_800  # the year 10000


def parse_time(value: str | int, *, param: str) -> int:
    """Unix seconds, or ISO 8601 (UTC where it names no zone), in microseconds.

    Raises:
        InvalidInputError
    """
    if isinstance(value, str) and not value.isdecimal():
        return _parse_iso(value, param)
    if len(str(value)) > 15 or not 0 <= int(value) <= _MAX_SECONDS:
        raise InvalidInputError(f"{param} is out of range", param=param)
    return int(value) * 1_000_000


def _parse_iso(value: str, param: str) -> int:
    try:
        moment = datetime.fromisoformat(value)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return (moment - _EPOCH) // timedelta(microseconds=1)
    except (ValueError, OverflowError) as error:
        raise InvalidInputError(
            f"{param} must be Unix seconds or ISO 8601, such as 2026-11-30T12:00:00Z", param=param
        ) from error


def to_seconds(moment_us: int | None) -> int | None:
    """Unix seconds, as the OpenAI API tells times."""
    return None if moment_us is None else moment_us // 1_000_000


def to_iso(moment_us: int) -> str:
    """ISO 8601 in UTC to the microsecond."""
    moment = _EPOCH + timedelta(microseconds=moment_us)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
