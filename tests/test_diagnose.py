"""`swaleak diagnose`: leak messages in server logs, of every wording."""

import io
import json
import subprocess
import sys

import pytest

from swaleak.diagnose.finding import FAULTS
from swaleak.diagnose.log import BLOCK, diagnose
from swaleak.report.diagnose import diagnose_report
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
    text = report.as_markdown()
    assert json.loads(report.as_json())["findings"] == [
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
    text = diagnose_report("log", diagnose(io.BytesIO(f"[swa] {TWICE}\n".encode()))).as_markdown()
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


# arguments, standard input -> exit code, and what is said
RUNS = {
    "a log from standard input": (["diagnose"], f"{LEAK}\n", 0, "256 slots missing"),
    "nothing in it": (["diagnose", "-"], "all is well\n", 1, "No leak message found"),
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
