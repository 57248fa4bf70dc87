"""What chooses: eviction, admission to NVMe, checkpoint placement. One policy per file.

A policy never moves bytes and never sees the machine; what it answers is executed elsewhere.
"""
