"""What an installed draco consists of: the wheel's contents, and pins that keep known bad releases out."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile

import pytest
from packaging.requirements import Requirement
from support import ROOT

PACKAGES = ("draco", "callbacks", "conf")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Paths inside a freshly built wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run([*command, "-w", str(folder), str(ROOT)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("draco-*.whl")
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def sources() -> set[str]:
    """Every file of the packages in this checkout, relative to it."""
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file())
    # Bytecode is not ours, and another test run may be writing some under a passing name just now.
    return {path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts}


def test_every_file_of_the_packages_is_in_the_wheel(wheel: set[str]) -> None:
    missing = sources() - wheel
    assert not missing, f"not in the wheel (ignored by .gitignore?): {sorted(missing)}"


@pytest.mark.parametrize(
    ("prefix", "suffix"),
    [
        ("draco/", ".py"),
        ("callbacks/", ".py"),
        ("conf/", ".yaml"),
        ("conf/rubric/", ".yaml"),
        ("draco/judge/prompts/", ".md"),
        ("draco/env/appworld/inside/", "server.py"),
        ("draco/env/appworld/prompts/", ".md"),
        ("draco/env/desk/", "rubric.yaml"),
        ("draco/policy/tiny/", ".safetensors"),
        ("draco/policy/tiny/", "tokenizer.json"),
    ],
)
def test_the_wheel_holds_code_and_data(wheel: set[str], prefix: str, suffix: str) -> None:
    assert any(name.startswith(prefix) and name.endswith(suffix) for name in wheel)


def test_the_wheel_holds_nothing_else(wheel: set[str]) -> None:
    others = {name for name in wheel if not name.startswith((*(f"{package}/" for package in PACKAGES), "draco-"))}
    assert not others
    assert any(name.endswith("/licenses/LICENSE") for name in wheel)
    assert any(name.endswith("/entry_points.txt") for name in wheel)


def requirements() -> dict[str, Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    parsed = [Requirement(line) for line in project["dependencies"]]
    return {requirement.name: requirement for requirement in parsed}


@pytest.mark.parametrize(
    ("name", "version"),
    [("lightning", "2.6.2"), ("lightning", "2.6.3"), ("litellm", "1.82.7"), ("litellm", "1.82.8")],
)
def test_releases_with_malware_are_excluded_by_name(name: str, version: str) -> None:
    specifier = requirements()[name].specifier
    assert f"!={version}" in {str(part) for part in specifier}  # by name: a wider range later must not let it back in
    assert version not in specifier


def test_every_dependency_has_an_upper_bound() -> None:
    for requirement in requirements().values():
        assert "99999" not in requirement.specifier, f"{requirement} has no upper bound"


def test_licence_text_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


@pytest.mark.parametrize("script", ["scripts/check", "scripts/setup_appworld.sh", ".ci/run"])
def test_scripts_are_executable_and_parse(script: str) -> None:
    path = ROOT / script
    assert path.stat().st_mode & 0o111
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
