"""`python -m tiercache` is the `tiercache` command."""

from tiercache.cli import main

main()
