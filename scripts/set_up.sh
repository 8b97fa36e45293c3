#!/bin/sh
# Finds a Python that Telescope runs on and hands over to scripts/set_up.py. PYTHON=/path/to/python names one instead.
set -eu
cd "$(dirname "$0")/.."

supported='import sys; sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 13) and sys.implementation.name == "cpython"))'

for candidate in python3 python3.12 python3.11 python3.13 python; do
    candidate=${PYTHON:-$candidate}
    if "$candidate" -c "$supported" >/dev/null 2>&1; then
        exec "$candidate" scripts/set_up.py "$@"
    fi
done

if [ -n "${PYTHON:-}" ]; then
    echo "set-up: PYTHON=$PYTHON is not a CPython 3.11, 3.12 or 3.13" >&2
else
    echo "set-up: no CPython 3.11, 3.12 or 3.13 on the PATH (python3 is $(python3 -V 2>&1 || echo missing))" >&2
fi
echo "  Debian, Ubuntu:  apt install python3.11 python3.11-venv" >&2
echo "  elsewhere:       install one, or name it:  make setup PYTHON=/path/to/python3.11" >&2
exit 2
