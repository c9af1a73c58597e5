"""`python -m cskv_cli`."""

from cskv_cli.app import main

main()
