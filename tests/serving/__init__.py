"""Tests of sizer.serving and of what plans a server in sizer.estimating."""
