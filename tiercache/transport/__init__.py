"""Moves bytes between nodes. A transport knows nothing of models, policy or leases."""
