"""Beyond one machine: what other nodes hold, what they are told of this one, and who is worth asking."""
