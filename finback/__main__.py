"""`python -m finback` is the `finback` command."""

from finback.cli.main import main

main()
