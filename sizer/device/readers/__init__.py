"""A device's own counters and events, one reader for each kind."""
