"""A server's question on meta: the architecture is counted, the profile run traced, and `sizer.serving` plans with both."""
