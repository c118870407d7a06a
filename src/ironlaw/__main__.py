"""`python -m ironlaw` is `ironlaw`."""

from ironlaw.cli.main import main

main()
