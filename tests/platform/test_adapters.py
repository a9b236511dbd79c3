"""Reads are whole whatever happens meanwhile; aliases move by compare-and-set."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import delete, event
from sqlalchemy.exc import IntegrityError

from manylora.platform.adapters import find_adapter_named, list_adapters, move_alias
from manylora.platform.errors import ConflictError, InvalidInputError
from manylora.platform.models import AdapterVersion
from support.app import TestBed
from support.registry import remove, upload, view


@contextmanager
def before_read(bed: TestBed, number: int, act: Callable[[], object]) -> Iterator[None]:
    """Let `act` happen before the number-th read (from 1) of versions or aliases."""
    engine, reads = bed.services.db.engine, 0

    def count(_c: object, _u: object, statement: str, *_: object) -> None:
        nonlocal reads
        if statement.startswith("SELECT adapter_"):
            reads += 1
            if reads == number:
                act()

    event.listen(engine, "before_cursor_execute", count)
    yield
    event.remove(engine, "before_cursor_execute", count)
    assert reads >= number


def test_an_alias_moves_only_from_where_it_was_thought_to_be(bed: TestBed) -> None:
    for weights in (b"1", b"2", b"3"):
        upload(bed, "mine", weights)

    def move(alias: str, number: int, expected: int | None = None) -> int:
        with bed.services.db.write() as session:
            found = find_adapter_named(session, bed.tenant_ids["acme"], "mine")
            assert found is not None
            return move_alias(session, found, alias, number, expected=expected).generation

    assert move("live", 2, expected=1) == 2
    with pytest.raises(ConflictError):
        move("live", 3, expected=1)
    assert move("stable", 1) == 1
    assert move("stable", 3) == 2
    with pytest.raises(InvalidInputError, match="version"):
        move("live", 4)
    with pytest.raises(InvalidInputError, match="alias"):
        move("v2", 2)
    now = view(bed, "mine")
    assert {a.alias: now.at(a.alias).number for a in now.aliases} == {"live": 2, "stable": 3}


def test_a_move_from_a_stale_view_is_a_conflict(bed: TestBed) -> None:
    for weights in (b"1", b"2", b"3"):
        upload(bed, "mine", weights)
    stale = view(bed, "mine")
    with bed.services.db.write() as session:
        move_alias(session, stale, "live", 2)

    with pytest.raises(ConflictError), bed.services.db.write() as session:
        move_alias(session, stale, "live", 3)


def test_of_two_that_make_an_alias_at_once_the_second_is_told(bed: TestBed) -> None:
    for weights in (b"1", b"2"):
        upload(bed, "mine", weights)
    stale = view(bed, "mine")
    with bed.services.db.write() as session:
        move_alias(session, stale, "stable", 1)

    with pytest.raises(ConflictError), bed.services.db.write() as session:
        move_alias(session, stale, "stable", 2)


@pytest.mark.parametrize("number", [1, 2])
def test_a_promotion_amid_a_read_breaks_nothing(bed: TestBed, number: int) -> None:
    upload(bed, "mine", b"1")

    with before_read(bed, number, lambda: upload(bed, "mine", b"2", promote=True)):
        live = view(bed, "mine").live

    assert live is not None
    assert live.number in (1, 2)


@pytest.mark.parametrize("number", [1, 2])
def test_a_deletion_amid_a_read_leaves_a_whole_adapter_or_none(bed: TestBed, number: int) -> None:
    upload(bed, "mine", b"1")

    with (
        before_read(bed, number, lambda: remove(bed, "mine")),
        bed.services.db.read() as session,
    ):
        found = find_adapter_named(session, bed.tenant_ids["acme"], "mine")

    assert found is None or found.live is not None


def test_an_alias_cannot_point_outside_its_adapter(bed: TestBed) -> None:
    """The composite foreign keys hold, whatever the code above them does."""
    mine, theirs = view(bed, "pirate"), view(bed, "json", "globex")

    with bed.services.db.write() as session:
        alias = session.merge(mine.aliases[0])
        alias.version_id = theirs.versions[0].id
        with pytest.raises(IntegrityError, match=r"(?i)foreign key"):
            session.flush()
        session.rollback()


def test_lists_take_three_statements_however_many_adapters(bed: TestBed) -> None:
    for number in range(5):
        upload(bed, f"a{number}", bytes([number]))
    statements: list[str] = []
    engine = bed.services.db.engine

    def note(_c: object, _u: object, statement: str, *_: object) -> None:
        statements.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    with bed.services.db.read() as session:
        views = list_adapters(session)
    event.remove(engine, "before_cursor_execute", note)

    assert len(views) == 8
    assert len([s for s in statements if s.startswith("SELECT")]) == 3


def test_versions_are_never_removed_under_their_aliases(bed: TestBed) -> None:
    with bed.services.db.write() as session:
        with pytest.raises(IntegrityError, match=r"(?i)foreign key"):
            session.execute(delete(AdapterVersion))
        session.rollback()
