#!/bin/sh
# sh tests/try_wheel.sh PYTHON OTHER WHEEL FOLDER: installs the wheel into a bare environment in FOLDER
# and trains and simulates there, where no compiler is to be had. What the wheel depends on is read
# from the environment of OTHER, another Python.
set -eu
python=$1 other=$2 wheel=$3 bare=$4
rm -rf "$bare"
"$python" -m venv "$bare"
"$bare/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "$wheel"
where='import sysconfig; print(sysconfig.get_path("purelib"))'
"$other" -c "$where" > "$("$bare/bin/python" -c "$where")/others.pth"

cd "$bare"
PATH=$PWD/bin CC=/nowhere CXX=/nowhere
export PATH CC CXX
bin/python -c 'import runtime, sys; assert runtime.__file__.startswith(sys.prefix), runtime.__file__'
bin/persia-runtime train --data synthetic --steps 2 --batch 32 --test-rows 200 --model.hidden 8 --out run
bin/persia-sim --cluster this-host --workload taobao-ad --steps 20
echo "the wheel works in $PWD, without a compiler"
