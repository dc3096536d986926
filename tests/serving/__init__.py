"""Tests of sizer.serving and sizer.server."""
