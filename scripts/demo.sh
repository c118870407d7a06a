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

# The model it trained, served: 20 requests at once, and where their time went.
load="$run-load"
log="$run/serve.log"
rm -rf "$load"
say "ironlaw serve $run --port 0"
"$ironlaw" serve "$run" --port 0 --json > "$log" 2>&1 &
server=$!
trap 'kill "$server" 2>/dev/null || true' EXIT
url=""
while [ -z "$url" ]; do
    kill -0 "$server" 2>/dev/null || { cat "$log"; exit 1; }
    sleep 0.2
    url=$(sed -n 's/.*"url": "\([^"]*\)".*/\1/p' "$log")
done
tail -n +2 "$log"
say "ironlaw bench $url --concurrency 20 --requests 20 --input 64 --output 64 --out $load"
"$ironlaw" bench "$url" --concurrency 20 --requests 20 --input 64 --output 64 --out "$load"
kill "$server"
wait "$server" || true
say "ironlaw explain $load"
"$ironlaw" explain "$load"
