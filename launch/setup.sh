#!/usr/bin/env bash
# Makes the environment in .venv and keeps it in step with setup.cfg and launch/constraints.txt.
# Instant and silent when nothing changed. PYTHON=/path/to/python chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv
STAMP=$VENV/installed       # what is installed; written last
UNFINISHED=$VENV/unfinished # there while an installation runs, so that an interrupted one is seen
NEEDED_GB=9

fail() {
    printf 'error: %s\n  where: %s\n  fix:   %s\n' "$1" "$2" "$3" >&2
    exit 2
}

# Prints major.minor of a usable interpreter, or says on stdout why it is none.
examine() {
    "$1" - 2>/dev/null <<'PYTHON' || echo "does not start"
import sys

version = "%d.%d" % sys.version_info[:2]
if not (3, 10) <= sys.version_info[:2] < (3, 14):
    print("is Python " + version)
else:
    try:
        import ensurepip
        import venv
    except ImportError:
        print("is Python " + version + " without venv")
    else:
        print(version)
PYTHON
}

# 3.11 and 3.12 are preferred: the TPU's compiler has wheels for them only.
find_python() {
    local candidate verdict second="" refused=""
    for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.13 python3.10 python}; do
        command -v "$candidate" >/dev/null || continue
        verdict=$(examine "$candidate")
        case $verdict in
        3.11 | 3.12)
            echo "$candidate"
            return
            ;;
        3.10 | 3.13) second=${second:-$candidate} ;;
        *) refused+="${refused:+, }$candidate $verdict" ;;
        esac
    done
    if [[ -n $second ]]; then
        echo "$second"
    elif [[ $refused =~ is\ Python\ (3\.[0-9]+)\ without\ venv ]]; then
        fail "Python cannot make an environment: $refused" "PATH" \
            "apt-get install python${BASH_REMATCH[1]}-venv, then make again"
    else
        fail "no Python from 3.10 to 3.13 was found${refused:+: $refused}" "PATH" \
            "install Python 3.12, or name one: make PYTHON=/path/to/python3.12"
    fi
}

wanted_key() {
    { cat setup.cfg launch/constraints.txt && pwd -P; } | sha256sum | cut -d ' ' -f 1
}

# Two makes at once: the second waits, and finds the work done.
if command -v flock >/dev/null; then
    exec 9>.venv.lock
    flock 9
fi

key=$(wanted_key)
if [[ -f $STAMP && $(<"$STAMP") == "$key" ]] && "$VENV/bin/python" -c "" 2>/dev/null; then
    exit 0
fi

[[ $(uname -s) == Linux && $(uname -m) == x86_64 ]] ||
    fail "torch_xla has wheels for Linux on x86-64 only" "$(uname -sm)" "use such a machine, or a container of one"

if [[ -e $UNFINISHED ]] || ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    free_gb=$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')
    ((free_gb >= NEEDED_GB)) ||
        fail "the environment needs about $NEEDED_GB GB, and $free_gb GB are free" "$PWD" "free space on that disk"
    echo "Setting up .venv with $("$python" --version): torch and torch_xla take a few minutes and 7 GB, once." >&2
    rm -rf "$VENV"
    "$python" -m venv "$VENV" || fail "the environment could not be made (the reason stands above)" "$PWD/$VENV" \
        "mend that, then make again"
else
    echo "Bringing .venv in step with setup.cfg and launch/constraints.txt." >&2
fi

# The TPU's compiler judges programs on any machine, and has wheels for 3.11 and 3.12 only.
extras=dev
case $(examine "$VENV/bin/python") in 3.11 | 3.12) extras+=,tpu-compiler ;; esac

rm -f "$STAMP"
touch "$UNFINISHED"
PIP_DISABLE_PIP_VERSION_CHECK=1 "$VENV/bin/python" -m pip install -qq -c launch/constraints.txt -e ".[$extras]" ||
    fail "pip could not install the packages (its reason stands above)" "$PWD/$VENV" \
        "mend that, then make again: it begins anew"
rm -f "$UNFINISHED"
echo "$key" >"$STAMP"
