#!/bin/sh
# A day with the testbed, from a CSV to a prediction: sh first_day.sh [FOLDER FOR RESULTS]
# Needs the commands of `make install` on the path: . ../.venv/bin/activate
set -eu
cd "$(dirname "$0")"
out=${1:-runs/first-day}
mkdir -p "$out"
try() { printf '\n$ %s\n' "$*"; "$@"; }

# The data: what the columns are, and whether all rows fit.
try persia-runtime data schema clicks.csv > "$out/guessed.txt"
try persia-runtime data check clicks.toml

# One run, with a network of one's own; interrupted, and gone on with.
try persia-runtime train --config run.toml --mode hybrid --tau 4 --ranks 2 --dry-run | head -n 8
set -- train --config run.toml --mode hybrid --tau 4 --ranks 2 --executor concurrent --latency-s 0.05 \
    --model.name my_model:MyNet --checkpoint-every 20 --out "$out/mine"
printf '\n$ %s\n' "persia-runtime $*"
persia-runtime "$@" > "$out/mine.txt" 2>&1 &
run=$!
while ! ls "$out"/mine/checkpoints/*/state.json > "$out/kept.txt" 2>&1 && kill -0 $run; do sleep 0.2; done
kill -TERM $run    # as Ctrl-C does; that of a script would end the script
wait $run || echo "exit code $?"
cat "$out/mine.txt"
try persia-runtime train --resume "$out/mine" --latency-s 0

# What does asynchrony cost here?
try persia-experiments sweep staleness.toml --seeds 2 --set data.name=clicks.toml sync.tau=4 model.hidden=64 32 \
    --out "$out/sweep"

# The model put to use.
try persia-runtime evaluate "$out/mine"
try persia-runtime predict "$out/mine" --data clicks.csv --also user item --out "$out/scores.parquet"
try persia-runtime export "$out/mine" --out "$out/exported"

# The same on a cluster that one does not own: how fast, and what would its order of events do?
try persia-sim --cluster cluster.toml --workload workload.toml --mode hybrid --tau 4 --steps 20 \
    --write-trace "$out/order.npz"
try persia-runtime train --config run.toml --mode hybrid --ranks 8 --executor replay --trace "$out/order.npz" \
    --out "$out/replayed"
