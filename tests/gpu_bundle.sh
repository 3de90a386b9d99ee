#!/bin/sh
# What `make gpu-bundle` carries to a machine without network, as run.sh beside tree.tar.gz and
# wheels/: installs into a folder of its own, then tests, profiles and measures speeds on the GPU.
#   sh run.sh [--out DIR] [--device cpu]
# cpu does the same in small, to see that it runs.
# PYTHON: 3.11 or later with torch (any build), numpy, pandas, pyarrow, scipy, scikit-learn,
# matplotlib, tqdm and pytest; beside it a C++ compiler, cmake and ninja.
# PERSIA_SITE: where to install; a second run finds it there.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
site=${PERSIA_SITE:-${TMPDIR:-/tmp}/persia-gpu-$(id -u)}
out=gpu
device=cuda
while [ $# -gt 0 ]; do
    case $1 in
    --out) out=$2 ;;
    --device) device=$2 ;;
    *) echo "run.sh takes --out DIR and --device, not $1" >&2; exit 2 ;;
    esac
    shift 2
done

mkdir -p "$site" "$out"
site=$(cd "$site" && pwd)
out=$(cd "$out" && pwd)
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

if [ "$device" = cpu ]; then
    stages="--dim 4 --hidden 8 --data synthetic:criteo-ad:0.0001"
    speeds="--workloads small --batch 32 --rows 2600 --threads 1 --rounds 1 --window-steps 3"
else
    stages="--hidden 4096 2048 1024 512 256 --threads 8"
    # Fewer rows than on a CPU: to fill ten million takes longer than to measure with them.
    speeds="--workloads paper --precision float32 bfloat16 --rows 2600000 --threads 8 --rounds 4"
    speeds="$speeds --window-steps 42"
fi
cd "$site/at"

# A part that fails stops no other one: each leaves its words in a file of its own.
failed=
part() { # its name, then its command
    name=$1
    shift
    echo "$name ..."
    "$@" >"$out/$name.txt" 2>&1 || { echo "$name failed:"; tail -5 "$out/$name.txt"; failed=1; }
}
# shellcheck disable=SC2086  # options are words of their own
{
    part tests "$python" -m pytest -v -m gpu -p no:cacheprovider tests/runtime/test_gpu.py
    part profile "$python" -m runtime profile --no-processes --device "$device" $stages \
        --out "$out/profile.json"
    part speeds "$python" -m experiments bench-peers --device "$device" $speeds --out "$out" \
        --systems dense-only "ours sync" "ours hybrid"
}
[ -z "$failed" ]
