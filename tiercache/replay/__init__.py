"""Replaying request traces against policies, models and budgets: what would be saved, and what could be.

The policies are those of the node (`tiercache.core.policy`); only the bytes are imagined.
"""
