#!/bin/sh
# An installed Ironlaw, far from its repository: what the wheel must bring is there. IRONLAW: the command to check.
set -eu
ironlaw="${IRONLAW:-ironlaw}"
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"$ironlaw" doctor
"$ironlaw" plan llama3-8b --on 8xh100-sxm-80gb --tokens 1B > plan.txt
"$ironlaw" formats > formats.txt
"$ironlaw" train examples/gpt-tiny.toml --out run --set train.steps=20 --set schedule.warmup_steps=5 \
    --set model.hidden=64 --set data.mock=true
"$ironlaw" explain run > explained.txt
test -s run/report.html
echo "installed and working: $("$ironlaw" --version)"
