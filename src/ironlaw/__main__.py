"""Entry point of `python -m ironlaw`."""

from ironlaw.cli.main import main

main()
