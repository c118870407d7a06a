#!/bin/sh
# Plan, train and explain a small GPT on real text; every verb is printed before its output.
set -eu
ironlaw="${IRONLAW:-ironlaw}"
run="${1:-runs/demo}"
config=examples/gpt-tiny.toml

say() {
    printf '\n$ %s\n' "$1"
}

# A demo may be repeated: its last run makes room, a run under another name is never touched.
rm -rf "$run"

say "ironlaw measure"
"$ironlaw" measure
say "ironlaw plan $config"
"$ironlaw" plan "$config"
say "ironlaw train $config --out $run"
"$ironlaw" train "$config" --out "$run"
say "ironlaw explain $run"
"$ironlaw" explain "$run"
say "ironlaw generate $run --prompt \"def \""
"$ironlaw" generate "$run" --prompt "def "
