"""What a person types, and what comes back: exit codes, one line for bad input, JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import swaleak
from swaleak.report import doctor
from swaleak.targets import open as target
from tests.conftest import ROOT, USER_CLASS, Answer, Cli, wheel

STEPS = 'schema = 1\nsteps = [ { alloc = "a" }, %s ]\n'
TABLES = 'schema = 1\nsteps = [ { group = "begin" } ]\n%s'

BAD_SCENARIOS = {
    "steps = [ { alloc = 'a' } ]": "schema: this swaleak reads schema = 1",
    "schema = [": "broken TOML: Invalid value (at end of document)",
    "schema = 1": "steps: needs a non-empty array of tables",
    "schema = 1\nstpes = []": "unknown key 'stpes'; did you mean 'steps'?",
    "schema = 1\nsteps = [1]": "step 1: must be a table such as { alloc = 'node' }",
    STEPS % '{ fre_swa = "a" }': "step 2: unknown step 'fre_swa'; did you mean 'free_swa'?",
    STEPS % '{ free = "a", page = 1 }': "step 2: unknown key 'page'; did you mean 'pages'?",
    STEPS % '{ free = "a", pages = 1 }': 'step 2: pages must be a slice such as "0:1" or "-1:"',
    STEPS % '{ free = "a", pages = "0:1", slots = "0:1" }': (
        "step 2: takes pages or slots, not both"
    ),
    STEPS % '{ free = "a", pages = "1:1" }': "step 2: free a: pages 1:1 refers to no slot",
    STEPS % '{ free = "b" }': "step 2: free: there is no node 'b' at this point",
    STEPS % '{ alloc = "a" }': "step 2: node 'a' is allocated already",
    STEPS % '{ alloc = "b", pages = true }': (
        "step 2: pages: expected a whole number, got true or false"
    ),
    STEPS % '{ alloc = "b", pages = 8 }': (
        "step 2: alloc b, 8 pages: the full pool is too small, 8 pages asked for, 7 of 8 free"
    ),
    STEPS % '{ alloc_tail = "b", pages = 1, tail = 2 }': (
        "step 2: tail = 2 is longer than pages = 1"
    ),
    STEPS % '{ alloc = "b", pages = 2 }, { free_swa = "a" }, { recover = "a", from = "b" }': (
        "step 4: recover: lengths differ, 1 and 2 slots"
    ),
    STEPS
    % '{ alloc = "b" }, { free_swa = "b" }, { free_swa = "a" }, { adopt = "a", from = "b" }': (
        "step 5: adopt: 'b' has no SWA pages to give"
    ),
    STEPS % '{ recover = "a", from = "a" }': "step 2: recover a from itself makes no sense",
    STEPS % '{ recover = "a" }': "step 2: needs from = NAME",
    STEPS % '{ alloc = "b" }, { overwrite = "a", from = "b" }': (
        "step 3: overwrite a: it was not passed to any free yet"
    ),
    STEPS % '{ group = "open" }': "step 2: group: unknown value 'open'; known: begin, end",
    STEPS % "{ expect = {} }": "step 2: expect needs physical, mapped or both",
    TABLES % "[pools]\npage_sizes = [0]": ("pools.page_sizes[0]: expected a whole number >= 1"),
    TABLES % "[pools]\nfull_pages = 1000000000000000000": (
        "pools.full_pages: expected a whole number <= 2147483648"
    ),
    TABLES % '[expect]\nlazy = { verdict = "leak" }': (
        "expect: unknown key 'lazy'; known: eager, deferred, enqueue, barrier, every"
    ),
    TABLES % '[expect]\neager = { verdict = "lead" }': (
        "expect.eager.verdict: unknown value 'lead'; did you mean 'leak'?"
    ),
    TABLES % '[[known]]\nversions = "0.5.18"\nverdict = "leak"': (
        "known[0].versions: '0.5.18' is no range of releases; did you mean '==0.5.18'?"
    ),
}


@pytest.mark.parametrize("text", BAD_SCENARIOS)
def test_a_scenario_that_makes_no_sense(text: str, cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    answer = cli("repro", file, "--strategy", "deferred", "--page-size", "1")
    assert (answer.code, answer.out, answer.err) == (
        2,
        "",
        f"swaleak: {file}: {BAD_SCENARIOS[text]}\n",
    )


BAD_CALLS = [
    ("repro --strategy defered", 2, "unknown strategy 'defered'; did you mean 'deferred'?"),
    (
        "repro --strategy barier-snapshot",
        2,
        "unknown strategy 'barier-snapshot'; did you mean 'barrier-snapshot'?",
    ),
    (
        "repro tombstone-recovry",
        2,
        "unknown scenario 'tombstone-recovry'; did you mean 'tombstone-recovery'?",
    ),
    (
        "show tombstone",
        2,
        "unknown scenario 'tombstone'; did you mean 'tombstone-recovery' or 'tombstone-replace'?",
    ),
    ("repro run.jsonl", 2, "run.jsonl: a trace, not a scenario; `swaleak replay run.jsonl`"),
    ("replay leak.toml", 2, "leak.toml: a scenario, not a trace; `swaleak repro leak.toml`"),
    ("replay -", 2, "-: a trace is read more than once, which standard input cannot be"),
    ("check builtin", 2, "check: the built-in model is no candidate, it ships nothing; name"),
    ("check nonsense", 2, "unknown target 'nonsense'; known: auto, builtin, installed, a release"),
    ("repro --on 0.5.18 --on 0.5.19", 2, "--on: given 2 times, takes one"),
    ("repro -o a.json -o b.xml", 2, "--output/-o: given 2 times, takes one"),
    ("record -o a.jsonl --fix barrier --fix enqueue -- true", 2, "--fix: given 2 times"),
    ("repro no/such.toml", 2, "no/such.toml: No such file or directory"),
    ("repro . --on builtin", 2, "unknown scenario '.'; known: adopt-in-group"),
    ("repro --on nosuch.whl", 2, "nosuch.whl: no such file or folder"),
    ("repro --on instaled", 2, "unknown target 'instaled'; did you mean 'installed'?"),
    ("repro --on no.such:Class", 125, "no.such:Class: ModuleNotFoundError: No module named 'no'"),
    ("repro --on collections:Counter", 125, "collections:Counter: its allocator cannot be made"),
    ("repro --on math:pi", 125, "math:pi: is no class"),
    ("repro --strategy shipped --on builtin", 2, "the built-in model ships nothing; name one of"),
    ("repro --patch x.diff --on builtin", 2, "--patch needs SGLang's sources to apply to"),
    ("repro --device gpu", 2, "unknown device 'gpu'; did you mean 'cpu'?"),
    ("repro --device cpu:1", 2, "unknown device 'cpu:1'; did you mean 'cpu'?"),
    ("repro --page-size 0", 2, "page size 0: must be from 1 to 4096"),
    ("repro --page-size 4097", 2, "page size 4097: must be from 1 to 4096"),
    ("repro --page-size four", 2, "Invalid value for '--page-size': 'four' is not a "),
    ("repro --repeat 0", 2, "Invalid value for '--repeat': 0 is not "),
    ("repro --repeat x", 2, "Invalid value for '--repeat': 'x' is not a "),
    ("bench --samples 19", 2, "Invalid value for '--samples': 19 is not "),
    ("repro --format yaml", 2, "Invalid value for '--format' / '-f': 'yaml' is not one of"),
    ("repro -o x", 2, "-o x: unknown ending '(none)'"),
    ("list -o x.xml", 2, "-o x.xml: JUnit is for runs of scenarios, this command has none"),
    ("export steady-group", 2, "export: say as what; --unittest is what there is"),
    ("export nothing --unittest", 2, "unknown scenario 'nothing'"),
    ("repro -o report.doc", 2, "-o report.doc: unknown ending '.doc'; known: .json, .md"),
    ("repro -o no/such/report.md", 2, "-o no/such/report.md: there is no folder no/such"),
    (
        "repro --page-size 4096 --repeat 1000000",
        2,
        "tombstone-recovery: 3000005 pages of 4096 slots are over the limit of 2147483648 slots",
    ),
    ("verify --page-size 0", 2, "page size 0: must be from 1 to 4096"),
    ("record -o run.json -- true", 2, "-o run.json: a trace is a .jsonl file"),
    ("record -o no/such/run.jsonl -- true", 2, "-o no/such/run.jsonl: there is no folder no/such"),
    ("shrink run.jsonl -o run.json", 2, "-o run.json: a scenario is a .toml file"),
    ("export steady-group --unittest -o x.txt", 2, "-o x.txt: a unittest is a .py file"),
    ("check", 2, "Missing argument 'TARGET...'"),
    ("repro --no-such", 2, "No such option: --no-such"),
    ("bisect", 2, "No such command 'bisect'."),
]


@pytest.mark.parametrize(("call", "code", "message"), BAD_CALLS)
def test_bad_input_is_one_line(call: str, code: int, message: str, cli: Cli) -> None:
    answer = cli(*call.split())
    assert (answer.code, answer.out, answer.err.count("\n")) == (code, "", 1)
    assert answer.err.startswith(f"swaleak: {message}")


@pytest.mark.parametrize(
    "call",
    [
        ("replay", ""),
        ("diagnose", ""),
        ("list", "-o", ""),
        ("explore", "--save", ""),
        ("export", "steady-group", "--unittest", "-o", ""),
        ("record", "-o", "", "--", "true"),
        ("shrink", "run.jsonl", "-o", ""),
    ],
)
def test_a_file_without_a_name(call: tuple[str, ...], cli: Cli) -> None:
    said = "swaleak: a file without a name; is a variable empty?\n"
    assert cli(*call) == Answer(2, "", said)


def test_what_loses_nothing_may_be_given_twice(cli: Cli, tmp_path: Path) -> None:
    assert cli("list", "--help", "--help").code == 0
    call = "repro -s eager -s deferred --page-size 1 --page-size 4 --steps --steps"
    assert cli(*call.split(), "-o", tmp_path / "x.json").code == 0
    # behind the command's name, options are the command's own
    twice = ("-o", "t.jsonl", "--", "true", "-o", "a", "-o", "b")
    assert cli("record", *twice).err.startswith("swaleak: nothing was recorded: no process of")


def test_check_of_what_is_not_installed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.sources, "_installed", lambda: None)
    said = "swaleak: SGLang is not installed here; name a release, a wheel or a checkout\n"
    assert cli("check", "installed") == Answer(2, "", said)


COMMANDS = "repro verify check list show doctor bench diagnose export explore record replay shrink"
USAGE = {
    "repro": "[SCENARIO]...",
    "check": "TARGET...",
    "show": "SCENARIO",
    "diagnose": "[FILE|-]",
    "export": "SCENARIO",
    "record": "-- COMMAND...",
    "replay": "FILE",
    "shrink": "FILE",
}


@pytest.mark.parametrize("name", COMMANDS.split())
def test_help_reads_well(name: str, cli: Cli) -> None:
    answer = cli(name, "--help")
    assert (answer.code, answer.err, max(map(len, answer.out.splitlines()))) == (0, "", 80)
    usage = next(line for line in answer.out.splitlines() if "Usage:" in line)
    assert usage.split(f" {name} ")[1].split() == ["[OPTIONS]", *USAGE.get(name, "").split()]
    for leaked in ("<bool>", "<list", "<int", "<str>", "<path>", "TEXT", "INTEGER", "None"):
        assert leaked not in answer.out
    assert (".xml" in answer.out) == (name in ("repro", "verify", "check"))


def piped(*words: str, **variables: str) -> subprocess.Popen[str]:
    """Return a swaleak whose standard output nobody reads."""
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "swaleak", *words],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | variables,
    )
    os.close(writer)
    os.close(reader)
    return process


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("--help", 0),
        ("--version", 0),
        ("check --help", 0),
        ("list", 0),
        ("list -f json", 0),
        ("repro --on builtin -f markdown", 0),
        ("repro nothing", 2),
        ("diagnose /dev/null", 1),
    ],
)
def test_a_reader_that_leaves_changes_no_exit_code(call: str, code: int, unbuffered: str) -> None:
    process = piped(*call.split(), PYTHONUNBUFFERED=unbuffered)
    _, err = process.communicate()
    assert (process.returncode, err.count("\n")) == (code, int(code == 2))


def test_a_reader_that_leaves_takes_no_file(tmp_path: Path) -> None:
    process = piped("list", "-o", str(tmp_path / "list.json"))
    process.communicate()
    assert (process.returncode, (tmp_path / "list.json").is_file()) == (0, True)


def test_columns_of_0_are_none_at_all() -> None:
    command = [sys.executable, "-m", "swaleak", "list"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "0"}
    )
    assert (done.returncode, "tombstone-recovery" in done.stdout) == (0, True)


def test_list_and_doctor_count_the_same(cli: Cli) -> None:
    listed = len(json.loads(cli("list", "-f", "json").out)["results"])
    [facts] = json.loads(cli("doctor", "-f", "json").out)["results"]
    assert facts["scenarios"].startswith(f"{listed} in ")


HANGS = """
import _thread

class Hangs(Mine):
    def free_group_end(self):
        if {when}:
            _thread.interrupt_main()  # as Ctrl-C does
            while True:
                pass
        super().free_group_end()
"""


@pytest.mark.parametrize(
    ("call", "when", "where"),
    [
        (
            "check stuck:Hangs --page-size 4",
            "self.page_size == 4",
            "tombstone-recovery on stuck:Hangs, strategy shipped, page size 4",
        ),
        ("check stuck:Hangs", "True", "stuck:Hangs, tried out for the strategy it ships"),
        (
            "bench --baseline stuck:Hangs --candidate eager --page-size 4",
            "self.page_size == 4",
            "the first case of stuck:Hangs, eager",
        ),
    ],
)
def test_ctrl_c_says_what_hangs(
    call: str, when: str, where: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = USER_CLASS.format(strategy="Barrier") + HANGS.format(when=when)
    (tmp_path / "stuck.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "stuck", raising=False)
    assert cli(*call.split()) == Answer(130, "", f"swaleak: interrupted: {where}\n")


@pytest.mark.parametrize("call", [("repro", "--on", ""), ("check", " "), ("bench", "--on", "")])
def test_a_target_without_a_name(call: tuple[str, ...], cli: Cli) -> None:
    said = "swaleak: a target without a name; name one, such as builtin, 0.5.18 or a path\n"
    assert cli(*call) == Answer(2, "", said)


@pytest.mark.parametrize(
    "call", ["repro", "verify", "check builtin", "bench --samples 20", "explore", "doctor"]
)
def test_a_command_that_is_stopped_before_there_is_anything_to_show(
    call: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(target, "open_target", stopped)
    monkeypatch.setattr(doctor.sources, "from_installed", stopped)
    monkeypatch.setattr(doctor.sources, "is_installed", lambda: True)
    assert cli(*call.split()) == Answer(130, "", "swaleak: interrupted\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_device_that_is_not_there(cli: Cli) -> None:
    answer = cli("repro", "--device", "cuda")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert answer.err.startswith("swaleak: --device cuda: torch ")


def test_targets_that_cannot_be_loaded(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "half.whl").write_bytes(b"PK\x03\x04" + bytes(1000))
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as other:
        other.writestr("other/__init__.py", "")
    swa = "sglang/srt/mem_cache/allocator/swa.py"
    for name, text in (("syntax", "def"), ("missing", "from sglang.srt.nowhere import thing")):
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as broken:
            broken.writestr(swa, text)
    said = {
        "empty": "no SGLang there, sglang/srt/mem_cache/allocator/ is missing",
        "half.whl": "not a wheel that can be read (File is not a zip file)",
        "other.whl": f"no SGLang with an SWA allocator, {swa} is missing",
        "syntax.whl": f"sglang at {tmp_path}/syntax.whl: {swa}:1: invalid syntax",
        "missing.whl": f"sglang at {tmp_path}/missing.whl: {swa} has no class "
        "SWATokenToKVPoolAllocator",
    }
    for name, message in said.items():
        answer = cli("check", tmp_path / name)
        place = "" if message.startswith("sglang at") else f"{tmp_path / name}: "
        assert (answer.code, answer.out, answer.err) == (125, "", f"swaleak: {place}{message}\n")


def test_json_is_the_contract(cli: Cli) -> None:
    answer = cli("repro", "--strategy", "deferred-resolve", "--page-size", 4, "--format", "json")
    assert (answer.code, answer.err) == (0, "")
    assert json.loads(answer.out) == {
        "schema": "swaleak/1",
        "command": "repro",
        "version": swaleak.__version__,
        "torch": str(torch.__version__),
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "ok": True,
        "results": [
            {
                "scenario": "tombstone-recovery",
                "reach": "production",
                "target": "builtin",
                "strategy": "deferred",
                "origin": "builtin",
                "page_size": 4,
                "physical": 2,
                "mapped": 1,
                "verdict": "leak",
                "violations": [
                    {"kind": "leak", "pool": "swa", "pages": [2], "fault": "allocator"},
                    {"kind": "lost", "owner": "node", "pages": [0], "fault": "allocator"},
                ],
                "declared": "leak",
                "as_declared": True,
                "known": None,
            }
        ],
    }


@pytest.mark.wheels
def test_json_on_0_5_18(cli: Cli) -> None:
    call = ("repro", "--on", wheel("0.5.18"), "-s", "deferred", "-s", "barrier", "-f", "json")
    answer = cli(*call, "--page-size", 4)
    keys = ("target", "strategy", "origin", "physical", "mapped", "verdict", "known")
    assert [tuple(r[key] for key in keys) for r in json.loads(answer.out)["results"]] == [
        ("sglang 0.5.18", "deferred", "shipped", 2, 1, "leak", "fixed in 0.5.19"),
        ("sglang 0.5.18", "barrier", "grafted", 2, 2, "clean", None),
    ]


def test_steps_in_json(cli: Cli) -> None:
    call = "repro -s deferred --page-size 1 --steps -f json"
    [result] = json.loads(cli(*call.split()).out)["results"]
    keys = ("step", "op", "physical", "mapped")
    assert [tuple(step[key] for key in keys) for step in result["steps"]] == [
        (1, "alloc bystander", 1, 1),
        (2, "alloc node", 2, 2),
        (3, "alloc incoming", 3, 3),
        (4, "group begin", 3, 3),
        (5, "free_swa node", 3, 3),
        (6, "recover node from incoming", 3, 2),
        (7, "group end", 2, 1),
    ]
    assert [bool(step["violations"]) for step in result["steps"]] == [False] * 6 + [True]


@pytest.mark.parametrize("name", ["deferred", "deferred-resolve"])
def test_exit_code_of_repro_and_its_table(name: str, cli: Cli) -> None:
    answer = cli("repro", "--strategy", name, "--page-size", "256", "--on", "builtin")
    [row] = [line.split() for line in answer.out.splitlines() if line.startswith(" deferred")]
    assert (answer.code, row) == (
        0,
        ["deferred", "builtin", "256", "2", "1", "leak", "leak"],
    )
    assert "SWA page 2 leaked; node lost the SWA side of its page 0" in answer.out


@pytest.mark.parametrize("outcome", ["physical = 5", 'kinds = ["lost"]', "physical = 2"])
def test_what_was_declared_is_printed_where_it_did_not_come_out(
    outcome: str, cli: Cli, tmp_path: Path
) -> None:
    file = tmp_path / "mine.toml"
    declared = f'expect.every = {{ verdict = "clean", {outcome} }}'
    file.write_text(f'schema = 1\nsteps = [{{ alloc = "a", pages = 2 }}]\n{declared}\n')
    answer = cli("repro", file, "--on", "builtin", "-s", "eager")
    wanted = {"physical = 5": "clean, physical 5", 'kinds = ["lost"]': "clean, with lost"}
    line = f"eager: clean, physical 2, mapped 2 (MISMATCH: declared {wanted.get(outcome)})"
    verdict = "3 of 3 runs not as declared." if outcome in wanted else "3 runs, all as declared."
    lines = answer.out.splitlines()
    assert (answer.code, lines[1], line in lines, "clean MISMATCH" in answer.out) == (
        int(outcome in wanted),
        verdict,
        outcome in wanted,
        outcome in wanted,
    )


@pytest.mark.parametrize(
    ("versions", "said"),
    [("==0.5.18", "0.5.18"), (">=0.5.18,<0.5.19", "from 0.5.18, before 0.5.19")],
)
def test_releases_are_said_in_words(versions: str, said: str, cli: Cli, tmp_path: Path) -> None:
    known = f'[[known]]\nversions = "{versions}"\nverdict = "leak"\n'
    (tmp_path / "mine.toml").write_text(f'schema = 1\nsteps = [{{ alloc = "a" }}]\n{known}')
    answer = cli("show", tmp_path / "mine.toml")
    assert f"SGLang {said} as shipped: leak" in answer.out


def test_what_is_not_as_declared_is_exit_code_1(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    text = (ROOT / "scenarios" / "tombstone-recovery.toml").read_text()
    file.write_text(text.replace("physical = 2, mapped = 1", "physical = 3, mapped = 1"))
    assert cli("repro", file, "--strategy", "deferred").code == 1
    file.write_text(text.replace('{ group = "end" },', "{ expect = { mapped = 3 } },"))
    answer = cli("repro", file, "--strategy", "barrier", "--page-size", "1")
    assert (answer.code, "step 7 expects mapped 3, found 2" in answer.out) == (1, True)


OPEN = '{ alloc = "b" }, { group = "begin" }, { free_swa = "b" }'


@pytest.mark.parametrize(
    ("steps", "open_group"),
    [
        (OPEN, True),
        (OPEN + ', { group = "end" }', False),
        (OPEN + ', { group = "begin" }', False),  # the built-in model refuses it
    ],
)
def test_a_script_that_ends_in_an_open_group_says_so(
    steps: str, open_group: bool, cli: Cli, tmp_path: Path
) -> None:
    file = tmp_path / "open.toml"
    file.write_text(STEPS % steps)
    call = ("repro", file, "--on", "builtin", "-s", "deferred", "--page-size", "1")
    [result] = json.loads(cli(*call, "-f", "json").out)["results"]
    said = "The group is still open; what waits for its end is not judged." in cli(*call).out
    assert (result.get("open_group", False), said) == (open_group, open_group)


@pytest.mark.parametrize(
    ("strategy", "physical", "mapped"), [("deferred", 101, 1), ("barrier", 2, 2)]
)
def test_repeat_shows_the_slope(strategy: str, physical: int, mapped: int, cli: Cli) -> None:
    call = f"repro -s {strategy} --repeat 100 --page-size 4 -f json --on builtin"
    answer = cli(*call.split())
    [result] = json.loads(answer.out)["results"]
    keys = ("physical", "mapped", "repeats", "leaked_per_repeat", "as_declared")
    slope = (physical - mapped) / 100
    assert tuple(result[key] for key in keys) == (physical, mapped, 100, slope, True)


def test_verify_on_the_built_in_model(cli: Cli) -> None:
    answer = cli("verify", "--on", "builtin")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.splitlines()[1].endswith("runs, all as declared.")
    assert max(map(len, answer.out.splitlines())) <= 80
    rows = [line.split() for line in answer.out.splitlines()]
    cells = ["ok", "2/2", "2/1", "leak", "ok", "2/2", "ok", "2/2"]
    assert ["tombstone-recovery", *cells] in rows


def test_markdown_is_a_table_to_paste(cli: Cli) -> None:
    answer = cli("repro", "-s", "deferred", "--page-size", "1", "-f", "markdown")
    lines = answer.out.splitlines()
    assert [line for line in lines if line.startswith("|")] == [
        "| strategy | origin | page size | physical | mapped | verdict | declared |",
        "| --- | --- | --: | --: | --: | --- | --- |",
        "| deferred | builtin | 1 | 2 | 1 | leak | leak |",
    ]


@pytest.mark.parametrize("ending", ["json", "md", "svg", "html"])
def test_output_files(ending: str, cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / f"report.{ending}"
    file.write_text("old")
    answer = cli("repro", "-s", "deferred", "-o", file)
    assert (answer.code, [path.name for path in tmp_path.iterdir()]) == (0, [file.name])
    assert "leak" in file.read_text()


@pytest.mark.wheels
def test_doctor_and_json_list_what_stands_in_for_the_rest_of_sglang(cli: Cli) -> None:
    [facts] = json.loads(cli("doctor", "--on", wheel("0.5.18"), "-f", "json").out)["results"]
    helpers = ["is_hip", "is_npu", "get_bool_env_var", "get_num_new_pages", "next_power_of_2"]
    assert set(facts["stand_ins"]) == {
        "sglang.kernels.ops.memory.allocator.alloc_decode_kernel",
        "sglang.kernels.ops.memory.allocator.alloc_extend_kernel",
        "sglang.srt.disaggregation.kv_events.StorageMedium",
        "sglang.srt.mem_cache.base_swa_memory_pool.BaseSWAKVPool",
        *(
            f"sglang.srt.mem_cache.hicache_storage.PoolName{n}"
            for n in ("", ".KV", ".MAMBA", ".SWA")
        ),
        *(f"sglang.srt.runtime_context.{name}" for name in ("get_serving", "get_spec")),
        *(f"sglang.srt.utils.common.{name}" for name in ("ceil_align", "get_num_new_pages")),
        *(f"sglang.srt.utils.{name}" for name in helpers),
    }
    report = json.loads(cli("repro", "--on", wheel("0.5.18"), "-f", "json").out)
    [(target, names)] = report["stand_ins"].items()
    assert (target, set(names) < set(facts["stand_ins"])) == ("sglang 0.5.18", True)


def test_list_show_doctor(cli: Cli) -> None:
    listed = json.loads(cli("list", "-f", "json").out)["results"]
    assert next(s["scenario"] for s in listed) == "tombstone-recovery"
    shown = cli("show", "nested-group")
    assert (shown.code, "Groups do not nest." in shown.out) == (0, True)
    assert "5   group begin" in shown.out
    [facts] = json.loads(cli("doctor", "-f", "json").out)["results"]
    assert set(facts) >= {"swaleak", "python", "torch", "devices", "sglang", "cache"}


@pytest.mark.parametrize(
    "call", ["--help", "repro --help", "list", "show steady-group", "--version"]
)
def test_torch_is_not_imported(call: str) -> None:
    program = (
        "import sys\nfrom swaleak.cli import main\n"
        "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", program, *call.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
