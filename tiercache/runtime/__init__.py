"""The sidecar process: the only place that awaits. It joins core, wire and tiers."""
