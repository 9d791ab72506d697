"""Inside a real SGLang: its caches, and the plugin as its processes load it.

Runs where SGLang and all that it imports are installed (tests/requirements-sglang.txt), and
swaleak with its entry point: ``pytest -m sglang``. Each run is a process of its own, because
SGLang loads plugins once.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from swaleak.allocator.strategies import STRATEGIES
from swaleak.checker.case import run_case
from swaleak.scenario.toml import parse, to_toml
from swaleak.targets.open import open_target
from swaleak.trace.format import TraceReader
from swaleak.trace.replay import run_trace
from swaleak.trace.to_scenario import reduce, sizes_of
from tests.conftest import ROOT, wheel

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None, reason="SGLang is not installed here"
    ),
]

CHURN = Path(__file__).with_name("churn.py")
LIFECYCLE = CHURN.with_name("lifecycle.py")
KINDS = [(cache, page_size) for cache in ("swa", "unified") for page_size in (1, 4)]


def run(
    *command: str, swaleak: str = "", path: Path | str | None = None
) -> subprocess.CompletedProcess:
    env = {**os.environ, "SWALEAK": swaleak}
    if path:
        env["PYTHONPATH"] = os.pathsep.join([str(path), *filter(None, [env.get("PYTHONPATH")])])
    return subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True)


def test_the_plugin_is_announced():
    (mine,) = [e for e in entry_points(group="sglang.srt.plugins") if e.name == "swaleak"]
    assert mine.value == "swaleak.live.plugin:activate"


def test_not_asked_for_it_imports_nothing():
    code = (
        "import sys, swaleak.live.plugin as p; p.activate(); "
        "print([m for m in ('torch', 'sglang') if m in sys.modules])"
    )
    assert run("-c", code).stdout == "[]\n"


def test_verify_holds_on_the_installed_release():
    done = run("-m", "swaleak", "verify", "--on", "installed", "-f", "json")
    report = json.loads(done.stdout)
    trees = {r["scenario"] for r in report["results"] if r["scenario"].startswith("tree/")}
    assert (done.returncode, report["ok"], "tree/recovery:unified" in trees) == (0, True, True)


REPAIRED = {"": ("leak", 2, 1), "fix:barrier": ("clean", 2, 2), "fix:enqueue": ("clean", 2, 2)}
RECOVERY = """
from swaleak.checker.conservation import run_cache_script
from swaleak.scenario import catalogue
from swaleak.targets.driver import Sizes
from tests.churn import imported_caches
caches, scenario = imported_caches(), catalogue.load("tree/recovery")
for cache in ("swa", "unified"):
    for size in (1, 4):
        sizes = Sizes(scenario.full_pages, scenario.swa_pages, size)
        made = caches.make(cache, "shipped", sizes, scenario.window)
        run = run_cache_script(made, scenario.steps)
        print((run.verdict, run.comparison.physical, run.comparison.mapped))
"""


@pytest.mark.parametrize("settings", REPAIRED)
def test_the_caches_leak_and_the_plugin_repairs_them(settings):
    done = run("-c", RECOVERY, swaleak=settings, path=ROOT)
    assert done.stdout == f"{REPAIRED[settings]}\n" * 4, done.stderr


SAME = """
import random
from swaleak.checker.conservation import run_cache_script
from swaleak.scenario import catalogue
from swaleak.targets.driver import Sizes
from swaleak.targets.open import open_target
from tests.churn import imported_caches
from tests.test_radix_cache import SIZES, WINDOW, random_steps

target = open_target("installed", "cpu")
both = [target.caches, imported_caches()]
caches = [cache for cache in ("swa", "unified") if cache not in both[0].left_out]

def seen(cache):
    state = cache.state()
    return [x.tolist() for x in state[1:4]], cache.look().owners

for cache in caches:
    for size in (1, 4):
        # what the release ships is its own class out of the sources, and a graft over there
        for strategy in [s for s in target.strategies() if s == "shipped" or s != target.ships]:
            for scenario in catalogue.catalogue():
                if cache in scenario.caches:
                    sizes = Sizes(scenario.full_pages, scenario.swa_pages, size)
                    made = [one.make(cache, strategy, sizes, scenario.window) for one in both]
                    first, second = (run_cache_script(one, scenario.steps) for one in made)
                    assert first == second, (cache, size, strategy, scenario.name)
            here, there = (one.make(cache, strategy, Sizes(*SIZES, size), WINDOW) for one in both)
            for step in random_steps(here, random.Random(size), 300):
                raised = []
                for one in (here, there):
                    try:
                        one.play(step)
                    except Exception as error:
                        raised.append(repr(error))
                assert len(set(raised)) < 2 and len(raised) in (0, 2), raised
                assert seen(here) == seen(there), (cache, size, strategy, step)
                if raised:
                    break
print(target.version, *caches)
"""


@pytest.mark.wheels
@pytest.mark.parametrize(
    ("version", "caches"), [("0.5.18", "swa unified"), ("0.5.20", "swa unified")]
)
def test_the_caches_out_of_the_sources_are_those_of_a_full_sglang(version, caches, tmp_path):
    """Step by step: mapping, free lists and owners. It judges what stands in for the rest."""
    with zipfile.ZipFile(wheel(version)) as archive:
        archive.extractall(tmp_path)
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    done = run("-c", SAME, path=path)
    assert done.stdout == f"{version} {caches}\n", done.stderr[-2000:]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
def churned(request, tmp_path_factory):
    """2,000 random requests, recorded and audited: the trace, what the driver counted, the log."""
    cache, page_size = request.param
    folder = tmp_path_factory.mktemp("churn")
    done = run(
        *(str(CHURN), "--cache", cache, "--page-size", str(page_size)),
        swaleak=f"record:{folder}/t.jsonl,audit",
    )
    (trace,) = folder.glob("t.*.jsonl")
    counted = [tuple(pair) for pair in json.loads(done.stdout)["groups"]]
    return trace, counted, done.stderr, page_size


def replayed(trace: Path, strategy: str, on: str = "installed"):
    """Return what a trace comes to, the counts after each group, and whether it was cut off."""
    target, ends, reader = open_target(on, "cpu"), [], TraceReader(trace)
    result = run_trace(
        reader,
        lambda header: target.make(strategy, sizes_of(header)),
        lambda so_far: ends.append((so_far.last.physical, so_far.last.mapped)) or False,
    )
    return result, ends, reader.torn


@pytest.mark.parametrize("on", ["installed", "builtin"])
def test_the_trace_replays_group_by_group(churned, on):
    trace, counted, _, _ = churned
    followed, ends, _ = replayed(trace, "deferred", on)
    assert (ends, followed.differ, followed.verdict) == (counted, 0, "leak")


@pytest.mark.parametrize("strategy", ["eager", "enqueue", "barrier"])
def test_the_same_trace_is_clean_under_the_fixes(churned, strategy):
    trace, counted, _, _ = churned
    followed, ends, _ = replayed(trace, strategy)
    assert (len(ends), followed.verdict) == (len(counted), "clean")


def test_the_trace_shrinks_to_a_small_scenario(churned):
    trace, _, _, page_size = churned
    target = open_target("installed", "cpu")
    small = reduce(trace, target, "deferred").scenario
    again = parse(to_toml(small), name=small.name, source="")
    verdicts = {name: run_case(again, target, name, page_size).verdict for name in STRATEGIES}
    clean = dict.fromkeys(STRATEGIES, "clean")
    assert (len(again.steps) <= 8, verdicts) == (True, clean | {"deferred": "leak"})


def lost_by_group(log: str) -> dict[int, list[int]]:
    """What the audit reported: group -> SWA pages."""
    found: dict[int, list[int]] = {}
    for page, group in re.findall(r"SWA page (\d+) is lost: .*, group (\d+)\]", log):
        found.setdefault(int(group), []).append(int(page))
    return found


def test_the_audit_gives_both_places_in_sglang_and_the_number_of_lost_pages(churned):
    _, counted, log, page_size = churned
    lines = [line for line in log.splitlines() if "is lost" in line]
    parts = (
        "queued by free_swa at ",
        "re-pointed by set_full_to_swa_mapping at ",
        "/sglang/srt/mem_cache/",
        "SWALEAK=fix:barrier",
    )
    assert [part for line in lines for part in parts if part not in line] == []
    physical, mapped = counted[-1]
    assert len(lines) == physical - mapped > 0
    attached = f"swaleak: attached to a SWATokenToKVPoolAllocator of {512 * page_size} full"
    assert log.count(attached) == 1


SETTINGS = [
    "",
    "audit",
    "record:{}",
    "audit,record:{}",
    "fix:barrier",
    "fix:enqueue",
    "audit,record:{},fix:barrier",
    "audit,record:{},fix:enqueue",
]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("cache", "page_size"), KINDS)
def test_requests_with_an_int32_table_live_and_end(cache, page_size, setting, tmp_path):
    done = run(
        *(str(LIFECYCLE), "--cache", cache, "--page-size", str(page_size)),
        swaleak=setting.format(tmp_path / "t.jsonl"),
        path=ROOT,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    lost = {group: pages for group, pages in enumerate(seen["groups"], start=1) if pages}
    pages = sum(map(len, lost.values()))
    assert "watching failed" not in done.stderr
    assert seen["left"] == [0, pages]
    assert (pages > 0) == ("fix:" not in setting)
    if "audit" in setting:
        assert lost_by_group(done.stderr) == lost
    if "record" in setting:
        (trace,) = tmp_path.glob("t.*.jsonl")
        fix = setting.partition("fix:")[2] or "deferred"
        followed, ends, _ = replayed(trace, fix)
        assert (len(ends), followed.differ) == (len(seen["groups"]), 0)
        assert followed.verdict == ("leak" if pages else "clean")


def test_a_killed_recording_replays_up_to_its_last_line(tmp_path):
    done = run(
        *(str(CHURN), "--cache", "unified", "--kill-at", "40", "--no-counts"),
        swaleak=f"record:{tmp_path}/t.jsonl",
    )
    (trace,) = tmp_path.glob("t.*.jsonl")
    whole, groups, _ = replayed(trace, "deferred")
    lines = trace.read_bytes().splitlines(keepends=True)
    trace.write_bytes(b"".join(lines[:-1]) + lines[-1][:-3])
    cut, _, torn = replayed(trace, "deferred")
    assert (done.returncode, len(groups), whole.differ, cut.groups, "is torn" in torn) == (
        -9,
        39,
        0,
        38,
        True,
    )


def test_a_second_allocator_of_a_process_gets_its_own_trace(tmp_path):
    code = (
        "from tests.churn import imported_caches; from swaleak.targets.driver import Sizes\n"
        "c = imported_caches()\n"
        "for cache in ('swa', 'unified'): c.make(cache, 'shipped', Sizes(8, 8, 4), 1)"
    )
    run("-c", code, swaleak=f"record:{tmp_path}/t.jsonl", path=ROOT)
    assert len(list(tmp_path.glob("t.*.jsonl"))) == 2


def test_record_runs_a_command_and_says_what_it_wrote(tmp_path):
    output = str(tmp_path / "t.jsonl")
    churn = (sys.executable, str(CHURN), "--requests", "80", "--no-counts")
    done = run("-m", "swaleak", "record", "-o", output, "-f", "json", "--", *churn)
    (trace,) = tmp_path.glob("t.*.jsonl")
    report = json.loads(done.stdout[done.stdout.index('{\n "schema"') :])  # after the command's
    assert (done.returncode, report["results"]) == (0, [{"trace": str(trace)}])
