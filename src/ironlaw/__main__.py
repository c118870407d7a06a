"""Entry point of `ironlaw` and of `python -m ironlaw`."""

import sys


def main() -> None:
    try:
        from ironlaw.cli.main import main as run
    except KeyboardInterrupt:  # importing takes a tenth of a second, and more on a busy machine
        print("ironlaw: interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
