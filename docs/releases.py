"""Writes docs/releases.md: every scenario on every release that has the allocator package.

    python docs/releases.py

Releases are fetched with pip and kept in swaleak's cache. A folder of wheels, named by
SWALEAK_WHEELS, is used instead where there is one.
"""

from __future__ import annotations

import os
from pathlib import Path

from swaleak.checker.case import Case, run_case
from swaleak.files import write_text
from swaleak.report.cases import cell_of, failures
from swaleak.scenario import catalogue as scenarios
from swaleak.targets.open import Target, open_target
from swaleak.targets.sources import RELEASES

PAGE = Path(__file__).with_name("releases.md")


def open_release(version: str) -> Target:
    """Return a release as a target on the CPU."""
    folder = os.environ.get("SWALEAK_WHEELS")
    wheels = sorted(Path(folder).glob(f"sglang-{version}-*.whl")) if folder else []
    return open_target(str(wheels[0]) if wheels else version, "cpu")


def page() -> str:
    """Return the page, as Markdown."""
    targets = [open_release(version) for version in RELEASES]
    catalogue = scenarios.catalogue()
    cases = [
        run_case(scenario, target, "shipped", size)
        for scenario in catalogue
        for target in targets
        for size in scenario.page_sizes
    ]

    def of(scenario: str, target: Target | None = None) -> list[Case]:
        return [
            case
            for case in cases
            if case.scenario.name == scenario and target in (None, _by_name[case.target])
        ]

    _by_name = {target.name: target for target in targets}
    head = ["scenario", "reach", *RELEASES]
    rows = [
        [f"[{s.name}](#{s.name})" if any(not c.safe for c in of(s.name)) else s.name, s.reach]
        + [cell_of(of(s.name, target)).text.replace("\n", "<br>") for target in targets]
        for s in catalogue
    ]
    table = [head, ["---"] * len(head), ["ships", "", *(str(t.ships) for t in targets)], *rows]
    parts = [
        "# SGLang's releases, scenario by scenario",
        "Written by `python docs/releases.py`: each release's own `SWATokenToKVPoolAllocator`, as "
        "shipped, driven through the catalogue at every page size. A cell is `ok` with physical/"
        "mapped SWA pages, `refused` (it raised and changed nothing), or the counts and what went "
        "wrong, with the page sizes if not all. *production* has been seen in a server; *latent* "
        "is what only the allocator's signature allows. `ships` is how a grouped `free_swa` of "
        "that release decides whose page it frees, found by trying it.",
        "\n".join(f"| {' | '.join(row)} |" for row in table),
    ]
    for scenario in catalogue:
        failed = failures(of(scenario.name))
        if failed:
            record = ", ".join(f"sgl-project/sglang {number}" for number in scenario.upstream)
            parts += [
                f"## {scenario.name}",
                f"{scenario.title}. {' '.join(scenario.story.split())}",
                "\n".join(f"* {line.removeprefix(f'{scenario.name} ')}" for line in failed),
                *([f"Public record: {record}."] if record else []),
            ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    write_text(page(), PAGE)
    print(f"wrote {PAGE}")
