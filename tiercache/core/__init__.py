"""Every decision of one node. No I/O, no clock, no threads, no randomness, no waiting."""
