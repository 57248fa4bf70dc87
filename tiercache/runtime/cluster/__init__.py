"""This node's place in a cluster: who is there, what they could resume, and the way to it."""
