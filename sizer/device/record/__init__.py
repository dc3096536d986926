"""What a device showed, as plain values and as files. No torch."""
