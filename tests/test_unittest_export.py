"""`swaleak export --unittest`: the exported file judges a release as swaleak itself does."""

import builtins
import os
import subprocess
import sys
import unittest
from pathlib import Path, PurePosixPath

import pytest

from swaleak.checker.case import run_case
from swaleak.errors import ScriptError
from swaleak.report.unittest_export import unittest_file
from swaleak.scenario import catalogue as scenarios
from swaleak.scenario.toml import parse
from swaleak.targets import shims
from swaleak.targets.loader import ModuleLoader
from swaleak.targets.sources import ALLOCATOR, SourceTree, from_wheel
from tests.conftest import sglang, wheel

RELEASES = ("0.5.13.post1", "0.5.18", "0.5.19", "0.5.20", "0.5.23")
# more than the catalogue has: parts, tails, names that are no Python, a node adopted after a free
SCRIPTS = {
    "parts": """
      { alloc = "a node", pages = 3 }, { alloc = "class" }, { alloc = "a_node" },
      { free_swa = "a node", pages = "0:1" }, { group = "begin" },
      { free_swa = "a node", pages = "-1:" }, { free = "a node", pages = "1:2" },
      { free = "class" }, { group = "end" }, { expect = { physical = 1, mapped = 1 } },
      { alloc = "class", pages = 2 }, { free_full = "a node" },
    """,
    "tail": """
      { alloc_tail = "x", pages = 3, tail = 2 }, { free_swa_segment = "x", pages = "1:3" },
      { free_full = "x", pages = "0:1" }, { alloc = "\\"y\\"" }, { free_segment = "\\"y\\"" },
    """,
    "ghost": """
      { alloc = "old" }, { alloc = "new" }, { group = "begin" }, { free = "old" },
      { adopt = "old", from = "new" }, { group = "end" }, { free_swa = "old" },
    """,
    "left open": """
      { alloc = "a" }, { alloc = "b" }, { group = "begin" }, { free_swa = "a" },
      { replace = "a", from = "b" },
    """,
}


def script(name: str, sizes: str = "4, 256"):
    steps = SCRIPTS[name].strip().rstrip(",").replace("\n", " ")
    text = f"schema = 1\nsteps = [{steps}]\n[pools]\npage_sizes = [{sizes}]\n"
    return parse(text, name=name, source=f"{name}.toml")


EVERYTHING = [*scenarios.catalogue(), *(script(name) for name in SCRIPTS)]


def passes(text: str, tree) -> bool:
    """Run an exported file where `sglang` is that of a source tree."""
    importer = ModuleLoader(tree, "cpu").import_
    module = {
        "__name__": "exported",
        "__builtins__": {**vars(builtins), "__import__": importer},
    }
    exec(compile(text, "exported.py", "exec"), module)
    (case,) = (v for k, v in module.items() if k.startswith("Test"))
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(case)
    result = unittest.TestResult()
    suite.run(result)
    assert result.testsRun
    return result.wasSuccessful()


def install(tree: SourceTree, folder: Path) -> None:
    """Make `import sglang` find a release's allocator, and stand-ins for what it imports."""
    standins = {
        name: f"from swaleak.targets import shims\nglobals().update(shims.MODULES[{name!r}]('cpu'))"
        for name in shims.MODULES
    }
    package = ALLOCATOR.replace("/", ".")
    texts = {"/".join(name.split(".")): text for name, text in standins.items()}
    texts |= {
        path.removesuffix(".py").removesuffix("/__init__"): text
        for path, text in tree.files.items()
        if path.startswith(f"{ALLOCATOR}/")
    }
    parents = {str(parent) for path in texts for parent in PurePosixPath(path).parents} - {"."}
    for path, text in {**dict.fromkeys(parents - texts.keys(), ""), **texts}.items():
        file = folder / (f"{path}/__init__.py" if path in parents else f"{path}.py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert (folder / package.replace(".", "/") / "swa.py").is_file()


@pytest.mark.wheels
@pytest.mark.parametrize(("version", "code"), [("0.5.18", 1), ("0.5.19", 0)])
def test_tombstone_recovery_fails_on_0_5_18_and_passes_on_0_5_19(version, code, tmp_path):
    """As a person runs it: `python -m unittest`, with an `sglang` that can be imported."""
    install(from_wheel(wheel(version)), tmp_path)
    (tmp_path / "test_bug.py").write_text(unittest_file(scenarios.load("tombstone-recovery")))
    run = subprocess.run(
        [sys.executable, "-m", "unittest", "test_bug.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))},
    )
    leaks = run.stderr.count("AssertionError: 2 != 1 : physical SWA pages, mapped SWA pages")
    assert (run.returncode, leaks, "\nRan " in run.stderr) == (code, 6 * code, True)


@pytest.mark.wheels
@pytest.mark.parametrize("version", RELEASES)
def test_it_judges_as_swaleak_does(version):
    tree = from_wheel(wheel(version))
    target = sglang(version)
    verdicts = {
        scenario.name: (
            passes(unittest_file(scenario), tree),
            all(run_case(scenario, target, "shipped", size).safe for size in scenario.page_sizes),
        )
        for scenario in EVERYTHING
    }
    assert {name: two for name, two in verdicts.items() if two[0] is not two[1]} == {}


@pytest.mark.parametrize("scenario", EVERYTHING, ids=lambda scenario: scenario.name)
def test_it_names_nothing_but_sglang_torch_and_unittest(scenario):
    text = unittest_file(scenario)
    imports = [line.split()[1] for line in text.splitlines() if line.startswith(("import", "from"))]
    assert [
        name for name in imports if name.split(".")[0] not in ("sglang", "torch", "unittest")
    ] == []


BAD = {
    "no such node": ('{ free = "x" }', "step 1: free: there is no node 'x' at this point"),
    "no room": (
        '{ alloc = "x", pages = 9 }',
        "step 1: alloc x, 9 pages: the full pool is too small",
    ),
    "too long": ('{ alloc = "x" }, ' + "{ expect = { mapped = 1 } }, " * 1000, "1001 steps"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_makes_no_sense_is_refused(name):
    steps, reason = BAD[name]
    scenario = parse(f"schema = 1\nsteps = [{steps}]", name="x", source="x.toml")
    with pytest.raises(ScriptError, match=r"^x\.toml: ") as error:
        unittest_file(scenario)
    assert reason in str(error.value)
