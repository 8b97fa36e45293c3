#!/bin/bash
# Runs the command of `docker run IMAGE COMMAND`. What is no program is a command of telescope: `train --config F`.

# `--user` with a number that has no account: caches need a folder, and torch asks for a name.
[ -w "${HOME:-/}" ] && [ "${HOME:-/}" != / ] || { export HOME=/tmp/home-$(id -u) && mkdir -p -m 700 "$HOME"; }
export USER=${USER:-$(id -un 2> /dev/null)}

if [ $# -gt 0 ] && ! type -P -- "$1" > /dev/null; then
    set -- telescope "$@"
fi
exec "$@"
