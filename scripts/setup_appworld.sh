#!/usr/bin/env bash
# Sets up AppWorld for draco: its own Python environment with exact pins, the engine, and the data. Safe to repeat: what is
# there and up to date is kept.
#
#   scripts/setup_appworld.sh                   environment and engine only (about 230 MB)
#   scripts/setup_appworld.sh --data download   and AppWorld's tasks (a 193 MB download), into .appworld
#   scripts/setup_appworld.sh --data mini       and nine miniature tasks of our own, built here, into .appworld-mini (tests)
#   scripts/setup_appworld.sh --data FOLDER     and the data of an AppWorld root that you already have, into .appworld
#
#   --venv DIR    the environment (default .venv-appworld)
#   --into DIR    where the data goes (default as above)
#   --python EXE  interpreter to make the environment with (default: python3.11, else the first python3 >= 3.11)
#   PIP_ARGS='…'  extra arguments for pip, such as another index
#
# AppWorld's authors ask that its unpacked code and data, and anything derived from them, are not published: keep the folders
# out of version control and of images that you share.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
lock="$root/scripts/appworld.lock"
inside="$root/draco/env/appworld/inside"
mini="$root/tests/support/appworld_mini.py"
venv="$root/.venv-appworld" data='' into='' python=''

fail() { echo "error: $*" >&2; exit 1; }

while [ $# -gt 0 ]; do
    case "$1" in
        --data | --venv | --into | --python)
            [ $# -ge 2 ] || fail "$1 needs a value"
            case "$1" in
                --data) data="$2" ;; --venv) venv="$2" ;; --into) into="$2" ;; --python) python="$2" ;;
            esac
            shift 2 ;;
        -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) fail "unknown argument $1 (try --help)" ;;
    esac
done
case "$venv" in /*) ;; *) venv="$PWD/$venv" ;; esac

usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

wanted="$(sha256sum "$lock" | cut -d' ' -f1)"
stamp="$venv/.draco-appworld"
export APPWORLD_CACHE="$venv/appworld-cache"
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    echo "environment: $venv is up to date"
else
    if [ -z "$python" ]; then
        for candidate in python3.11 python3.12 python3 python3.13; do
            if usable "$candidate"; then python="$candidate"; break; fi
        done
    fi
    [ -n "$python" ] && usable "$python" || fail "no usable Python: need >= 3.11 with venv and ensurepip; name one with --python"
    echo "environment: making $venv with $("$python" --version) and $(grep -vc '^#' "$lock") pinned packages (about 230 MB) ..."
    "$python" -m venv --clear "$venv"
    # shellcheck disable=SC2086 # PIP_ARGS is a list of words
    "$venv/bin/python" -m pip install --disable-pip-version-check -qq ${PIP_ARGS:-} --no-deps -r "$lock"
    "$venv/bin/python" -m pip check --disable-pip-version-check >/dev/null || fail "the pinned packages do not fit this Python: use Python 3.11 (--python)"
    echo "engine: unpacking AppWorld's apps and tests ..."
    "$venv/bin/appworld" install >/dev/null
    "$venv/bin/python" -m compileall -q "$venv"/lib/python*/site-packages >/dev/null || true
    echo "$wanted" > "$stamp"
fi

case "$data" in
    '') ;;
    mini) [ -n "$into" ] || into="$root/.appworld-mini" ;;
    download) [ -n "$into" ] || into="$root/.appworld" ;;
    *) [ -d "$data/data/tasks" ] || fail "--data $data: expected download, mini, or a folder that holds data/tasks"
       [ -n "$into" ] || into="$root/.appworld" ;;
esac
if [ -n "$data" ]; then
    case "$into" in /*) ;; *) into="$PWD/$into" ;; esac
    case "$into" in *memory*) fail "--into $into: no path may hold the word 'memory' (AppWorld takes it for a database in memory)" ;; esac
    builders=("$inside/data_roots.py")
    if [ "$data" = mini ]; then builders+=("$mini"); fi
    version="$data $wanted $(cat "${builders[@]}" | sha256sum | cut -d' ' -f1)"
    if [ "$(cat "$into/.draco-data" 2>/dev/null)" = "$version" ]; then
        echo "data: $into is up to date"
    else
        work="$(mktemp -d "${into%/*}/.appworld-work.XXXXXX")"
        trap 'rm -rf "$work"' EXIT
        source="$work"
        case "$data" in
            mini)
                echo "data: building nine miniature tasks ..."
                APPWORLD_ROOT="$work" "$venv/bin/python" -P "$mini" "$work" >/dev/null ;;
            download)
                echo "data: downloading AppWorld's tasks (193 MB) ..."
                APPWORLD_ROOT="$work" "$venv/bin/appworld" download data --root "$work" ||
                    fail "the download failed; download on another machine (appworld download data) and pass --data FOLDER" ;;
            *) source="$data" ;;
        esac
        echo "data: writing $into (full for the evaluator, rollout without any ground truth) ..."
        "$venv/bin/python" -I "$inside/data_roots.py" "$source" "$into"
        echo "$version" > "$into/.draco-data"
    fi
fi

echo
echo 'Next:'
if [ -z "$data" ]; then
    echo '  scripts/setup_appworld.sh --data download     the real tasks (or --data mini to try things out)'
elif [ "$data" = mini ]; then
    echo '  make test-appworld                            the AppWorld tests, on these tasks'
    echo "  draco train env=appworld env.python=$venv/bin/python env.data=$into policy=hf policy.path=MODEL judge=litellm judge.model=PROVIDER/MODEL tasks_per_step=3 …"
else
    echo '  draco train experiment=appworld_qwen36_27b                    training (see conf/experiment/)'
    echo '  draco evaluate run=runs/NAME env=appworld split=test_normal,test_challenge n=3 checkpoints=last3'
fi
[ "$venv" = "$root/.venv-appworld" ] || echo "  (with env.python=$venv/bin/python)"
if [ -n "$into" ] && [ "$into" != "$root/.appworld" ]; then echo "  (with env.data=$into)"; fi
