"""What an installed draco consists of and can do: the wheel's contents, its one command, pins against bad releases."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support import ROOT

PACKAGES = ("draco", "callbacks", "conf")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A freshly built wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "-w", str(folder), str(ROOT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("draco-*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(built: Path) -> set[str]:
    """Paths inside it."""
    with zipfile.ZipFile(built) as archive:
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


# -- the command ---------------------------------------------------------------------------------------------------

Shell = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def binaries(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel in it, and the dependencies of this one: nothing is downloaded."""
    folder = tmp_path_factory.mktemp("user") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(built)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    here = dict.fromkeys(sysconfig.get_paths()[name] for name in ("purelib", "platlib"))
    (packages / "dependencies.pth").write_text("\n".join(here) + "\n", encoding="utf-8")
    return folder / "bin"


@pytest.fixture(scope="module")
def shell(binaries: Path, tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """Runs a command line in an empty folder, with the new environment on PATH."""
    folder = tmp_path_factory.mktemp("empty")
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env |= {"PATH": f"{binaries}:{env['PATH']}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}

    def run(line: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["bash", "-c", line], cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=600
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run


def test_a_user_trains_evaluates_reports_and_replays_in_an_empty_folder(shell: Shell) -> None:
    assert shell("which draco; ls -A").stdout.count("\n") == 1
    sizes = "steps=1 tasks_per_step=2 group_size=2 eval.tasks=2 policy.rank=4 limits.max_response_tokens=200"
    trained = shell(f"draco train run=runs/mine {sizes}")
    assert "2 held-out tasks of test_normal" in trained.stdout
    (folder,) = shell("ls -d $PWD/runs/mine").stdout.split()
    run = Path(folder)
    assert (run / "report.html").is_file()
    evaluated = shell("draco evaluate runs/mine split=dev tasks=2 n=2").stdout
    assert "dev, 2 tasks × 2 runs, step=000001" in evaluated
    assert json.loads((run / "evaluations" / "dev-step=000001-n2-first2.json").read_text())["tasks"] == 2
    assert "every reward and credit is equal to the bit" in shell("draco replay runs/mine").stdout
    pytest.importorskip("matplotlib", reason="matplotlib comes with the extra `report`")
    assert "page:    runs/mine/report.html" in shell("draco report runs/mine png=false").stdout
    assert (run / "report.md").is_file()


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("draco train steps=-1", 2, "error: steps is -1; expected an integer ≥ 0"),
        ("draco train stesp=1", 2, "error: Could not override 'stesp': no such option; did you mean steps?"),
        (
            "draco evaluate /nowhere",
            2,
            "error: run=/nowhere: no run there (config.yaml not found); pass the run folder",
        ),
        ("draco replay x y=1", 2, "error: unknown option y; options of draco replay: every, judge,"),
        ("draco nope", 2, "error: draco has no verb 'nope'; Verbs: train, evaluate,"),
    ],
)
def test_what_cannot_work_is_one_line_and_status_2(line: str, code: int, said: str, shell: Shell) -> None:
    done = shell(line, code=code)
    assert not done.stdout
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("draco rep", ["replay ", "report "]),
        ("draco completion z", ["zsh "]),
        ("draco report runs/x png=", ["false ", "true "]),
        ("draco report wi", ["window="]),
        ("draco train rubric=s", ["self_judge ", "static "]),
        ("draco train env=desk limits.max_t", ["limits.max_turn_tokens=", "limits.max_turns="]),
        ("draco judge x.jsonl judge=litellm judge.max_us", ["judge.max_usd="]),
    ],
)
def test_bash_completes(typed: str, found: list[str], shell: Shell) -> None:
    """As readline calls it: COMP_WORDS are cut at = and the part after it is replaced."""
    asked = f"""eval "$(draco completion bash)"; COMP_LINE='{typed}'; COMP_POINT=${{#COMP_LINE}}
        complete -p draco; _draco_complete; printf '%s\\n' "${{COMPREPLY[@]}}" """
    registered, *replies = shell(asked).stdout.splitlines()
    assert registered == "complete -o default -o nospace -F _draco_complete draco"
    assert replies == found


def test_tab_in_an_interactive_bash(binaries: Path, tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        env = {"PATH": f"{binaries}:{os.environ['PATH']}", "HOME": str(tmp_path), "PS1": "$ ", "TERM": "dumb"}
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], env)
    try:
        os.write(terminal, b'eval "$(draco completion bash)"; echo rea""dy\n')
        assert "ready" in _until(terminal, "ready")
        os.write(terminal, b"draco trai\trubric=stati\tcredit=unif\t")
        assert "draco train rubric=static credit=uniform " in _until(terminal, "credit=uniform ")
    finally:
        os.close(terminal)
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def _until(terminal: int, words: str, within_s: float = 60) -> str:
    """What a terminal shows, up to some words."""
    shown, end = "", time.monotonic() + within_s
    while words not in shown.rpartition("bash")[2] and time.monotonic() < end:
        if select.select([terminal], [], [], 1.0)[0]:
            shown += os.read(terminal, 4096).decode(errors="replace").replace("\a", "")
    return shown


@pytest.mark.parametrize("name", ["zsh", "fish"])
def test_other_shells_read_their_scripts(name: str, shell: Shell) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"no {name} here")
    shell(f"draco completion {name} > script && {name} -n script")


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish here")
def test_fish_completes(shell: Shell) -> None:
    found = shell("draco completion fish > script; fish -c \"source script; complete -C 'draco train rubric=st'\"")
    assert "rubric=static" in found.stdout.split()
