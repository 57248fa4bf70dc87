"""What the nodes of a cluster know of one another, and agree on.

Little is shared: who is there, and which namespaces were flushed. Never a record per object.
"""
