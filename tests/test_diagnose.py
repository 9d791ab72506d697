"""`swaleak diagnose`: leak messages in server logs, of every wording."""

import ast
import gzip
import io
import json
import re
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from rich.console import Console

from swaleak.log_diagnosis.match import FAULTS, possible_releases
from swaleak.log_diagnosis.parser import FORMATS, MAX_FINDINGS, TABLE, diagnose
from swaleak.report.diagnose import diagnose_report
from swaleak.report.render import as_json, as_markdown, print_to
from swaleak.scenario import catalogue as scenarios

from .conftest import wheel

LEAK = "[swa] total=911616, available=235264, evictable=676096, protected=0"
TAIL = ", session_held=0, uncached=0"
TWICE = (
    "total=322816, available=2816, evictable=308992, protected=2560, session_held=0, uncached=8704"
)
HEALTHY = "[full] total=9116160, available=768, evictable=9115392, protected=0" + TAIL
ASSERTION = """\
  File "/opt/sglang/srt/mem_cache/{file}", line 559, in free
    assert {pool}.available_size() <= {pool}.size
           ^^^^^^^^^^^^^^^^
AssertionError
"""
HYBRID = (
    "token_to_kv_pool_allocator memory leak detected! self.full_tokens_per_layer=1000, "
    "full_available_size=600, full_evictable_size={full}, "
    "self.tree_cache.full_protected_size()={protected}\n"
    "self.swa_tokens_per_layer=800, swa_available_size=500, swa_evictable_size={swa}, "
    "self.tree_cache.swa_protected_size()={protected}"
)
DUMP = "self.cur_batch.batch_size()=3\nself.cur_batch.reqs=[Req(rid=1, input_ids=[1])]\n"
DECODE = "server_args=ServerArgs(disaggregation_mode='decode', page_size=64{})\n"
REQUESTS = "req_to_token_pool memory leak detected!available_size={}, session_held=0, total_size=32"


def read(log, page_size=None, release=None):
    data = log if isinstance(log, bytes) else log.encode()
    return diagnose(io.BytesIO(data), page_size, release)


def told(log, **options):
    """Return what a log says as text, and as JSON."""
    report = diagnose_report("log", read(log, **options))
    return as_markdown(report), json.loads(as_json(report))


# what a log says -> what each finding is: pool, difference, meaning, count
MESSAGES = {
    "the published leak": (LEAK + TAIL, [("swa", -256, "missing", 1)]),
    "the same of a release without sessions": (LEAK, [("swa", -256, "missing", 1)]),
    "one page counted twice": (TWICE, [(None, 256, "counted-twice", 1)]),
    "the same, in the assertion of the busy check": (
        f"AssertionError: SWA Pool Mem Leak Detected! [swa] {TWICE}",
        [("swa", 256, "counted-twice", 1)],
    ),
    "a line end behind the announcement": (
        "pool memory leak detected!\n"
        "[full] total=13510080, available=13509568, evictable=8192, protected=0\n"
        "[swa]  total=10808064, available=10807552, evictable=1024, protected=0",
        [("full", 7680, "counted-twice", 1), ("swa", 512, "counted-twice", 1)],
    ),
    "two pools, two lines, one of them healthy": (
        f"ValueError: pool memory leak detected! {HEALTHY}\n{LEAK}{TAIL}",
        [("swa", -256, "missing", 1)],
    ),
    "two pools in one line of JSON": (
        json.dumps({"msg": f"pool memory leak detected! {HEALTHY}\n{LEAK}{TAIL}"}),
        [("swa", -256, "missing", 1)],
    ),
    "healthy sums of a verbose busy check": (f"[Mem Check (BUSY)] {HEALTHY}", []),
    "slack that SGLang allows": (f"{LEAK}{TAIL}, dcp_physical_page_slack_allowed=True", []),
    "one pool, 2024": (
        "UserWarning: Warning: available_size=35244, max_total_num_token=42308\n"
        "KV cache pool leak detected!",
        [("full", -7064, "missing", 1)],
    ),
    "one pool, early 2025, where available is the sum": (
        "token_to_kv_pool_allocator memory leak detected! available_size=3189424, "
        "protected_size=0, self.max_total_num_tokens=3185200\n"
        "self.token_to_kv_pool_allocator.available_size()=2864304\n"
        "self.tree_cache.evictable_size()=325120",
        [("full", 4224, "counted-twice", 1)],
    ),
    "one pool, 2025": (
        "ValueError: token_to_kv_pool_allocator memory leak detected! "
        "self.max_total_num_tokens=270331, available_size=644, evictable_size=269628, "
        "protected_size=0",
        [("full", -59, "missing", 1)],
    ),
    "the busy check of 2025": (
        "AssertionError: Mem Leak Detected! total_tokens=270272 vs "
        "self.max_total_num_tokens=270331",
        [("full", -59, "missing", 1)],
    ),
    "two pools, 2025": (
        HYBRID.format(full=400, swa=236, protected=0),
        [("swa", -64, "missing", 1)],
    ),
    "two pools, 2025, where locked slots are not counted": (
        HYBRID.format(full=390, swa=290, protected=10),
        [("full", 0, "never-unlocked", 1), ("swa", 0, "never-unlocked", 1)],
    ),
    "one pool, early 2025, where locked slots are not counted": (
        "token_to_kv_pool_allocator memory leak detected! available_size=269819, "
        "protected_size=512, self.max_total_num_tokens=270331",
        [("full", 0, "never-unlocked", 1)],
    ),
    "two pools with sessions, 2026": (
        "token_to_kv_pool_allocator memory leak detected! full_leaked=0, swa_leaked=16\n"
        "self.full_tokens_per_layer=1000, full_available_size=600, full_evictable_size=300, "
        "full_protected=0, session_held_full=100\n"
        "self.swa_tokens_per_layer=800, swa_available_size=500, swa_evictable_size=236, "
        "swa_protected=16, session_held_swa=32",
        [("swa", -16, "missing", 1)],
    ),
    "a negative count": (
        "token_to_kv_pool_allocator memory leak detected! self.max_total_num_tokens=200000, "
        "available_size=120000, evictable_size=80000, protected_size=0, session_held=-1664",
        [("full", -1664, "negative-count", 1)],
    ),
    "Mamba": (
        "token_to_kv_pool_allocator memory leak detected! full_available_size=6016, "
        "full_evictable_size=390685, self.token_to_kv_pool_allocator.size=396701, "
        "self.tree_cache.full_protected_size()=0\n"
        "mamba_available_size=315, mamba_evictable_size=138, "
        "self.req_to_token_pool.mamba_pool.size=454, self.tree_cache.mamba_protected_size()=0, "
        "leaked_full_pages=None, leaked_mamba_pages={191}",
        [("mamba", -1, "missing", 1)],
    ),
    "request slots": (
        "req_to_token_pool memory leak detected!available_size=3756, session_held=0, "
        "total_size=3757",
        [("req_to_token", -1, "missing", 1)],
    ),
    "request slots of a decode worker": (
        DECODE.format("") + REQUESTS.format(31),
        [("req_to_token", None, "unknown", 1)],
    ),
    "more request slots than there are": (
        REQUESTS.format(95),
        [("req_to_token", None, "unknown", 1)],
    ),
    "the same before 0.4.8, whose check does not add any": (
        "sglang==0.4.6\nreq_to_token_pool memory leak detected!available_size=95, total_size=32",
        [("req_to_token", 63, "counted-twice", 1)],
    ),
    "request slots of a decode worker that says how many more it has": (
        DECODE.format(", disaggregation_decode_extra_slots=64") + REQUESTS.format(95),
        [("req_to_token", -1, "missing", 1)],
    ),
    "a double free": (
        "KV double free: sub-pool 1 has 3 duplicate pages.",
        [("swa", None, "counted-twice", 1)],
    ),
    "a use after free": (
        "KV page use-after-free: 4 owner page refs are in the free pool, sample pages=[7].",
        [("full", None, "counted-twice", 1)],
    ),
    "an assertion in a traceback": (
        ASSERTION.format(pool="self.swa_attn_allocator", file="allocator/swa.py"),
        [("swa", None, "counted-twice", 1)],
    ),
    "an assertion over segments": (
        "AssertionError: segment at 576 shares a page with the one ending at 577",
        [(None, None, "segment", 1)],
    ),
    "bytes of the unified pool": (
        "ValueError: pool-bytes memory leak detected! [chain] swa low frontier 1610612736 overlaps "
        "the previous pool's high frontier 1610743808",
        [("swa", None, "bytes", 1)],
    ),
    "other bytes of the unified pool": (
        "pool-bytes memory leak detected! [full] frontier out of bounds: low=1, high=9, total=8",
        [("full", None, "bytes", 1)],
    ),
    "two lines of bytes": (
        "pool-bytes memory leak detected! [full] frontier out of bounds: low=1, high=9, total=8\n"
        "[chain] swa low frontier 10 overlaps the previous pool's high frontier 14",
        [("full", None, "bytes", 1), ("swa", None, "bytes", 1)],
    ),
    "counts of a sharded pool that are no whole pages": (
        "pool memory leak detected! [full] total=1024, available=600, evictable=424, protected=0"
        f"{TAIL}, class_free_pages=[4, 4], unaligned_sharded_counts={{'available': 600, "
        "'evictable': 424}, page_size=64",
        [("full", 0, "unaligned-count", 1)],
    ),
    "a cache that miscounts": (
        "[Size] ComponentType.SWA evictable=512 != recomputed=448",
        [("swa", None, "tree", 1)],
    ),
    "a source line that nothing raised": ("available_size() <= self.swa_attn_allocator.size", []),
    "settings at the start of a server": (
        "max_total_num_tokens=270331, chunked_prefill_size=8192, available_gpu_mem=10.2 GB",
        [],
    ),
    "an allocation that failed": (
        "Decode out of memory. Try to lower your batch size.\nTry to allocate 4 tokens.\n"
        "Available tokens: 2 (available_size=1 + evictable_size=1)",
        [],
    ),
    "an ordinary log": ("[2026-08-23 09:11:04] Decode batch, #running-req: 2, #token: 7171", []),
    "nothing": ("", []),
    "no text at all": ("\0\x1b available=\x01\n" * 3, []),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name):
    text, expected = MESSAGES[name]
    found = read(f"{text}\n")
    assert found.unread == []
    assert [(f.pool, f.difference, f.meaning, f.count) for f in found.findings] == expected


SUMS = {
    "0.5.5": "self.full_tokens_per_layer=90, full_available_size=40, full_evictable_size=40, "
    "self.tree_cache.full_protected_size()=0\n",
    "0.5.10": "self.max_total_num_tokens=90, available_size=40, evictable_size=40, "
    "protected_size=2, session_held=0\n",
    "0.5.23": f"{HEALTHY}\n{LEAK}{TAIL}\n",
}


@pytest.mark.parametrize("release", SUMS)
@pytest.mark.parametrize("prefix", ["", "self.", "scheduler."])
@pytest.mark.parametrize("name", ["cur_batch", "cur_batch_for_debug"])
def test_a_running_batch_is_no_leak(release, prefix, name):
    batch = DUMP.replace("self.", prefix).replace("cur_batch", name)
    text, body = told(f"[2026-01-01 10:00:00 TP0] {batch}{SUMS[release]}\nWatchdog timeout\n")
    assert (body["ok"], body["findings"], body["unread"], body["dumps"]) == (False, [], [], 1)
    assert (text.count("\n"), "a batch of 3 requests was running" in text) == (1, True)


def test_a_leak_behind_a_dump_is_one():
    text = f"{DUMP}{LEAK}{TAIL}\nx\npool memory leak detected! {HEALTHY}\n{LEAK}{TAIL}\n"
    found = read(text)
    assert ([f.difference for f in found.findings], found.dumps) == ([-256], 1)


def test_the_published_leak_is_explained():
    text, body = told(f"server_args=ServerArgs(page_size=256)\nsglang==0.5.18\n{LEAK}{TAIL}\n")
    (finding,) = body["findings"]
    expected = {
        "kind": "sum",
        "pool": "swa",
        "total": 911616,
        "accounted": 911360,
        "difference": -256,
        "pages": {str(2**i): -(256 >> i) for i in range(8, -1, -1)},
        "meaning": "missing",
        "terms": {
            "available": 235264,
            "evictable": 676096,
            "protected": 0,
            "session_held": 0,
            "uncached": 0,
        },
        "version": "0.5.18",
        "page_size": 256,
        "count": 1,
        "first": None,
        "last": None,
        "lines": [3, 3],
        "ranks": {"": 1},
        "absent": [],
        "known": ["#36081", "#36135", "#36381"],
        "reproduce": ["swaleak repro tombstone-recovery --strategy shipped --on 0.5.18"],
    }
    assert {key: finding[key] for key in expected} == expected
    said = ("256 slots missing", "1 page of 256", "leak", "#36081", finding["advice"])
    assert [words for words in said if words not in text] == []
    assert finding["advice"] == (
        "What to do: upgrade to 0.5.19 or later; until then start the server with "
        "SWALEAK=fix:barrier."
    )


EAGLE = f"{HEALTHY.replace('available=768', 'available=832')}\n[swa] {TWICE}"
RECOVERY = {"#36081", "#36135", "#36381"}
# what the log says -> the faults that fit without further conditions, and the first that is named
KNOWN = {
    "nothing besides": (LEAK, RECOVERY, "#36081"),
    "the release": (f"SGLang v0.5.18\n{LEAK}", RECOVERY, "#36081"),
    "the release, afterwards": (f"{LEAK}\nsglang: 0.5.19", set(), None),
    "a release that has the fix": (f"Version: sglang 0.5.19\n{LEAK}", set(), None),
    "an address that is no version": (f"sglang: 0.5.19.7:3000\n{LEAK}", RECOVERY, "#36081"),
    "a page size that does not divide it": (f"ServerArgs(page_size=512)\n{LEAK}", set(), None),
    "the wording of 0.5.10": (
        "self.swa_tokens_per_layer=911616, swa_available_size=235264, swa_evictable_size=676096, "
        "swa_protected=0, session_held_swa=0",
        set(),
        None,
    ),
    "a page counted twice, page size": (
        f"page_size=256\nsglang-0.5.13\n[swa] {TWICE}",
        {"#27779", "#27789"},
        "#27779",
    ),
    "a page counted twice, 0.5.14": (f"page_size=256\nsglang-0.5.14\n[swa] {TWICE}", set(), None),
    "both pools counted twice": (EAGLE, {"#34823", "#34870"}, "#34823"),
    "both pools counted twice, without speculation": (
        f"ServerArgs(page_size=1, speculative_algorithm=None)\n{EAGLE}",
        set(),
        None,
    ),
    "the full pool short": (LEAK.replace("swa", "full"), set(), None),
    "a double free of the SWA pool": (
        "KV double free: sub-pool 1 has 1 duplicate pages.",
        set(),  # none that ended before the message began
        "#38519",
    ),
    "an assertion of 0.5.12": (
        ASSERTION.format(pool="self.swa_attn_allocator", file="swa_memory_pool.py"),
        {"#25805", "#26078", "#24857"},
        "#25805",
    ),
    "segments": (
        "AssertionError: segment at 576 shares a page with the one ending at 576",
        {"#38941", "#37729"},
        "#38941",
    ),
    "a negative count of sessions": (
        MESSAGES["a negative count"][0],
        {"#22273", "#21875"},
        "#22273",
    ),
    "a sum of 2024": (MESSAGES["one pool, 2024"][0], {"#105", "#140"}, "#105"),
    "page size 16, 0.4": (
        "ServerArgs(page_size=16)\n"
        + MESSAGES["one pool, early 2025, where available is the sum"][0],
        {"#10637", "#6888"},
        "#10637",
    ),
    "retraction, 0.5.3.post3": (
        f"sglang==0.5.3.post3\n{MESSAGES['one pool, 2025'][0]}",
        {"#11970", "#11981", "#11976"},
        "#11970",
    ),
    "Mamba, 0.5.8": (
        f"sglang==0.5.8\n{MESSAGES['Mamba'][0]}",
        {"#16067", "#18300", "#20010", "#20182", "#20185", "#21404"},
        "#16067",
    ),
    "Mamba, 0.5.10": (f"sglang==0.5.10\n{MESSAGES['Mamba'][0]}", set(), None),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_faults(name):
    log, expected, first = KNOWN[name]
    text, body = told(f"{log}\n")
    assert set(body["findings"][-1]["known"]) == expected
    assert (f"({first}" in text) == bool(first)
    assert ("Fits (" in text) == bool(expected)


@pytest.mark.parametrize("release", TABLE["releases"])
def test_a_fault_outside_the_release_is_never_named(release):
    for text, _ in MESSAGES.values():
        for finding in told(f"{text}\n", release=release)[1]["findings"]:
            for ref in finding["known"] + finding["may_fit"]:
                ranges = [SpecifierSet(f.releases, True) for f in FAULTS if ref in f.refs]
                assert any(finding["version"] in one for one in ranges), ref


def test_faults_are_whole():
    formats = {form.name for form in FORMATS}
    kinds, meanings = {form.kind for form in FORMATS}, set()
    for fault in FAULTS:
        assert any(
            release in SpecifierSet(fault.releases, True) for release in TABLE["releases"]
        ) or ("dev" in fault.releases), fault.title
        assert set(fault.kinds) <= kinds and set(fault.formats) <= formats, fault.title
        assert fault.known in ("sources", "report")
        if fault.fixed:
            assert Version(fault.fixed) not in SpecifierSet(fault.releases, True), fault.title
        meanings.update(fault.meanings)
    assert meanings >= {"missing", "counted-twice", "never-unlocked", "negative-count", "segment"}


def test_every_fault_is_that_of_its_scenario():
    """The table says nothing else than the catalogue does."""
    replayed = [fault for fault in FAULTS if fault.reproduce]
    assert len(replayed) > 2
    for fault in replayed:
        _, _, name, *_, release = fault.reproduce.split()
        known = scenarios.load(name).known_failure(release, 256)
        assert known and release in known.versions and release in SpecifierSet(fault.releases), name


def test_what_to_do_is_the_last_paragraph():
    for text, findings in MESSAGES.values():
        report = diagnose_report("log", read(f"{text}\n"))
        for section in report.sections[1:] if findings else ():
            assert section.lines[-1].startswith("What to do: ")
    text = told(DECODE.format("") + REQUESTS.format(31) + "\n")[0]
    assert "32 + pre_alloc_size - 31" in text and "Missing figure: pre_alloc_size." in text


def test_the_release_that_is_given_rules_faults_out():
    assert told(f"{LEAK}\n", release="0.5.17")[1]["findings"][0]["known"] == []
    text = told(f"sglang==0.5.18\n{LEAK}\n", release="0.5.17")[0]
    assert "--release 0.5.17 is not used: the log names 0.5.18." in text


def test_repeats_are_one_finding_with_times():
    lines = [
        f"[2026-08-23 0{hour}:00:00 TP0] Traceback\n  File x\nValueError: {HEALTHY}\n"
        f"[swa] total=911616, available={hour}, evictable={911360 - hour}, protected=0\n"
        for hour in range(1, 8)
    ]
    (finding,) = read("".join(lines)).findings
    assert (finding.count, finding.first, finding.last) == (
        7,
        "2026-08-23 01:00:00",
        "2026-08-23 07:00:00",
    )


class Dribble(io.BytesIO):
    """A log that comes in pieces of a size that divides nothing."""

    def readinto(self, buffer):
        data = super().read(min(len(buffer), 1009))
        buffer[: len(data)] = data
        return len(data)


@pytest.mark.parametrize("wrap", [io.BytesIO, Dribble])
def test_a_message_is_found_wherever_a_block_ends(wrap):
    gap = b"x" * 77 + b"\n"
    message = f"{HEALTHY}\n{LEAK}{TAIL}\n".encode()
    log = b"".join(gap * (i % 700) + message for i in range(60))
    (finding,) = diagnose(wrap(log)).findings
    assert (finding.count, finding.difference) == (60, -256)


def test_a_line_without_end_takes_no_memory_and_loses_nothing():
    log = b"".join(b"y" * (2**20 // 3 + 12345 * i) + LEAK.encode() + b";" for i in range(9))
    (finding,) = read(log).findings
    assert (finding.count, finding.difference) == (9, -256)


def test_a_large_log_takes_little_memory():
    line = b"[2026-08-23 09:11:04 TP0] Decode batch, #running-req: 2, #token: 7171, 0.5 =\n"
    tracemalloc.start()
    try:
        diagnose(io.BytesIO(line * 400_000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak - len(line) * 400_000 < 8 * 2**20


SIX = "[swa] total=911616, available=235264, evictable=673536, protected=2560, session_held=0"
WHOLE = f"ValueError: pool memory leak detected! {HEALTHY}\n{SIX}, uncached=0"
LINE = "[2026-08-23 09:11:0{n} {rank}] Scheduler hit an exception: Traceback\nValueError: "


@pytest.mark.parametrize("held", [0, 128])
def test_a_message_that_is_cut_off_anywhere_is_never_wrong_and_never_missed(held):
    whole = f"{WHOLE.rpartition(', session')[0]}, session_held={held}, uncached=640"
    (true,) = {(f.total, f.accounted) for f in read(f"{whole}\n").findings}
    for end in range(whole.index("ak detec"), len(whole) + 1):
        found = read(f"started\n{whole[:end]}")
        assert {(f.total, f.accounted) for f in found.findings} <= {true}, whole[:end]
        assert found.findings or [f.lines[0] for f in found.unread] in ([2], [3]), whole[:end]


# a log -> the line of the message that cannot be read, and why
UNREADABLE = {
    "cut within a name": (f"a\npool memory leak detected! {LEAK[:45]}\nb\n", 2, "cut off behind"),
    "without what is evictable": (f"{LEAK[:41]}\n", 1, "cut off behind"),
    "cut within a name, a session": (f"{LEAK}, sess\n", 1, 'protected=0, sess"'),
    "cut within the last number": (LEAK[:51], 1, "cut off behind"),
    "cut before the pool": ("x\npool memory leak detected!", 2, "cut off behind"),
    "cut within the words": ("token_to_kv_pool_allocator memory leak de", 1, "memory leak de"),
    "only the line that names the other pool": (
        f"pool memory leak detected! {HEALTHY}\n" + "x\n" * 10_000,
        1,
        "no line of another pool is behind it",
    ),
    "separators": (
        "pool memory leak detected! [swa] total=911,616, available=235,264, evictable=676,096\n",
        1,
        "separators (911,616)",
    ),
    "another process wrote into a number": (
        f"pool memory leak detected! {LEAK[:51]}[2026-08-23 09:11:04 TP1] Decode\n",
        1,
        "cut off",
    ),
    "a double free": ("KV double free: sub-pool 1 has 3", 1, "1 has 3"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_is_there_and_cannot_be_read(name):
    log, line, why = UNREADABLE[name]
    found = read(log)
    report = diagnose_report("log", found)
    assert (found.findings, len(found.unread), report.ok) == ([], 1, True)
    assert (found.unread[0].lines[0], why in found.unread[0].what) == (line, True), found.unread
    assert f"Line {line}" in as_markdown(report)


# what is no message, and not a cut one either
NONE = {
    "a source line in a traceback": '    "req_to_token_pool memory leak detected!"\n',
    "another": 'assert not swa_leak, f"SWA Pool Mem Leak Detected! {swa_msg}"\n',
    "an f-string": 'f"segment at {start_pos} shares a page with the one ending at {prev_end}"\n',
    "a busy check, as far as it was copied": f"[Mem Check (BUSY)] {LEAK[:51]}",
    "a ring that is not checked": (
        "[swa] unified ring (leak-check skipped): available=10, evictable=0, total=900\n"
    ),
    "somebody else's leak": "numba: memory leak detected!\n",
}


@pytest.mark.parametrize("name", NONE)
def test_what_is_no_message(name):
    found = read(NONE[name])
    assert (found.findings, found.unread) == ([], [])


def coloured(text):
    """Return a text as `ccze` colours it: every word and every number by itself."""
    return re.sub(r"[\w.]+", "\x1b[1;36m\\g<0>\x1b[0m", text)


PACKED = gzip.compress(WHOLE.encode() + b"\n")
# the same message -> how it is written
WRITTEN = {
    "colours around each word": coloured(WHOLE) + "\n",
    "colours of grep": WHOLE.replace("leak", "\x1b[01;31m\x1b[Kleak\x1b[m\x1b[K") + "\n",
    "a link and a title": f"\x1b]0;log\x07\x1b]8;;http://x\x1b\\{WHOLE}\x1b]8;;\x1b\\\n",
    "colours in JSON": json.dumps({"log": coloured(WHOLE)}) + "\n",
    "colours that syslog has escaped": coloured(WHOLE).replace("\x1b", "#033") + "\n",
    "UTF-16": f"{WHOLE}\n".encode("utf-16"),
    "UTF-16, the other way round": b"\xfe\xff" + f"{WHOLE}\n".encode("utf-16-be"),
    "UTF-16 that does not say so": f"{WHOLE}\n".encode("utf-16-le"),
    "gzip": PACKED,
    "gzip in two members": gzip.compress(b"x\n") + PACKED + b"\0" * 20,
    "UTF-16 in gzip": gzip.compress(f"{WHOLE}\n".encode("utf-16")),
    "Windows": f"{WHOLE}\n".replace("\n", "\r\n"),
    "a progress bar in front": f"loading 3%\rloading 99%\r{WHOLE}\n",
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("wrap", [io.BytesIO, Dribble])
def test_however_it_is_written(name, wrap):
    log = WRITTEN[name]
    found = diagnose(wrap(log if isinstance(log, bytes) else log.encode()))
    assert [(f.pool, f.difference) for f in found.findings] == [("swa", -235520 + 235264)]
    assert found.unread == []


def test_colours_are_taken_off_wherever_a_block_ends():
    log = "".join("y" * (9_000 + 7 * i) + f"\n{coloured(WHOLE)}\n" for i in range(200))
    (finding,) = read(log).findings
    assert (finding.count, finding.difference) == (200, -256)


def test_a_packed_log_that_ends_too_early_says_so():
    log = gzip.compress(b"".join(b"%d\n" % (i * i) for i in range(9000)))[:-5000]
    assert "ends too early" in told(log)[0]


def leaks(*ranks):
    """Return a log in which each rank lacks the pages that it is given."""
    text = ""
    for n, (rank, available) in enumerate(ranks):
        text += LINE.format(n=n, rank=rank) + f"pool memory leak detected! {HEALTHY}\n"
        text += f"[swa] total=911616, available={available}, evictable=676096, protected=0{TAIL}\n"
    return f"ServerArgs(page_size=256)\nsglang==0.5.18\n{text}"


RANKS = leaks(("TP0", 235264), ("TP1", 235008), ("TP2", 235264), ("DP1 TP0 EP0", 235264))


def test_ranks_are_named_and_one_kind_is_told_once():
    text = told(RANKS)[0]
    assert [f.ranks for f in read(RANKS).findings] == [
        (("DP1 TP0 EP0", 1), ("TP0", 1), ("TP2", 1)),
        (("TP1", 1),),
    ]
    assert "seen 4 times on DP1 TP0 EP0, TP0, TP1, TP2, " in text
    assert "That is 1 to 2 pages of 256 slots." in text
    assert text.count("What to do") == 1


def test_page_counts_and_releases_read_as_a_person_writes_them():
    text = told(RANKS.replace("ServerArgs(page_size=256)\nsglang==0.5.18\n", ""))[0]
    assert "That is 1 to 2 pages of 256 slots, 2 to 4 of 128, 4 to 8 of 64" in text
    assert "from the SWA pool" in text
    assert "This wording is of SGLang from 0.5.11." in text


def stamped(prefix):
    return "".join(
        prefix.format(n=n % 60) + line for n, line in enumerate(RANKS.splitlines(keepends=True))
    )


# who has written the log -> what is in front of each line, or behind it
WRITERS = {
    "kubectl logs --timestamps": stamped("2026-08-23T09:12:{n:02}.123456789Z "),
    "kubectl logs --prefix": stamped("[pod/sglang-0/sglang] "),
    "kubectl logs --prefix --timestamps": stamped(
        "[pod/sglang-0/server] 2026-08-23T09:12:{n:02}Z "
    ),
    "docker compose logs": stamped("sglang-1  | "),
    "docker compose logs --timestamps": stamped("sglang-1  | 2026-08-23T09:12:{n:02}.5Z "),
    "journald": stamped("Aug 23 09:12:{n:02} gpu-7 sglang[4711]: "),
    "containerd": stamped("2026-08-23T09:12:{n:02}.123456789Z stderr F "),
    "Kubernetes, JSON": "".join(
        json.dumps({"log": line, "stream": "stderr", "time": "2026-08-23T09:12:00.1Z"}) + "\n"
        for line in RANKS.splitlines(keepends=True)
    ),
    "JSON, a message a line": "".join(
        json.dumps({"ts": 1.5, "message": f"[2026-08-23 {part}"}) + "\n"
        for part in RANKS.split("[2026-08-23 ")[1:]
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_ranks_and_times_survive_what_writes_the_log(name):
    found = read(WRITERS[name])
    assert [(f.ranks, f.first) for f in found.findings] == [
        ((("DP1 TP0 EP0", 1), ("TP0", 1), ("TP2", 1)), "2026-08-23 09:11:00"),
        ((("TP1", 1),), "2026-08-23 09:11:01"),
    ]
    assert found.unread == []


def test_two_pods_that_write_one_log_keep_their_ranks():
    pods = [
        [f"[pod/{pod}/x] {line}\n" for line in leaks((rank, available)).splitlines()]
        for pod, rank, available in (("a-0", "TP0", 235264), ("b-1", "TP3", 235008))
    ]
    found = read("".join(line for pair in zip(*pods, strict=True) for line in pair))
    assert [f.ranks for f in found.findings] == [(("TP0", 1),), (("TP3", 1),)]


def test_lines_of_ranks_that_lie_between_each_other_find_their_rank():
    first = "[2026-08-23 09:11:04 TP{}] pool memory leak detected! " + HEALTHY + "\n"
    log = first.format(0) + first.format(1) + f"{LEAK}{TAIL}\n" * 2
    assert [f.ranks for f in read(log).findings] == [(("TP0", 1), ("TP1", 1))]


@pytest.mark.parametrize("count", [600, MAX_FINDINGS + 600])
def test_of_many_findings_the_first_the_largest_and_the_last_are_shown(count):
    log = "".join(
        f"[swa] total=911616, available={9 if i == 500 else 235000 - i}, evictable=600000, "
        f"protected=0{TAIL}\n"
        for i in range(count)
    )
    found = read(log)
    rows = diagnose_report("log", found).sections[0].grid.rows
    last = min(count, MAX_FINDINGS) - 1
    assert [int(row[4].text) for row in rows] == [-76616, -311607, -76616 - last]
    assert f"{len(found.findings) - 3} more are in the JSON" in told(log)[0]


def test_a_page_size_that_the_log_contradicts_is_said_not_to_be_used():
    text = told(f"page_size=256\n{LEAK}{TAIL}\n", page_size=3)[0]
    assert "--page-size 3 is not used: the log names 256" in text
    assert "not used" not in told(WHOLE, page_size=3)[0]


def test_a_message_without_all_its_numbers_says_so():
    assert "has no session_held=, uncached=" in told(f"{LEAK}\n")[0]
    assert "has no" not in told(f"{LEAK}{TAIL}\n")[0]


@pytest.mark.parametrize("width", [30, 40, 60, 80])
def test_no_number_is_folded(width):
    out = io.StringIO()
    log = leaks(("TP0", 235264), ("TP1", 235008))
    print_to(diagnose_report("log", read(log)), Console(file=out, width=width))
    said = ("911616", "911360", "-256", "911104", "-512", "missing")
    assert [number for number in said if number not in out.getvalue()] == []


# arguments, standard input -> exit code, and what is said
RUNS = {
    "a log from standard input": (["diagnose"], f"{LEAK}\n", 0, "256 slots missing"),
    "nothing in it": (["diagnose", "-"], "all is well\n", 1, "No leak in standard input, 12 bytes"),
    "a message that is cut off": (["diagnose"], LEAK[:51], 0, "Line 1: cut off behind"),
    "what the exit codes are": (["diagnose", "--help"], "", 0, "Exit code 1: there is none"),
    "packed with something else": (["diagnose"], "BZh91AY", 2, "packed with bzip2"),
    "no such file": (["diagnose", "nowhere.log"], "", 2, "nowhere.log: No such file"),
    "a folder": (["diagnose", "."], "", 2, "Is a directory"),
    "a page size": (["diagnose", "--page-size", "256"], f"{LEAK}\n", 0, "1 page of 256 slots"),
    "a release": (["diagnose", "--release", "v0.5.18"], f"{LEAK}\n", 0, "upgrade to 0.5.19"),
    "no release": (["diagnose", "--release", "new"], f"{LEAK}\n", 2, "--release new"),
    "JUnit": (["diagnose", "-o", "x.xml"], LEAK, 2, "JUnit is for runs of scenarios"),
}


@pytest.mark.parametrize("name", RUNS)
def test_runs(name):
    arguments, stdin, code, said = RUNS[name]
    program = (
        "import sys\nfrom swaleak.cli import main\n"
        "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
    )
    assert (run.returncode, said in run.stdout + run.stderr, "Traceback" in run.stderr) == (
        code,
        True,
        False,
    )
    assert code == 0 or run.stdout.count("\n") + run.stderr.count("\n") == 1


# -- the f-strings of SGLang's releases ----------------------------------------------------------

# names of a sum by hand: 600 free, 336 in the cache, 0 locked, 1000 in all, so 64 are missing
FIGURES = {
    "available": 600,
    "evictable": 336,
    "total": 1000,
    "size": 1000,
    "total_size": 1000,
    "max_total_num_tokens": 1000,
    "max_total_num_token": 1000,
    "full_tokens_per_layer": 1000,
    "swa_tokens_per_layer": 1000,
    "total_tokens": 936,
}
MISSING_64 = ("missing", -64)
# what is in an f-string -> what to fill in besides, how many findings there are, and which
SHAPES = [
    ("KV cache pool leak detected!", {"available": 936}, [("full", *MISSING_64)]),
    ("allocator memory leak detected! available_size", {"available": 936}, [("full", *MISSING_64)]),
    ("Memory pool leak detected!", {"available": 936}, [("req_to_token", *MISSING_64)]),
    (
        "req_to_token_pool memory leak detected!",
        {"available": 936},
        [("req_to_token", *MISSING_64)],
    ),
    ("swa_tokens_per_layer=", {}, [("full", *MISSING_64), ("swa", *MISSING_64)]),
    ("self.max_total_num_tokens={}, available_size={}", {}, [("full", *MISSING_64)]),
    ("mamba_evictable_size={}", {}, [("full", *MISSING_64), ("mamba", *MISSING_64)]),
    ("Mem Leak Detected! total_tokens=", {}, [("full", *MISSING_64)]),
    ("[{}] total={}, available=", {"pool_name": "swa"}, [("swa", *MISSING_64)]),
    ("KV double free: sub-pool", {"i": 1, "free": 3}, [("swa", "counted-twice", None)]),
    ("KV page use-after-free:", {"stale": 12}, [("full", "counted-twice", None)]),
    ("duplicate pages in class", {"r": 1}, [(None, "counted-twice", None)]),
    ("of another owner leaked into class", {"r": 1}, [(None, "wrong-class", None)]),
    ("shares a page with the one ending at", {}, [(None, "segment", None)]),
    (
        "overlaps the previous pool's high frontier",
        {"sub_pool_name": "swa", "lo_b": 90, "frontier": 95},
        [("swa", "bytes", None)],
    ),
    ("evictable={} != recomputed=", {"ct": "swa"}, [("swa", "tree", None)]),
    ("protected={} != recomputed=", {"ct": "swa"}, [("swa", "tree", None)]),
    ("_size_={} != recomputed=", {"ct": "swa"}, [("swa", "tree", None)]),
    ("!= lru list evictable size:", {}, [(None, "tree", None)]),
]
# f-strings that tell of the pools too, and say nothing of a leak
OTHERS = [
    "{} memory leak detected! {}",  # a frame around the others
    "token_to_kv_pool_allocator memory leak detected! {}",
    "Full Pool Mem Leak Detected! {}",
    "SWA Pool Mem Leak Detected! {}",
    ", leaked_",
    "unified ring (leak-check skipped)",
    "[Mem Check (BUSY)]",
    "cur_batch",
    "out of memory",
    "vailable full tokens",
    "vailable tokens",
    "vailable swa tokens",
    "Available {}",
    "full_available_size={}, full_evictable_size={}, swa_available_size",  # of a dump, no totals
    "available_size={}, evictable_size={}, ",
    "No space left",
]
ABOUT_POOLS = re.compile(
    r"leak detected|Leak Detected|tokens_per_layer=|mamba_evictable_size=|total=\{\}, available"
    r"|KV double|use-after-free|in class|into class|shares a page|previous pool|recomputed="
    r"|lru list evictable"
)
OLD = ("0.3.6", "0.4.3", "0.4.4", "0.4.6", "0.4.9", "0.4.10", "0.5.4", "0.5.7", "0.5.10", "0.5.11")
NEW = ("0.5.13.post1", "0.5.15.post1", "0.5.18", "0.5.20", "0.5.23")


def f_strings(release):
    """Yield every f-string of a release's scheduler and caches: its text with {}, its names."""
    with zipfile.ZipFile(wheel(release)) as packed:
        for name in packed.namelist():
            if not re.match(r"sglang/srt/(managers|mem_cache)/.*\.py$", name):
                continue
            tree = ast.parse(packed.read(name))
            inner = {
                part
                for node in ast.walk(tree)
                if isinstance(node, ast.JoinedStr)
                for part in ast.walk(node)
                if part is not node
            }
            for node in ast.walk(tree):
                if isinstance(node, ast.JoinedStr) and node not in inner:
                    parts = node.values
                    yield (
                        "".join(p.value if isinstance(p, ast.Constant) else "{}" for p in parts),
                        [ast.unparse(p.value) for p in parts if isinstance(p, ast.FormattedValue)],
                    )


def figure(name, known):
    """Return what to fill in for an expression of SGLang's: a number for each term of a sum."""
    name = name.replace("()", "").split("(")[-1].rstrip(")").removesuffix(".free_slots")
    last = name.split(".")[-1]
    term = re.sub(r"^(?:full|swa|mamba)_|_size$|_token$", "", last)
    if "req_to_token_pool" in name and last == "req_to_token_pool":
        term = "available"
    parts = re.findall(r"[a-z_]+", name)
    numbers = (key for key in (term, *parts) if isinstance(known.get(key), int))
    return known.get(last) or next((known[key] for key in numbers), 0)


@pytest.mark.wheels
@pytest.mark.parametrize("release", [*OLD, *NEW])
def test_every_f_string_of_a_release_is_read(release):
    seen = set()
    for shape, names in f_strings(release):
        if not ABOUT_POOLS.search(shape):
            continue
        kind = next((kind for kind in SHAPES if kind[0] in shape), None)
        if kind is None:
            assert any(other in shape for other in OTHERS), shape
            continue
        marker, figures, expected = kind
        text = shape.format(*(figure(name, {**FIGURES, **figures}) for name in names))
        frame = "pool-bytes memory leak detected! " if "frontier" in marker else "ValueError: "
        found = read(f"{frame}{text}\n")
        assert [(f.pool, f.meaning, f.difference) for f in found.findings] == expected, text
        assert found.unread == [], text
        for finding in found.findings:
            assert release in possible_releases(finding), (release, finding.form.name, text)
        seen.add(marker)
    assert len(seen) >= 2, seen


LOGS = Path(__file__).parent.parent.parent / "shared" / "cases" / "logs"


@pytest.mark.skipif(not LOGS.is_dir(), reason="the public cases are not here")
def test_public_cases_have_what_is_expected():
    without = {"L29", "L30b", "L33"}
    for path in sorted(LOGS.glob("*.log")):
        with path.open("rb") as file:
            found = diagnose(file)
        assert bool(found.findings) == (path.name.split("-")[0] not in without), path.name
        assert found.unread == [], path.name
