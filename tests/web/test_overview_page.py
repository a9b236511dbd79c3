"""The overview tells the state of the engine and what to do next."""

import asyncio
import re
import time

from manylora.engine.api import EngineStats, SlotStats
from manylora.web import engine_view
from support.site import words_of


def test_slots_show_who_sits_in_them_and_how_many_hold_them(signed_in):
    shared = b"the same weights"
    for slug in ("acme", "globex"):
        digest = signed_in.add_adapter(signed_in.add_tenant(slug), "pirate", shared).version.digest
    signed_in.engine.snapshot = EngineStats(
        num_running=3,
        kv_blocks_used=5,
        kv_blocks_total=64,
        slots=(SlotStats(slot=0, digest=digest, holds=2), SlotStats(slot=1, digest="f" * 64)),
    )

    page = signed_in.get("/admin").text

    slots = [words_of(slot) for slot in re.findall(r'<li class="(?:held)?">.*?</li>', page, re.S)]
    assert "acme/pirate@v1" in slots[0]
    assert "globex/pirate@v1" in slots[0]
    assert "2 requests now" in slots[0]
    assert "ffffffffffff" in slots[1]
    assert "5 of 64 blocks of 16 tokens" in page


def test_the_page_comes_when_the_engine_does_not(signed_in, monkeypatch):
    monkeypatch.setattr(engine_view, "PATIENCE_SECONDS", 0.05)

    async def hang() -> EngineStats:

        await asyncio.sleep(60)

    signed_in.engine.stats = hang
    started = time.monotonic()
    hanging = signed_in.get("/admin")
    assert time.monotonic() - started < 10
    signed_in.engine.alive = False
    gone = signed_in.get("/admin")

    for page in (hanging, gone):
        assert page.status_code == 200
        assert "The engine does not answer" in page.text


def test_htmx_gets_the_live_part_alone(signed_in):
    whole, part = signed_in.get("/admin"), signed_in.get("/admin", hx_request="true")

    assert "<html" in whole.text
    assert "<html" not in part.text
    assert "Slot map" in part.text


def test_updates_can_be_paused_without_javascript(signed_in):
    assert "every 5s" in signed_in.get("/admin").text
    assert "every 5s" not in signed_in.get("/admin?live=off").text


def test_the_checklist_follows_what_is_there_and_goes_when_all_is_done(signed_in):
    def left() -> int:
        return words_of(signed_in.get("/admin").text).count("to do")

    assert left() == 4
    tenant = signed_in.add_tenant()
    assert left() == 3
    upload = signed_in.add_adapter(tenant)
    assert left() == 2
    key, _ = signed_in.add_key(tenant)
    assert left() == 1
    signed_in.add_usage(key, upload)
    assert "Getting started" not in signed_in.get("/admin").text
