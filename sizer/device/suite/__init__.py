"""Many measurements, one after the other, each written to files."""
