"""Many measurements in sequence, each written to files."""
