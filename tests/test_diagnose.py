"""`swaleak diagnose`: leak messages in server logs, of every wording."""

import gzip
import io
import json
import re
import subprocess
import sys

import pytest
from rich.console import Console

from swaleak.diagnose.finding import FAULTS
from swaleak.diagnose.log import BLOCK, diagnose
from swaleak.diagnose.tally import MOST
from swaleak.report.diagnose import diagnose_report
from swaleak.report.render import as_json, as_markdown, print_to
from swaleak.script import catalogue as scenarios

LEAK = "[swa] total=911616, available=235264, evictable=676096, protected=0"
TAIL = ", session_held=0, uncached=0"
TWICE = (
    "total=322816, available=2816, evictable=308992, protected=2560, session_held=0, uncached=8704"
)
EAGLE = "total=10808064, available=10807552, evictable=1024, protected=0"
HEALTHY = "[full] total=9116160, available=768, evictable=9115392, protected=0" + TAIL
ASSERTION = """\
  File "/opt/sglang/srt/mem_cache/allocator/swa.py", line 559, in free_group_end
    assert {pool}.available_size() <= {pool}.size
           ^^^^^^^^^^^^^^^^
AssertionError
"""
# what a log says -> what each finding is: pool, difference, meaning, count
MESSAGES = {
    "the published leak": (LEAK + TAIL, [("swa", -256, "missing", 1)]),
    "the same of a release without sessions": (LEAK, [("swa", -256, "missing", 1)]),
    "one page counted twice": (TWICE, [(None, 256, "counted-twice", 1)]),
    "the same, in the assertion of the busy check": (
        f"AssertionError: SWA Pool Mem Leak Detected! [swa] {TWICE}",
        [("swa", 256, "counted-twice", 1)],
    ),
    "slots freed under EAGLE": (EAGLE, [(None, 512, "counted-twice", 1)]),
    "two pools, two lines, one of them healthy": (
        f"ValueError: pool memory leak detected! {HEALTHY}\n{LEAK}{TAIL}",
        [("swa", -256, "missing", 1)],
    ),
    "two pools in one line of JSON": (
        json.dumps({"msg": f"pool memory leak detected! {HEALTHY}\n{LEAK}{TAIL}"}),
        [("swa", -256, "missing", 1)],
    ),
    "healthy sums of a verbose busy check": (f"[Mem Check (BUSY)] {HEALTHY}", []),
    "slack that SGLang allows": (
        f"{LEAK}{TAIL}, dcp_physical_page_slack_allowed=True",
        [],
    ),
    "one pool, 2025": (
        "ValueError: token_to_kv_pool_allocator memory leak detected! "
        "self.max_total_num_tokens=270331, available_size=644, evictable_size=269628, "
        "protected_size=0",
        [("full", -59, "missing", 1)],
    ),
    "one pool, early 2025, where available is the sum": (
        "token_to_kv_pool_allocator memory leak detected! available_size=3189424, "
        "protected_size=0, self.max_total_num_tokens=3185200\n"
        "self.token_to_kv_pool_allocator.available_size()=2864304\n"
        "self.tree_cache.evictable_size()=325120",
        [("full", 4224, "counted-twice", 1)],
    ),
    "two pools, 2025": (
        "token_to_kv_pool_allocator memory leak detected! self.full_tokens_per_layer=1000, "
        "full_available_size=600, full_evictable_size=400, "
        "self.tree_cache.full_protected_size()=0\n"
        "self.swa_tokens_per_layer=800, swa_available_size=500, swa_evictable_size=236, "
        "self.tree_cache.swa_protected_size()=0",
        [("swa", -64, "missing", 1)],
    ),
    "two pools with sessions, 2026": (
        "token_to_kv_pool_allocator memory leak detected! full_leaked=0, swa_leaked=16\n"
        "self.full_tokens_per_layer=1000, full_available_size=600, full_evictable_size=300, "
        "full_protected=0, session_held_full=100\n"
        "self.swa_tokens_per_layer=800, swa_available_size=500, swa_evictable_size=236, "
        "swa_protected=16, session_held_swa=32",
        [("swa", -16, "missing", 1)],
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
    "a double free": (
        "KV double free: sub-pool 1 has 3 duplicate pages.",
        [("swa", None, "counted-twice", 1)],
    ),
    "a use after free": (
        "KV page use-after-free: 4 owner page refs are in the free pool, sample pages=[7].",
        [("full", None, "counted-twice", 1)],
    ),
    "an assertion in a traceback": (
        ASSERTION.format(pool="self.swa_attn_allocator"),
        [("swa", None, "counted-twice", 1)],
    ),
    "a source line that nothing raised": ("available_size() <= self.swa_attn_allocator.size", []),
    "a dump of the watchdog, with a batch running": (
        "Scheduler debug info:\nscheduler.cur_batch_for_debug.batch_size()=1\n"
        f"scheduler.cur_batch_for_debug.reqs=[Req()]\n{HEALTHY}\n{LEAK}{TAIL}\nnext",
        [],
    ),
    "settings at the start of a server": (
        "max_total_num_tokens=270331, chunked_prefill_size=8192, available_gpu_mem=10.2 GB",
        [],
    ),
    "an ordinary log": ("[2026-08-23 09:11:04] Decode batch, #running-req: 2, #token: 7171", []),
    "nothing": ("", []),
    "no text at all": ("\0\x1b available=\x01\n" * 3, []),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name):
    text, expected = MESSAGES[name]
    found = diagnose(io.BytesIO(f"{text}\n".encode()))
    assert found.unread == ()
    assert [(f.pool, f.difference, f.meaning, f.count) for f in found.findings] == expected


def test_the_published_leak_is_explained():
    log = f"server_args=ServerArgs(page_size=256)\nsglang==0.5.18\n{LEAK}{TAIL}\n"
    report = diagnose_report("log", diagnose(io.BytesIO(log.encode())))
    text = as_markdown(report)
    assert json.loads(as_json(report))["findings"] == [
        {
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
            "reproduce": [
                "swaleak repro tombstone-recovery --strategy shipped --on 0.5.18",
            ],
        }
    ]
    told = ("256 slots missing", "1 page of 256", "leak", "deferred resolve, 0.5.18", "#36081")
    assert [words for words in told if words not in text] == []


# what the log says around a message -> which known faults fit
KNOWN = {
    "nothing": (LEAK, {"#36081", "#36135", "#36381"}),
    "the release": (f"SGLang v0.5.18\n{LEAK}", {"#36081", "#36135", "#36381"}),
    "the release, afterwards": (f"{LEAK}\nsglang: 0.5.19", set()),
    "a release that has the fix": (f"Version: sglang 0.5.19\n{LEAK}", set()),
    "an address that is no version": (
        f"sglang: 0.5.19.7:3000\n{LEAK}",
        {"#36081", "#36135", "#36381"},
    ),
    "a page size that does not divide it": (f"ServerArgs(page_size=512)\n{LEAK}", set()),
    "a page counted twice": (f"[swa] {TWICE}", {"#27779", "#27789", "#34823", "#34870"}),
    "a page counted twice, release": (
        f"sglang-0.5.18\n[swa] {TWICE}",
        {"#27789", "#34823", "#34870"},
    ),
    "the full pool short": (LEAK.replace("swa", "full"), set()),
    "a double free of the full pool": (
        "KV double free: sub-pool 0 has 1 duplicate pages.",
        {"#36381"},
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_faults(name):
    log, expected = KNOWN[name]
    (finding,) = diagnose(io.BytesIO(f"{log}\n".encode())).findings
    assert {ref for fault in finding.known for ref in fault.refs} == expected


def test_counted_twice_is_not_the_leak():
    text = as_markdown(diagnose_report("log", read(f"[swa] {TWICE}\n")))
    assert "Not the deferred resolve, 0.5.18 (#36081): that one loses slots" in text


def test_repeats_are_one_finding_with_times():
    lines = [
        f"[2026-08-23 0{hour}:00:00 TP0] Traceback\n  File x\nValueError: {HEALTHY}\n"
        f"[swa] total=911616, available={hour}, evictable={911360 - hour}, protected=0\n"
        for hour in range(1, 8)
    ]
    (finding,) = diagnose(io.BytesIO("".join(lines).encode())).findings
    assert (finding.count, finding.first, finding.last) == (
        7,
        "2026-08-23 01:00:00",
        "2026-08-23 07:00:00",
    )


class Dribble(io.BytesIO):
    """A log that comes in pieces of a size that divides nothing."""

    def read(self, size=-1, /):
        return super().read(min(size, 1009) if size > 0 else size)


@pytest.mark.parametrize("wrap", [io.BytesIO, Dribble])
def test_a_message_is_found_wherever_a_block_ends(wrap):
    gap = b"x" * 77 + b"\n"
    message = f"{HEALTHY}\n{LEAK}{TAIL}\n".encode()
    log = b"".join(gap * (i % 700) + message for i in range(60))
    (finding,) = diagnose(wrap(log)).findings
    assert (finding.count, finding.difference) == (60, -256)


def test_a_line_without_end_takes_no_memory_and_loses_nothing():
    log = b"".join(b"y" * (BLOCK // 3 + 12345 * i) + LEAK.encode() + b";" for i in range(9))
    (finding,) = diagnose(io.BytesIO(log)).findings
    assert (finding.count, finding.difference) == (9, -256)


def test_every_fault_is_that_of_its_scenario():
    """The table in `diagnose` says nothing else than the catalogue does."""
    for fault in FAULTS:
        if fault.scenario:
            known = scenarios.load(fault.scenario).known_failure(fault.release, 256)
            assert known and known.versions == fault.versions


SIX = "[swa] total=911616, available=235264, evictable=673536, protected=2560, session_held=0"
WHOLE = f"ValueError: pool memory leak detected! {HEALTHY}\n{SIX}, uncached=0"
LINE = "[2026-08-23 09:11:0{n} {rank}] Scheduler hit an exception: Traceback\nValueError: "


def read(log, page_size=None):
    return diagnose(io.BytesIO(log if isinstance(log, bytes) else log.encode()), page_size)


@pytest.mark.parametrize("held", [0, 128])
def test_a_message_that_is_cut_off_anywhere_is_never_wrong_and_never_missed(held):
    whole = f"{WHOLE.rpartition(', session')[0]}, session_held={held}, uncached=640"
    (true,) = {(f.total, f.accounted) for f in read(f"{whole}\n").findings}
    for end in range(whole.index("ak detec"), len(whole) + 1):
        found = read(f"started\n{whole[:end]}")
        assert {(f.total, f.accounted) for f in found.findings} <= {true}, whole[:end]
        assert found.findings or [one.line for one in found.unread] in ([2], [3]), whole[:end]


# a log -> the line of the message that cannot be read, and why
UNREADABLE = {
    "cut within a name": (f"a\npool memory leak detected! {LEAK[:45]}\nb\n", 2, "cut off behind"),
    "without what is evictable": (f"{LEAK[:41]}\n", 1, "cut off behind"),
    "cut within a name, a session": (f"{LEAK}, sess\n", 1, 'protected=0, sess"'),
    "cut within the last number": (LEAK[:51], 1, "676 without a newline"),
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
    assert (found.findings, found.unread_count, report.ok) == ((), 1, True)
    assert (found.unread[0].line, why in found.unread[0].why) == (line, True), found.unread
    assert f"Line {line}" in as_markdown(report)


# what is no message, and not a cut one either
NONE = {
    "a source line in a traceback": '    "req_to_token_pool memory leak detected!"\n',
    "another": 'assert not swa_leak, f"SWA Pool Mem Leak Detected! {swa_msg}"\n',
    "a busy check, as far as it was copied": f"[Mem Check (BUSY)] {LEAK[:51]}",
    "a ring that is not checked": (
        "[swa] unified ring (leak-check skipped): available=10, evictable=0, total=900\n"
    ),
    "somebody else's leak": "numba: memory leak detected!\n",
}


@pytest.mark.parametrize("name", NONE)
def test_what_is_no_message(name):
    found = read(NONE[name])
    assert (found.findings, found.unread) == ((), ())


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
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("wrap", [io.BytesIO, Dribble])
def test_however_it_is_written(name, wrap):
    log = WRITTEN[name]
    found = diagnose(wrap(log if isinstance(log, bytes) else log.encode()))
    assert [(f.pool, f.difference) for f in found.findings] == [("swa", -235520 + 235264)]
    assert found.unread == ()


def test_colours_are_taken_off_wherever_a_block_ends():
    log = "".join("y" * (9_000 + 7 * i) + f"\n{coloured(WHOLE)}\n" for i in range(200))
    (finding,) = read(log).findings
    assert (finding.count, finding.difference) == (200, -256)


def test_a_packed_log_that_ends_too_early_says_so():
    log = gzip.compress(b"".join(b"%d\n" % (i * i) for i in range(9000)))[:-5000]
    assert "ends too early" in as_markdown(diagnose_report("log", read(log)))


def leaks(*ranks):
    """Return a log in which each rank lacks one page more than the one before it."""
    text = ""
    for n, (rank, available) in enumerate(ranks):
        text += LINE.format(n=n, rank=rank) + f"pool memory leak detected! {HEALTHY}\n"
        text += f"[swa] total=911616, available={available}, evictable=676096, protected=0{TAIL}\n"
    return f"ServerArgs(page_size=256)\nsglang==0.5.18\n{text}"


def test_ranks_are_named_and_one_kind_is_told_once():
    log = leaks(("TP0", 235264), ("TP1", 235008), ("TP2", 235264), ("DP1 TP0 EP0", 235264))
    text = as_markdown(diagnose_report("log", read(log)))
    assert [f.ranks for f in read(log).findings] == [
        (("DP1 TP0 EP0", 1), ("TP0", 1), ("TP2", 1)),
        (("TP1", 1),),
    ]
    assert "seen 4 times on DP1 TP0 EP0, TP0-2, " in text
    assert "In pages of 256 slots: 1, 2." in text
    assert text.count("Reproduce it") == text.count("a leak. They are gone") == 1


def test_lines_of_ranks_that_lie_between_each_other_find_their_rank():
    first = "[2026-08-23 09:11:04 TP{}] pool memory leak detected! " + HEALTHY + "\n"
    log = first.format(0) + first.format(1) + f"{LEAK}{TAIL}\n" * 2
    assert [f.ranks for f in read(log).findings] == [(("TP0", 1), ("TP1", 1))]


@pytest.mark.parametrize("count", [600, MOST + 600])
def test_of_many_findings_the_first_the_largest_and_the_last_are_shown(count):
    at = count - 100  # where the largest is
    log = "".join(
        f"[swa] total=911616, available={9 if i == at else 235000 - i}, evictable=600000, "
        f"protected=0{TAIL}\n"
        for i in range(count)
    )
    found = read(log)
    rows = diagnose_report("log", found).sections[0].grid.rows
    assert [int(row[4].text) for row in rows] == [-76616, -311607, -76615 - count]
    assert f"{len(found.findings) - 3} more are in the JSON" in (
        as_markdown(diagnose_report("log", found))
    )


def test_a_page_size_that_the_log_contradicts_is_said_not_to_be_used():
    found = read(f"page_size=256\n{LEAK}{TAIL}\n", page_size=3)
    text = as_markdown(diagnose_report("log", found))
    assert "--page-size 3 is not used: the log names 256" in text
    assert "not used" not in as_markdown(diagnose_report("log", read(WHOLE, page_size=3)))


def test_a_message_without_all_its_numbers_says_so():
    text = as_markdown(diagnose_report("log", read(f"{LEAK}\n")))
    assert "names no session_held=, uncached=" in text
    old = as_markdown(diagnose_report("log", read(f"sglang==0.5.9\n{LEAK}\n")))
    assert "names no" not in old.partition("\n\n")[2]


@pytest.mark.parametrize("width", [30, 40, 60, 80])
def test_no_number_is_folded(width):
    out = io.StringIO()
    log = leaks(("TP0", 235264), ("TP1", 235008))
    print_to(diagnose_report("log", read(log)), Console(file=out, width=width))
    told = ("911616", "911360", "-256", "911104", "-512", "missing")
    assert [number for number in told if number not in out.getvalue()] == []


# arguments, standard input -> exit code, and what is said
RUNS = {
    "a log from standard input": (["diagnose"], f"{LEAK}\n", 0, "256 slots missing"),
    "nothing in it": (["diagnose", "-"], "all is well\n", 1, "No leak message found"),
    "a message that is cut off": (["diagnose"], LEAK[:51], 0, "Line 1: the log ends in 676"),
    "what the exit codes are": (["diagnose", "--help"], "", 0, "Exit code 1: there is none"),
    "packed with something else": (["diagnose"], "BZh91AY", 2, "packed with bzip2"),
    "no such file": (["diagnose", "nowhere.log"], "", 2, "nowhere.log: No such file"),
    "a folder": (["diagnose", "."], "", 2, "Is a directory"),
    "a page size": (["diagnose", "--page-size", "256"], f"{LEAK}\n", 0, "1 page of 256 slots"),
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
