"""The engine's page shows the engine's own figures, and what would spare it preemptions."""

import re
from dataclasses import replace

import pytest

from manylora.engine.api import EngineStats, Remedies, SlotStats
from manylora.engine.lifecycle import WaitCause
from manylora.engine.preemptions import PreemptionLog
from manylora.web.pages.engine import SHOWN_IN_HOST_MEMORY
from support import fake_engine
from support.fake_engine import INFO
from support.site import Site, words_of

REMEDIES = Remedies(
    num_kv_blocks=91,
    max_num_seqs=5,
    max_num_batched_tokens=None,
    max_model_len=333,
    kv_bytes_factor=0.5,
)
CAUSES = {cause: number for number, cause in enumerate(WaitCause, 1)}
STATS = EngineStats(
    num_running=7,
    num_waiting=sum(CAUSES.values()),
    waiting_by_cause=CAUSES,
    kv_blocks_used=48,
    kv_blocks_total=64,
    num_steps=1_234,
    step_tokens=80_000,
    num_preemptions=21,
    recomputed_tokens=2_000,
    prompt_tokens=50_001,
    output_tokens=27_002,
    prefix_queried_tokens=49_600,
    prefix_hit_tokens=6_200,
    queued_seconds_by_cause={cause: number / 10 for cause, number in CAUSES.items()},
    adapter_loads=17,
    slot_fills=19,
    uptime_seconds=7_300.0,
    remedies=REMEDIES,
)


def show(site: Site, **changed: object) -> str:
    """The page over these figures."""
    site.engine.snapshot = replace(STATS, **changed)
    answer = site.get("/admin/engine")
    assert answer.status_code == 200
    return answer.text


def section(page: str, name: str) -> str:
    """What stands under the heading of this id."""
    return re.search(rf'<section [^>]*labelledby="{name}">(.*?)</section>', page, re.DOTALL)[1]


def pairs(html: str) -> dict[str, str]:
    """The terms of the definition lists, and what is said of each."""
    found = re.findall(r"<dt>(.*?)</dt>\s*<dd>(.*?)</dd>", html, re.DOTALL)
    return {term: words_of(said).strip() for term, said in found}


def rows(html: str) -> list[list[str]]:
    """The cells of each row of the table's body."""
    body = re.search(r"<tbody>(.*?)</tbody>", html, re.DOTALL)[1]
    return [
        [
            words_of(cell).strip()
            for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)
        ]
        for row in body.split("</tr>")[:-1]
    ]


def test_each_figure_is_the_engines(signed_in):
    told = pairs(show(signed_in))

    assert told["Running"] == "7 of at most 8"
    assert told["Waiting"] == "45"
    assert told["Prefix hit rate"] == "12.5 % 6,200 of 49,600 prompt tokens looked up"
    assert told["Tokens computed"] == "80,000 in 1,234 steps"
    assert told["Computed once more"] == "2,000 2.5 % of the tokens computed"
    assert told["Preemptions"] == "21"
    assert told["Answer tokens"] == "27,002 50,001 prompt tokens"
    assert told["Up for"] == "2 h"
    assert told["In use"] == "75.0 %"


def test_it_says_what_is_served(signed_in, monkeypatch):
    info = replace(INFO, model="someone/else", max_model_len=500, num_kv_blocks=95)
    monkeypatch.setattr(fake_engine, "INFO", info)

    told = pairs(show(signed_in))

    assert told["Model"] == "tiny (someone/else) 000000000000"
    assert (told["Device"], told["Dtype"], told["Kernels"]) == ("cpu", "float32", "ref")
    assert told["Context"] == "500 tokens"
    assert told["Step"] == "up to 8 sequences, 64 tokens"
    assert told["Adapters"] == "4 slots, rank up to 64"
    assert told["Blocks"] == "95 of 16 tokens: 1,520 tokens"
    # 500 tokens begin a 32nd block, and 95 blocks are not 3 times 32.
    assert told["Holds at once"] == "2 requests of 500 tokens that share no prefix"


def test_each_cause_has_its_requests_its_seconds_and_a_bar_of_that_length(signed_in):
    waits = section(show(signed_in), "waits")

    items = re.findall(r"<li>(.*?)</li>", waits, re.DOTALL)
    assert len(items) == len(WaitCause)
    for (cause, number), item in zip(CAUSES.items(), items, strict=True):
        said = words_of(item)
        assert cause.replace("_", " ") in said
        assert f"{number} now" in said
        time = f"{number / 10:.2f} s" if number > 9 else f"{number * 100}.0 ms"
        assert f"{time} {100 * number / 45:.1f} %" in said
        width = float(re.search(r'<rect [^>]*width="([\d.]+)"', item)[1])
        assert width == pytest.approx(720 * number / 45, abs=0.1)
    assert "45 now · 4.50 s of all" in waits


def test_a_cause_of_no_wait_has_no_bar_and_no_number(signed_in):
    page = show(signed_in, num_waiting=0, waiting_by_cause={}, queued_seconds_by_cause={})

    waits = section(page, "waits")
    assert "<rect" not in waits
    assert waits.count("0 µs") == len(WaitCause) + 1
    assert waits.count(" now") == 1


def test_an_engine_that_has_done_nothing_has_no_rates(signed_in):
    signed_in.engine.snapshot = EngineStats()

    told = pairs(signed_in.get("/admin/engine").text)

    assert told["Prefix hit rate"].startswith("– 0 of 0")
    assert told["Computed once more"].startswith("0 –")
    assert told["In use"] == "–"


def test_the_remedies_stand_beside_what_is_set_now(signed_in):
    preemptions = section(show(signed_in), "preemptions")

    assert "21 since the start" in preemptions
    assert rows(preemptions) == [
        ["more KV blocks --num-kv-blocks price: memory", "64", "91"],
        [
            "fewer sequences at once --max-num-seqs "
            "price: a longer queue, and fewer tokens a second",
            "8",
            "5",
        ],
        [
            "smaller steps --max-num-batched-tokens price: a longer time to the first token",
            "64",
            "no value of this option helps",
        ],
        [
            "less KV a token, 0.50 of its bytes --dtype price: precision, of the weights too",
            "float32",
            "bfloat16 with --num-kv-blocks 128 in the same memory",
        ],
        [
            "shorter sequences --max-model-len "
            "price: longer answers are cut off, longer prompts refused",
            "512",
            "333",
        ],
    ]


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"kv_bytes_factor": 0.1},  # of no dtype
        {"max_model_len": None},
        {"kv_bytes_factor": 0.1, "max_model_len": None},
        {"max_num_seqs": None},
    ],
)
def test_the_page_advises_what_the_log_line_advises(signed_in, changed):
    remedies = replace(REMEDIES, **changed)
    line = PreemptionLog(INFO)._advice(remedies)

    shown = rows(section(show(signed_in, remedies=remedies), "preemptions"))

    for remedy, now, advised in shown:
        words, _, option = remedy.partition(" price: ")[0].partition(" --")
        assert words in (line + "shorter sequences")
        if not option:
            assert f"{words}: {advised}." in line
        elif advised.startswith("no value"):
            assert f"no value of --{option} helps (now {now})" in line
        else:
            assert f"--{option} {advised} (now {now})" in line
    assert line.count("(now ") == sum("--" in remedy for remedy, *_ in shown)


@pytest.mark.parametrize(
    ("count", "said"), [(0, "No request has had to give"), (3, "the scheduling policy puts first")]
)
def test_without_advice_it_says_why_there_is_none(signed_in, count, said):
    preemptions = section(show(signed_in, num_preemptions=count, remedies=None), "preemptions")

    assert said in preemptions
    assert "<table" not in preemptions


def test_slots_and_host_memory_name_their_adapters(signed_in):
    digest = signed_in.add_adapter(signed_in.add_tenant(), "pirate").version.digest
    other = signed_in.add_adapter(signed_in.add_tenant("globex"), "lawyer", b"o").version.digest

    page = show(
        signed_in,
        slots=(SlotStats(slot=0), SlotStats(slot=1, digest=digest, holds=2, size_bytes=3 << 20)),
        host_digests=(other, digest, "f" * 64),
    )

    slots = section(page, "slots")
    assert "1 of 4 slots filled · 3 in host memory" in slots
    empty, filled = (words_of(item) for item in re.findall(r"<li.*?</li>", slots, re.DOTALL))
    assert empty.split() == ["Slot", "0", "empty"]
    assert "Slot 1 acme/pirate@v1 2 requests now · 3 MiB" in filled
    host = section(page, "host-memory")
    assert "3 kept · 17 loaded, 19 put into a slot" in host
    assert rows(host) == [
        ["globex/lawyer@v1", "host memory", other[:12]],
        ["acme/pirate@v1", "slot 1", digest[:12]],
        ["of no adapter any more", "host memory", "f" * 12],
    ]


def test_a_crowd_in_host_memory_is_cut_and_counted(signed_in):
    digests = tuple(f"{number:064x}" for number in range(SHOWN_IN_HOST_MEMORY + 7))

    host = section(show(signed_in, host_digests=digests), "host-memory")

    assert len(rows(host)) == SHOWN_IN_HOST_MEMORY
    assert "and 7 more" in host


def test_names_cannot_bring_markup(signed_in, monkeypatch):
    evil = "<script>alert(1)</script>"
    info = replace(INFO, model=evil, device=evil, kernels=evil)
    monkeypatch.setattr(fake_engine, "INFO", info)
    monkeypatch.setattr("manylora.web.pages.engine.names_of", lambda *_: {evil: [evil]})

    page = show(signed_in, slots=(SlotStats(slot=0, digest=evil),), host_digests=(evil,))

    assert "<script>alert" not in page
    assert page.count("&lt;script&gt;alert(1)") >= 5


def test_an_engine_that_is_away_is_said_to_be(signed_in):
    signed_in.engine.alive = False

    for headers in ({}, {"hx_request": "true"}):
        answer = signed_in.get("/admin/engine", **headers)
        assert answer.status_code == 200
        assert "The engine does not answer" in answer.text
        assert "<section" not in answer.text


def test_htmx_gets_the_live_part_alone_until_updates_are_paused(signed_in):
    whole, part = show(signed_in), signed_in.get("/admin/engine", hx_request="true").text

    assert 'hx-get="/admin/engine"' in whole
    assert 'hx-get="/admin/engine"' not in signed_in.get("/admin/engine?live=off").text
    assert "<html" not in part
    assert part.strip() in whole


def test_the_navigation_and_the_overview_lead_here(signed_in):
    overview, page = signed_in.get("/admin").text, show(signed_in)

    assert overview.count('href="/admin/engine"') == 2
    assert '<a href="/admin/engine" aria-current="page">Engine</a>' in page
