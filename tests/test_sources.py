"""Where sources come from, and which of them are a release. A release is fetched once and kept."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from swaleak.errors import TargetError, UsageError
from swaleak.targets import sources
from swaleak.targets.open import open_target, open_targets
from swaleak.targets.sources import RELEASES, from_folder, from_release, from_wheel
from tests.conftest import GIT, Cli, unpack, wheel

SWA = f"{sources.ALLOCATOR}/swa.py"
CACHE = f"{sources.MEM_CACHE}/swa_radix_cache.py"

NOWHERE = "http://127.0.0.1:9/simple"  # nobody listens there


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SWALEAK_CACHE", str(folder))
    return folder


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index of the user's: the folder that holds the wheels, through pip's own words."""
    folder = wheel("0.5.18").parent
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", NOWHERE)


@pytest.mark.wheels
def test_fetched_once_then_read_without_a_network(
    cli: Cli, cache: Path, shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = cli("check", "v0.5.18")
    assert (answer.code, answer.err) == (1, "")
    [kept] = cache.iterdir()
    with zipfile.ZipFile(kept) as archive:
        folders = {str(Path(name).parent) for name in archive.namelist()}
    assert kept.name == "sglang-0.5.18.sources-2.zip" and kept.stat().st_size < 700_000
    assert folders == {
        ".",
        "sglang/kernels/ops/memory",
        "sglang/srt",
        "sglang/srt/mem_cache",
        "sglang/srt/mem_cache/allocator",
        "sglang/srt/mem_cache/unified_cache",
        "sglang/srt/mem_cache/unified_cache/components",
        "sglang/srt/session",
        "sglang/srt/utils",
    }
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert cli("check", "0.5.18").out == answer.out


@pytest.mark.wheels
def test_a_release_that_does_not_exist(cli: Cli, cache: Path, shop: Path) -> None:
    answer = cli("check", "0.5.99")
    assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1)
    assert answer.err.startswith("swaleak: unknown SGLang release '0.5.99'; did you mean '0.5.1")
    assert list(cache.iterdir()) == []


def test_no_network_is_said_in_one_line(cli: Cli, cache: Path, no_network: None) -> None:
    answer = cli("check", "0.5.18")
    assert (answer.code, answer.out) == (125, "")
    assert answer.err == (
        f"swaleak: sglang 0.5.18 is not in {cache} and pip cannot reach a package index; "
        f"give the path of a wheel instead\n"
    )
    assert list(cache.iterdir()) == []


def test_a_release_without_the_package(cli: Cli, cache: Path) -> None:
    answer = cli("repro", "--on", "0.5.12")
    assert (answer.code, answer.err, cache.exists()) == (
        125,
        f"swaleak: sglang 0.5.12 has no allocator package; it came with {sources.FIRST}\n",
        False,
    )


@pytest.mark.wheels
def test_a_broken_download_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = wheel("0.5.18")
    cut = tmp_path / real.name
    cut.write_bytes(real.read_bytes()[:100_000])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(TargetError):
        from_release("0.5.18")
    assert list(cache.iterdir()) == []


@pytest.mark.wheels
def test_a_damaged_cache_is_fetched_again(cache: Path, shop: Path) -> None:
    first = from_release("0.5.18")
    kept = cache / "sglang-0.5.18.sources-2.zip"
    whole = kept.read_bytes()
    kept.write_bytes(whole[: len(whole) // 2])
    assert from_release("0.5.18") == first
    assert kept.read_bytes() == whole


@pytest.mark.wheels
def test_a_cache_that_cannot_be_written(
    tmp_path: Path, shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SWALEAK_CACHE", str(tmp_path / "file" / "cache"))
    assert from_release("0.5.18").version == "0.5.18"


@pytest.mark.wheels
def test_two_at_once_do_no_harm(cache: Path, shop: Path) -> None:
    code = "from swaleak.targets.sources import from_release; print(from_release('0.5.18').version)"
    runs = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [run.communicate()[0] for run in runs] == ["0.5.18\n"] * 3
    assert [path.name for path in cache.iterdir()] == ["sglang-0.5.18.sources-2.zip"]


@pytest.mark.wheels
@pytest.mark.parametrize("terminal", [True, False])
def test_a_download_is_announced_on_a_terminal(
    terminal: bool,
    cache: Path,
    shop: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    from_release("0.5.18")
    said = f"fetching sglang 0.5.18 with pip, to keep it in {cache}\n"
    assert capsys.readouterr().err == (said if terminal else "")
    from_release("0.5.18")
    assert capsys.readouterr().err == ""


@pytest.mark.wheels
def test_what_an_older_swaleak_has_kept_is_fetched_again(cache: Path, shop: Path) -> None:
    """It kept the allocator package alone."""
    from_release("0.5.18")
    [kept] = cache.iterdir()
    with zipfile.ZipFile(kept) as full, zipfile.ZipFile(cache / "sglang-0.5.18.zip", "w") as old:
        for name in full.namelist():
            if name.startswith(sources.ALLOCATOR):
                old.writestr(name, full.read(name))
    kept.unlink()
    assert CACHE in from_release("0.5.18").files


@pytest.mark.wheels
@pytest.mark.parametrize("version", RELEASES)
def test_an_untouched_wheel_is_its_release(version: str) -> None:
    tree = from_wheel(wheel(version))
    assert (tree.version, tree.label) == (version, f"sglang {version}")


def edit(path: Path) -> None:
    path.write_text(f"{path.read_text()}\n# by hand\n")


@pytest.mark.wheels
@pytest.mark.parametrize("line_ends", ["\n", "\r\n"])
@pytest.mark.parametrize("changed", [None, SWA, CACHE, "sglang/srt/environ.py"])
def test_an_unpacked_wheel_is_its_release_until_somebody_edits_it(
    changed: str | None, line_ends: str, tmp_path: Path
) -> None:
    root = unpack("0.5.18", tmp_path)
    for path in root.rglob("*.py"):
        path.write_bytes(path.read_bytes().replace(b"\n", line_ends.encode()))
    if changed:
        edit(root / changed)
    tree = from_folder(root)
    assert (tree.version, tree.label) == (
        (None, f"sglang 0.5.18 (changed, {root})") if changed else ("0.5.18", "sglang 0.5.18")
    )


@pytest.mark.wheels
def test_a_wheel_packed_again_after_an_edit_is_a_candidate(tmp_path: Path) -> None:
    packed = tmp_path / wheel("0.5.18").name
    with zipfile.ZipFile(wheel("0.5.18")) as real, zipfile.ZipFile(packed, "w") as mine:
        for name in real.namelist():
            if name.startswith(("sglang/srt/mem_cache/", "sglang-0.5.18.dist-info/")):
                mine.writestr(name, real.read(name) + (b"# mine\n" if name == SWA else b""))
    target = open_target(str(packed), "cpu")
    assert (target.version, target.name) == (None, f"sglang 0.5.18 (changed, {packed})")


CHECKOUTS = {  # what is done after the tag -> version, label
    "nothing": ("0.5.18", "sglang 0.5.18"),
    "edited": (None, "sglang v0.5.18-dirty"),
    "hidden": (None, "sglang 0.5.18 (changed, {})"),
    "a new module": (None, "sglang 0.5.18 (changed, {})"),
    "committed": (None, "sglang v0.5.18-1-g"),
}


@pytest.mark.wheels
@pytest.mark.parametrize("after", CHECKOUTS)
def test_a_checkout_is_a_release_at_its_tag_and_untouched(after: str, tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run([*GIT, *words], cwd=tmp_path, check=True, capture_output=True)

    swa = unpack("0.5.18", tmp_path, "python") / "python" / SWA
    (tmp_path / ".gitignore").write_text("sglang-*\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", "the release")
    git("tag", "v0.5.18")
    if after == "hidden":
        git("update-index", "--assume-unchanged", f"python/{SWA}")
    if after in ("edited", "hidden", "committed"):
        edit(swa)
    if after == "a new module":
        (swa.parent / "mine.py").write_text("")
    if after == "committed":
        git("commit", "-q", "-a", "-m", "one more")
    tree = from_folder(tmp_path)
    version, label = CHECKOUTS[after]
    assert (tree.version, tree.label[: len(label.format(tmp_path))]) == (
        version,
        label.format(tmp_path),
    )


@pytest.mark.wheels
def test_targets_of_one_name_are_told_apart(tmp_path: Path) -> None:
    copies = [str(unpack("0.5.18", tmp_path / name)) for name in "ab"]
    names = [target.name for target in open_targets([*copies, str(wheel("0.5.19"))], "cpu")]
    assert names == [*(f"sglang 0.5.18 ({copy})" for copy in copies), "sglang 0.5.19"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mine.toml", "mine.toml: a scenario, not a target; `swaleak repro mine.toml` runs it"),
        ("t.jsonl", "t.jsonl: a trace, not a target; `swaleak replay t.jsonl` runs it"),
    ],
)
def test_a_scenario_or_trace_is_no_target(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 2, so that a typo aborts a bisect: 125 would skip every commit."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("")
    with pytest.raises(UsageError) as caught:
        open_target(name, "cpu")
    assert str(caught.value) == said


# a cache of these releases frees the locked full page of a tombstone that it recovers (#29352)
STOLEN = {"tree/recovery", "tree/recovery-later", "tree/two-nodes"}


@pytest.mark.wheels
@pytest.mark.parametrize(
    ("target", "strict", "code", "failing"),
    [
        ("0.5.13.post1", False, 1, {"partial-page-free", *STOLEN}),
        ("0.5.14", False, 1, STOLEN),
        ("0.5.17", False, 0, set()),
        ("0.5.18", False, 1, {"tombstone-recovery", "tree/recovery", "tree/two-nodes"}),
        ("0.5.19", False, 0, set()),
        ("0.5.23", False, 0, set()),
        ("0.5.19", True, 1, {"nested-group", "grouped-free-adopt"}),
    ],
)
def test_the_gate(target: str, strict: bool, code: int, failing: set[str], cli: Cli) -> None:
    answer = cli("check", wheel(target), *(["--strict"] if strict else []), "-f", "json")
    results = json.loads(answer.out)["results"]
    failed = [r for r in results if r["verdict"] not in ("clean", "refused")]
    bad = {r["scenario"].partition(":")[0] for r in failed}
    assert answer.code == code
    assert failing <= bad if strict else failing == bad
    assert {r["reach"] for r in results} == {"production"} | ({"latent"} if strict else set())
    assert strict or all(r["known"] for r in failed)
