#!/bin/sh
# What the README and the tutorial quote of one machine, on a machine that does nothing else: the demo's output and the
# picture of its report (with Chromium). Then scripts/quotes.py writes the quotes.
set -eu
record=benchmarks/results/demo.txt
processor="$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | sort -u)"
{
    echo "# What the verbs of \`make demo\` printed on $(nproc) cores of $processor on $(date -u +%F). Pages quote from here:"
    echo "# tests/docs/test_commands.py holds them to it, \`make record\` writes it and the quotes again."
    sh scripts/demo.sh runs/demo 2>&1 | sed "s/ *$//; s#$HOME/#~/#"
} > "$record.new"
mv "$record.new" "$record"
chromium="$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)"
if [ -n "$chromium" ]; then
    "$chromium" --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1200,1195 \
        --screenshot=docs/report.png "file://$(pwd)/runs/demo/report.html" 2> /dev/null
fi
"${PYTHON:-python3}" scripts/quotes.py
