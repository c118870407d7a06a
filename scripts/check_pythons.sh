#!/bin/sh
# The wheel in a clean environment for every Python that the classifiers name and this machine has; one that is not here
# is skipped, and said. PYTHONS: others, by name or path. TORCH: the PyTorch to install first, from pip's own index.
set -eu
here="$(cd "$(dirname "$0")/.." && pwd)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
export XDG_CACHE_HOME="$work/cache"  # what this user has measured, with another version perhaps, is not asked
"${PYTHON:-python3}" -m pip wheel -q --no-deps -w "$work" "$here"
for python in ${PYTHONS:-python3.11 python3.12 python3.13 python3.14}; do
    if ! "$python" -c "" 2> /dev/null; then
        echo "$python: skipped, it is not here"
        continue
    fi
    "$python" -m venv "$work/venv"
    "$work/venv/bin/pip" install -q "${TORCH:-torch==2.13.0}"
    "$work/venv/bin/pip" install -q "$work"/ironlaw-*.whl
    IRONLAW="$work/venv/bin/ironlaw" sh "$here/scripts/check_install.sh" > "$work/log" 2>&1 || { cat "$work/log"; exit 1; }
    echo "$python: $(tail -n 1 "$work/log")"
    rm -rf "$work/venv"
done
