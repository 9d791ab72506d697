"""Prints the table of releases in swaleak/targets/sources.py, from a folder of SGLang's wheels.

python docs/digests.py WHEELS
"""

from __future__ import annotations

import sys
from pathlib import Path

from packaging.version import Version

from swaleak.targets.sources import digest, from_wheel

wheels = {path.name.split("-")[1]: path for path in Path(sys.argv[1]).glob("sglang-*.whl")}
for version in sorted(wheels, key=Version):
    print(f'    "{version}": "{digest(from_wheel(wheels[version]).files)}",')
