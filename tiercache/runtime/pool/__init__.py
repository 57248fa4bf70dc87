"""This node and the pool: what it takes from there, what it puts there, and what it knows of it."""
