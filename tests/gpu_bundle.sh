#!/bin/sh
# What `make gpu-bundle` carries to a machine without network, as run.sh beside tree.tar.gz and
# wheels/: installs into a folder of its own and runs `experiments gpu`, whose options it takes.
#   sh run.sh --out DIR [--device cpu]
# PYTHON: 3.11 or later with torch (any build), numpy, pandas, pyarrow, scipy, scikit-learn,
# matplotlib, jinja2, tqdm and pytest; beside it a C++ compiler, cmake and ninja.
# PERSIA_SITE: where to install; a second run finds it there.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
start=$(pwd)
python=${PYTHON:-python3}
site=${PERSIA_SITE:-${TMPDIR:-/tmp}/persia-gpu-$(id -u)}
mkdir -p "$site"
site=$(cd "$site" && pwd)
export PYTHONPATH="$site/packages${PYTHONPATH:+:$PYTHONPATH}"
if [ ! -e "$site/installed" ]; then
    mkdir -p "$site/tree"
    tar -xzf "$here/tree.tar.gz" -C "$site/tree"
    # The pin of torch must not reach the torch that is here: nothing is resolved.
    "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --upgrade \
        --target "$site/packages" "$here"/wheels/*.whl
    "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --upgrade \
        --no-build-isolation --target "$site/packages" "$site/tree"
    # The tests, without the packages beside them, which have no compiled kernels there.
    mkdir -p "$site/at"
    cp -r "$site/tree/tests" "$site/tree/pyproject.toml" "$site/at/"
    touch "$site/installed"
fi
out=
take=
for word in "$@"; do  # a folder is meant from where this was called
    shift
    if [ -n "$take" ]; then
        case $word in /*) ;; *) word=$start/$word ;; esac
        take=
    elif [ "$word" = --out ]; then
        take=yes out=yes
    fi
    set -- "$@" "$word"
done
[ -n "$out" ] || set -- "$@" --out "$start/gpu"
cd "$site/at"
exec "$python" -m experiments gpu "$@"
