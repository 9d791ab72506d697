"""Inside a real SGLang: its caches, and the plugin as its processes load it.

Runs where SGLang and all that it imports are installed (tests/requirements-sglang.txt), and
swaleak with its entry point: ``pytest -m sglang``. Each run is a process of its own, because
SGLang loads plugins once.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from swaleak.allocator.strategies import STRATEGIES
from swaleak.checker.case import run_case
from swaleak.checker.run import run_trace as follow
from swaleak.scenario.toml import parse, to_toml
from swaleak.targets.open import open_target
from swaleak.trace.format import TraceReader
from swaleak.trace.to_scenario import reduce

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None, reason="SGLang is not installed here"
    ),
]

CHURN = Path(__file__).with_name("churn.py")
KINDS = [(cache, page_size) for cache in ("swa", "unified") for page_size in (1, 4)]


def run(*command: str, swaleak: str = "", path: Path | None = None) -> subprocess.CompletedProcess:
    env = {**os.environ, "SWALEAK": swaleak}
    if path:
        env["PYTHONPATH"] = os.pathsep.join([str(path), *filter(None, [env.get("PYTHONPATH")])])
    return subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True)


def counts_of_tree(name: str, **how) -> set[tuple]:
    done = run(
        *("-m", "swaleak", "repro", name, "--on", "installed", "-s", "shipped", "-f", "json"), **how
    )
    assert done.stdout, done.stderr
    results = json.loads(done.stdout)["results"]
    return {
        (r["scenario"], r["page_size"], r["origin"], r["physical"], r["mapped"], r["as_declared"])
        for r in results
    }


def expected(origin: str, physical: int, mapped: int) -> set[tuple]:
    return {
        (f"tree/recovery:{cache}", page_size, origin, physical, mapped, True)
        for cache, page_size in KINDS
    }


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


WISHES = [
    ("", "shipped", 2, 1),
    ("fix:barrier", "grafted", 2, 2),
    ("fix:enqueue", "grafted", 2, 2),
]


@pytest.mark.parametrize(("wish", "origin", "physical", "mapped"), WISHES)
def test_the_caches_leak_and_the_plugin_repairs_them(wish, origin, physical, mapped):
    found = counts_of_tree("tree/recovery", swaleak=wish)
    assert found == expected(origin, physical, mapped)


@pytest.mark.wheels
def test_the_caches_of_the_next_release_are_clean(tmp_path):
    folder = os.environ.get("SWALEAK_WHEELS")
    wheels = sorted(Path(folder).glob("sglang-0.5.19-*.whl")) if folder else []
    if not wheels:
        pytest.skip("SWALEAK_WHEELS names no folder with the wheel of 0.5.19")
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(tmp_path)
    assert counts_of_tree("tree/recovery", path=tmp_path) == expected("shipped", 2, 2)


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


def followed_groups(trace: Path, strategy: str, on: str = "installed"):
    target, ends = open_target(on, "cpu"), []
    followed = follow(
        TraceReader(trace),
        lambda sizes: target.make(strategy, sizes),
        lambda seen: ends.append((seen.last.physical, seen.last.mapped)) or False,
    )
    return followed, ends


@pytest.mark.parametrize("on", ["installed", "builtin"])
def test_the_trace_replays_group_by_group(churned, on):
    trace, counted, _, _ = churned
    followed, ends = followed_groups(trace, "deferred", on)
    assert (ends, followed.differ, followed.verdict) == (counted, 0, "leak")


@pytest.mark.parametrize("strategy", ["eager", "enqueue", "barrier"])
def test_the_same_trace_is_clean_under_the_fixes(churned, strategy):
    trace, counted, _, _ = churned
    followed, ends = followed_groups(trace, strategy)
    assert (len(ends), followed.verdict) == (len(counted), "clean")


def test_the_trace_shrinks_to_a_small_scenario(churned):
    trace, _, _, page_size = churned
    target = open_target("installed", "cpu")
    small = reduce(trace, target, "deferred").scenario
    again = parse(to_toml(small), name=small.name, source="")
    verdicts = {name: run_case(again, target, name, page_size).verdict for name in STRATEGIES}
    clean = dict.fromkeys(STRATEGIES, "clean")
    assert (len(again.steps) <= 8, verdicts) == (True, clean | {"deferred": "leak"})


def test_the_audit_tells_once_with_both_places_in_sglang(churned):
    _, _, log, _ = churned
    (told,) = [line for line in log.splitlines() if "is lost" in line]
    parts = (
        "queued by free_swa at ",
        "re-pointed by set_full_to_swa_mapping at ",
        "/sglang/srt/mem_cache/",
        "SWALEAK=fix:barrier",
    )
    assert [part for part in parts if part not in told] == []


def test_a_killed_recording_replays_up_to_its_last_line(tmp_path):
    done = run(
        *(str(CHURN), "--cache", "unified", "--kill-at", "40", "--no-counts"),
        swaleak=f"record:{tmp_path}/t.jsonl",
    )
    (trace,) = tmp_path.glob("t.*.jsonl")
    whole, groups = followed_groups(trace, "deferred")
    lines = trace.read_bytes().splitlines(keepends=True)
    trace.write_bytes(b"".join(lines[:-1]) + lines[-1][:-3])
    reader, target = TraceReader(trace), open_target("installed", "cpu")
    torn = follow(reader, lambda sizes: target.make("deferred", sizes))
    assert (done.returncode, len(groups), whole.differ, torn.groups, "is torn" in reader.torn) == (
        -9,
        39,
        0,
        38,
        True,
    )


def test_a_second_allocator_of_a_process_gets_its_own_trace(tmp_path):
    code = (
        "from swaleak.targets.radix_cache import Caches; c = Caches('cpu'); "
        "c.make('swa', None, 8, 8, 4, 1); c.make('unified', None, 8, 8, 4, 1)"
    )
    run("-c", code, swaleak=f"record:{tmp_path}/t.jsonl")
    assert len(list(tmp_path.glob("t.*.jsonl"))) == 2


def test_record_runs_a_command_and_says_what_it_wrote(tmp_path):
    output = str(tmp_path / "t.jsonl")
    churn = (sys.executable, str(CHURN), "--requests", "80", "--no-counts")
    done = run("-m", "swaleak", "record", "-o", output, "-f", "json", "--", *churn)
    (trace,) = tmp_path.glob("t.*.jsonl")
    report = json.loads(done.stdout[done.stdout.index('{\n "schema"') :])  # after the command's
    assert (done.returncode, report["results"]) == (0, [{"trace": str(trace)}])
