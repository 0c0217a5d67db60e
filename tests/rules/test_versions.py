"""tested-versions.txt: a version of every package that pyproject.toml names, within the bounds that
it sets, and nothing of the machine that the file was written on. And the bill of materials, which
must not have that either.
"""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(r"([\w.-]+)==([\w.]+)")


def locked() -> dict[str, str]:
    lines = (ROOT / "tested-versions.txt").read_text().splitlines()
    found = [LINE.fullmatch(line) for line in lines if not line.startswith("#")]
    assert None not in found, "a line that is no NAME==VERSION, such as a path or an address"
    return {canonicalize_name(m[1]): m[2] for m in found if m}


def wanted() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    parsed = [Requirement(text) for texts in lists for text in texts]
    return [r for r in parsed if r.name != project["name"]]


def test_every_package_has_a_tested_version_within_its_bounds() -> None:
    versions = locked()
    for requirement in wanted():
        version = versions.get(canonicalize_name(requirement.name))
        assert version is not None, f"`make lock`: {requirement.name} is missing"
        assert version in requirement.specifier, f"{requirement} was tested as {version}"


def test_a_bill_of_materials_has_no_addresses() -> None:
    clean = runpy.run_path(str(ROOT / ".ci" / "bill.py"))["without_addresses"]
    component = {"name": "a", "externalReferences": [{"url": "file:///home/me/a.whl"}]}
    assert clean({"components": [component]}) == {"components": [{"name": "a"}]}
