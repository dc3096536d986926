"""Records of a device, as plain values and as files. No torch."""
